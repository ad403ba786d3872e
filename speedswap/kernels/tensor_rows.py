"""gather_rows and scatter_rows for tensors: fast ``index_select`` and ``index_copy_`` along dimension 0."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap.errors import DuplicateIdError
from speedswap.kernels import _C
from speedswap.kernels.copies import gather_records, scatter_records
from speedswap.kernels.host import as_ids, empty, get_num_threads, require_apart, require_dense
from speedswap.kernels.ids import check_ids, first_duplicate, last_occurrences, require_id_dtype
from speedswap.kernels.records import Part, Records

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def gather_rows(source: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy rows out of a tensor: ``source[ids]``. Autograd does not see it.

    Args:
        source: shape (rows, dim), any dtype with a fixed item size, any strides, on the CPU or a GPU.
        ids: int32 or int64, shape (n,), on any device.
        out: receives the rows: shape (n, dim), source's dtype, on any device. By default a new tensor, on the ids'
            device for a source on the CPU, on the source's for one on a GPU.

    Returns:
        The rows, shape (n, dim): ``out`` itself if given.

    Raises:
        IdError: an id is negative or not below source's rows. Nothing was copied.
        TypeError, ValueError: an argument has the wrong dtype, shape or device. Nothing was copied.

    >>> gather_rows(torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([1, 1, 0]))
    tensor([[3., 4.],
            [3., 4.],
            [1., 2.]])
    """
    _require_matrix(source, "source")
    _require_vector(ids)
    shape = (len(ids), source.shape[1])
    if out is None:
        check_ids(ids, source.shape[0], "source")
        out = empty(shape, source.dtype, ids.device if source.device.type == "cpu" else source.device)
    else:
        _require_rows(out, "out", shape, source, "source")
        require_apart(out, "out", source, "source")
        require_apart(out, "out", ids, "ids")
        _require_own_rows(out, "out")
        check_ids(ids, source.shape[0], "source")
    if out.numel():
        _gather(source, ids, out)
        _written(out)
    return out


def scatter_rows(target: Tensor, ids: Tensor, values: Tensor, *, duplicates: str = "error") -> None:
    """Copy rows into a tensor: ``target[ids] = values``. Autograd does not see it.

    Args:
        target: shape (rows, dim), any dtype with a fixed item size, any strides without overlap, on the CPU or a GPU.
        ids: int32 or int64, shape (n,), on any device.
        values: shape (n, dim), target's dtype, on any device.
        duplicates: ``"error"`` refuses ids that occur twice; ``"last"`` writes the last row of each.

    Raises:
        IdError: an id is negative or not below target's rows. Nothing was written.
        DuplicateIdError: an id occurs twice and duplicates is "error". Nothing was written.
        TypeError, ValueError: an argument has the wrong dtype, shape or device. Nothing was written.

    >>> target = torch.zeros(3, 2)
    >>> scatter_rows(target, torch.tensor([2, 0]), torch.tensor([[1., 2.], [3., 4.]]))
    >>> target
    tensor([[3., 4.],
            [0., 0.],
            [1., 2.]])
    """
    _require_matrix(target, "target")
    _require_vector(ids)
    _require_rows(values, "values", (len(ids), target.shape[1]), target, "target")
    require_apart(values, "values", target, "target")
    require_apart(target, "target", ids, "ids")
    _require_own_rows(target, "target")
    if duplicates not in ("error", "last"):
        raise ValueError(f'duplicates is {duplicates!r}; choose "error" or "last"')
    check_ids(ids, target.shape[0], "target")
    position = first_duplicate(ids, target.shape[0])
    if position >= 0:
        if duplicates == "error":
            raise DuplicateIdError(
                f"ids[{position}] is {int(ids[position])}, which occurs before it in ids; "
                'make the ids unique, or pass duplicates="last" to keep the last row of each'
            )
        last = last_occurrences(ids)
        ids, values = ids[last], gather_rows(values, last)
    if values.numel():
        _scatter(target, ids, values)
        _written(target)


