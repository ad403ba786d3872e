"""Copy rows: columns between records and blocks, by the CPU loops or ``cuda/engines.py``; and rows of plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedswap.errors import DuplicateIdError
from speedswap.kernels import _C
from speedswap.kernels.cuda import engines, moves
from speedswap.kernels.host import (
    LARGE_BYTES,
    address,
    as_ids,
    empty,
    get_num_threads,
    ids_at,
    require_apart,
    require_dense,
    threads_for,
)
from speedswap.kernels.ids import check_ids, first_duplicate, last_occurrences, require_id_dtype
from speedswap.kernels.records import Part, Records, Stored, WantedColumns, What, cpu_parts

_CPU = torch.device("cpu")


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns out of records: row ``i`` of each block becomes that column of record ``ids[i]``.

    Host records and blocks: the CPU loops. CUDA records: a kernel on torch's current stream. Host records with CUDA
    blocks: one of the engines of ``kernels/cuda/engines.py``, on torch's current stream.

    Args:
        records: the source.
        ids: integers, shape (n,), on any device, already checked to be in range; int64 is not copied. With CUDA blocks
            an id of -1 skips a row, which is unchanged.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("gather", records, ids, parts)


def gather_blocks(
    records: Records,
    ids: Tensor,
    columns: WantedColumns,
    device: torch.device,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return a batch's rows of columns, by name.

    Args:
        records: the source.
        ids: as for :func:`gather_records`.
        columns: the columns.
        device: where the rows are wanted.
        out: blocks on that device to fill, in place of new ones.
    """
    if out is not None or device.type != "cpu" or records.device.type != "cpu":
        blocks = columns.blocks(ids.shape[0], device, out)
        if not engines.copy_by_kernel("gather", records, ids, columns, [*blocks.values()]):
            gather_records(records, ids, columns.parts(blocks))
        return blocks
    pointer, ids = ids_at(ids)
    count, blocks = ids.shape[0], dict[str, Tensor]()
    for name in columns:
        shape, dtype = columns[name].row_shape, columns[name].dtype
        is_small = count * columns[name].row_bytes < LARGE_BYTES
        blocks[name] = ids.new_empty(count, *shape, dtype=dtype) if is_small else empty((count, *shape), dtype, _CPU)
    if count:
        parts = [(blocks[name].data_ptr() or address(blocks[name]), *columns[name].form) for name in columns]
        _C.gather(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))
    return blocks


def scatter_blocks(
    records: Records,
    ids: Tensor,
    columns: WantedColumns,
    blocks: Mapping[str, Tensor],
    forms: Mapping[str, Stored | None] | None = None,
) -> None:
    """Copy a batch's rows of columns into records.

    Args:
        records: the target.
        ids: as for :func:`scatter_records`.
        columns: the columns.
        blocks: the columns' rows by name, each in one piece, all on one device; there may be others.
        forms: how records hold the columns, if not as ``columns`` says.
    """
    rows = [blocks[name] for name in columns]
    if records.device.type != "cpu" or not columns.copied or not rows[0].is_cpu:
        if not engines.copy_by_kernel("scatter", records, ids, columns, rows):
            scatter_records(records, ids, columns.parts(blocks, forms))
        return
    pointer, ids = ids_at(ids)
    count = ids.shape[0]
    parts = [(block.data_ptr(), *column.form) for block, column in zip(rows, columns.values(), strict=True)]
    _C.scatter(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns into records: that column of record ``ids[i]`` becomes row ``i`` of each block.

    As :func:`gather_records`, in the other direction. With host records and CUDA blocks, staged rows are written when
    this returns; rows that a kernel writes are queued on torch's current stream.

    Args:
        records: the target.
        ids: integers, shape (n,), on any device, already checked to be in range and unique. With CUDA blocks an id of
            -1 skips a row.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("scatter", records, ids, parts)


def _move(what: What, records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    count = ids.shape[0]
    if not count or not parts:
        return
    if records.device.type == "cpu" and parts[0].block.device.type == "cpu":
        ids = as_ids(ids)
        loop = _C.gather if what == "gather" else _C.scatter
        loop(records.pointer, records.stride, ids.data_ptr(), count, cpu_parts(parts), get_num_threads())
        return
    engines.move(what, records, ids, parts)


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """Round each row of a block, in place, to the values that would be read back after scattering it.

    After ``scatter_records(records, ids, [Part(offset, block, stored)])`` a gather of the same ids returns exactly this
    block, so that rows can be forwarded without going through the records. Rounding twice changes nothing.

    Args:
        block: float32, contiguous, shape (n, ...), on any device.
        ids: integers, shape (n,), on any device: the records' numbers, which stochastic rounding depends on.
        stored: float16 or bfloat16, and the rounding.

    Raises:
        TypeError: the block is not float32, or stored as int8, whose rows training does not write.

    >>> block = torch.tensor([[1.0, 1.001]])
    >>> round_rows(block, torch.tensor([0]), Stored(torch.bfloat16))
    >>> block
    tensor([[1., 1.]])
    """
    if block.dtype != torch.float32 or stored.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"block is {block.dtype} and stored is {stored.dtype}; float32 rows are rounded, to float16 or bfloat16"
        )
    if block.numel() == 0:
        return
    if block.device.type == "cpu":
        ids = as_ids(ids)
        _C.round_rows(ids.data_ptr(), len(ids), cpu_parts([Part(0, block, stored)])[0], get_num_threads())
        return
    moves.round_rows(block, ids, stored)


def rounding_key(seed: int, column_key: int, write: int) -> int:
    """Return the random stream of one write of a column, for :class:`Stored`; streams are independent.

    Args:
        seed, column_key: as for :func:`speedswap.kernels.fill_uniform`, 0 to 2**64 - 1.
        write: the write's number, 0 to 2**64 - 1.
    """
    return int(_C.rounding_key(seed, column_key, write))


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
    if out is not None:
        _require_rows(out, "out", shape, source, "source")
        require_apart(out, "out", source, "source")
        require_apart(out, "out", ids, "ids")
        _require_own_rows(out, "out")
    check_ids(ids, source.shape[0], "source")
    if out is None:
        out = empty(shape, source.dtype, ids.device if source.device.type == "cpu" else source.device)
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
        parts = [(out.data_ptr(), 0, _row_bytes(out), out.stride(0) * out.element_size())]
        _C.gather(*_pitch(source), ids.data_ptr(), len(ids), parts, get_num_threads())
    else:
        rows = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        gather_records(_records(source), ids, [Part(0, rows)])
        if rows is not out:
            out.detach().copy_(rows)


def _scatter(target: Tensor, ids: Tensor, values: Tensor) -> None:
    if target.stride(1) != 1:
        same_size = _SAME_SIZE[target.element_size()]
        near = values.detach().view(same_size).to(target.device)
        target.detach().view(same_size).index_copy_(0, ids.to(target.device, torch.int64), near)
    elif target.device.type == "cpu" and values.device.type == "cpu" and values.stride(1) == 1:
        ids = as_ids(ids)
        parts = [(values.data_ptr(), 0, _row_bytes(values), values.stride(0) * values.element_size())]
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