def _gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    if source.stride(1) != 1:
        same_size = _SAME_SIZE[source.element_size()]
        rows = torch.index_select(source.detach().view(same_size), 0, ids.to(source.device))
        out.detach().view(same_size).copy_(rows)
    elif source.device.type == "cpu" and out.device.type == "cpu" and out.stride(1) == 1:
        ids = as_ids(ids)
        parts = [(0, _row_bytes(out), out.data_ptr(), out.stride(0) * out.element_size())]
        _C.gather(*_pitch(source), ids.data_ptr(), len(ids), parts, get_num_threads())
    elif out.is_contiguous():
        gather_records(_records(source), ids, [Part(0, out)])
    else:
        rows = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        gather_records(_records(source), ids, [Part(0, rows)])
        out.detach().copy_(rows)


def _scatter(target: Tensor, ids: Tensor, values: Tensor) -> None:
    if target.stride(1) != 1:
        same_size = _SAME_SIZE[target.element_size()]
        near = values.detach().view(same_size).to(target.device)
        target.detach().view(same_size).index_copy_(0, ids.to(target.device, torch.int64), near)
    elif target.device.type == "cpu" and values.device.type == "cpu" and values.stride(1) == 1:
        ids = as_ids(ids)
        parts = [(0, _row_bytes(values), values.data_ptr(), values.stride(0) * values.element_size())]
        _C.scatter(*_pitch(target), ids.data_ptr(), len(ids), parts, get_num_threads())
    else:
        scatter_records(_records(target), ids, [Part(0, values.contiguous())])


def _row_bytes(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


def _pitch(matrix: Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), matrix.stride(0) * matrix.element_size()


def _records(matrix: Tensor) -> Records:
    pinned = matrix.device.type == "cpu" and matrix.is_pinned()
    # No fence tracks a GPU's pending writes to a plain tensor, so CPU threads must not read it: no staging.
    return Records(*_pitch(matrix), matrix.shape[0], matrix.device, pinned, matrix)


def _written(tensor: Tensor) -> None:
    # Autograd must notice a write that bypassed it.
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _require_matrix(matrix: Tensor, name: str) -> None:
    _require_near(matrix, name)
    require_dense(matrix, name)
    if matrix.is_quantized:
        raise TypeError(
            f"{name}'s dtype is {matrix.dtype}, whose scales are not in the rows; pass its integers (int_repr())"
        )
    if matrix.is_conj() or matrix.is_neg():
        raise ValueError(f"{name} is a lazily conjugated view; make it plain with {name}.resolve_conj().resolve_neg()")
    if matrix.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}; pass one of shape (rows, dim)")


def _require_vector(ids: Tensor) -> None:
    _require_near(ids, "ids")
    require_id_dtype(ids)
    if ids.ndim != 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; pass ids.reshape(-1)")


def _require_near(tensor: object, name: str) -> None:
    if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} is on {tensor.device}; move it to the CPU or a CUDA device")


def _require_rows(rows: Tensor, name: str, shape: tuple[int, int], matrix: Tensor, matrix_name: str) -> None:
    _require_matrix(rows, name)
    if rows.dtype != matrix.dtype:
        raise TypeError(f"{name} has dtype {rows.dtype}, but {matrix_name} has {matrix.dtype}; convert one of them")
    if tuple(rows.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(rows.shape)}; it must be {shape}: a row of {matrix_name} for each id"
        )


def _require_own_rows(matrix: Tensor, name: str) -> None:
    # For items that are not contiguous, torch's own check finds overlaps.
    if matrix.stride(1) == 1 and matrix.shape[0] > 1 and matrix.stride(0) < matrix.shape[1]:
        raise ValueError(f"{name}'s rows overlap (strides {matrix.stride()}); write to {name}.clone()")
