"""Bags of rows in a GPU's memory: their sums, means and maxima, and the gradients of rows and factors.

A bag's entries, and a row's, are added in an order that depends on them alone: the results are the same in every run.
float16 and bfloat16 are added as float32 and rounded once. Everything is queued on torch's current stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda.launch import dtype_name, launch_kernel, multiprocessors
from speedswap.kernels.cuda.modules import index_of
from speedswap.kernels.cuda.shapes import CHUNK, THREADS_PER_BLOCK, bags_argument, group_grid
from speedswap.kernels.host import as_read, empty


class Pooled(NamedTuple):
    """Pooled bags, and what their gradients need.

    Attributes:
        out: the bags, shape (samples, features · dim).
        places: int64, shape (entries,): each entry's sample << bits | feature, -1 if it does not count; None if
            gradients are not needed.
        scales: each entry's factor over its bag's divisor, float32 or float64, shape (entries,); None if all are 1.
        taken: for maxima, int64, of out's shape: the entry that gave each item, -1 in a bag without entries.
    """

    out: Tensor
    places: Tensor | None
    scales: Tensor | None
    taken: Tensor | None


def pool_bags(
    rows: Tensor,
    local: Tensor,
    offsets: Tensor,
    mode: str,
    features: int,
    factors: Tensor | None,
    counts: Tensor | None,
    is_mean: Tensor | None,
    trains: bool,
) -> Pooled:
    """Return the sum, mean or maximum over each bag of rows, and what their gradients need.

    Args:
        rows: floating-point, shape (n, dim).
        local: int64, shape (entries,), contiguous, 0 to n - 1. The caller has checked.
        offsets: int64, shape (bags + 1,), ascending from 0 to entries. The caller has checked.
        mode: "sum", "mean" or "max".
        features: the number of features, in whose order the bags are: a divisor of their number.
        factors: for "sum": of each entry, of rows' dtype.
        counts: bool, shape (entries,): False for each entry that does not count; None if all do.
        is_mean: for "mean": bool, features items: False for each feature whose bags are sums; None if there is none.
        trains: True if gradients are needed.

    Raises:
        TypeError: factors have another dtype than rows.
    """
    if factors is not None and factors.dtype != rows.dtype:
        raise TypeError(f"factors are {factors.dtype}, but the rows {rows.dtype}; convert them with .to({rows.dtype})")
    rows, offsets, num_bags, width = as_read(rows.detach()), as_read(offsets), len(offsets) - 1, rows.shape[1]
    out = empty((num_bags // features, features * width), rows.dtype, rows.device)
    places = torch.empty_like(local) if trains else None
    scales = taken = None
    if trains and (factors is not None or mode == "mean"):
        scales = torch.empty(len(local), dtype=_as_added(rows.dtype), device=rows.device)
    if trains and mode == "max":
        taken = torch.empty(out.shape, dtype=torch.int64, device=rows.device)
    factors, counts, is_mean = (None if each is None else as_read(each.detach()) for each in (factors, counts, is_mean))
    arguments = {
        "rows": rows, "local": local, "offsets": offsets, "factors": factors, "counts": counts, "is_mean": is_mean,
        "out": out, "places": places, "scales": scales, "taken": taken, "entries": len(local), "num_bags": num_bags,
        "samples": len(out), "features": features, "width": width, "row_bytes": width * rows.itemsize,
        "means": mode == "mean", "whole": _are_whole(width, rows, out),
    }  # fmt: skip
    _launch("pool_max" if mode == "max" else "pool", rows, num_bags, width, arguments)
    return Pooled(out, places, scales, taken)


def sum_entries(
    grad: Tensor,
    local: Tensor,
    order: Tensor | None,
    num_rows: int,
    *,
    features: int = 1,
    places: Tensor | None = None,
    scales: Tensor | None = None,
    taken: Tensor | None = None,
) -> Tensor:
    """Return the sum of each row's entries: the gradient of the rows of :func:`pool_bags`, or of a lookup.

    A row's entries are added in their order, ``CHUNK`` of them at a time, and then the sums of these chunks.

    Args:
        grad: the gradient of the bags, shape (samples, features · dim), or of each entry, (entries, dim).
        local: int64, shape (entries,), contiguous, 0 to num_rows - 1.
        order: as :func:`speedswap.kernels.order_of` returns it; None to sort now.
        num_rows: the number of rows.
        features, places, scales, taken: those of the bags.

    Returns:
        A new tensor, shape (num_rows, dim); zeros for a row without entries.
    """
    grad, width, entries = _readable(grad), grad.shape[1] // features, len(local)
    out = empty((num_rows, width), grad.dtype, grad.device)
    if not entries:
        return out.zero_()
    if order is None:
        order = torch.sort(local.int() if num_rows < 2**31 else local, stable=True)[1]
    windows = -(-entries // CHUNK)
    starts, partial = torch.empty(num_rows + 1, dtype=torch.int64, device=grad.device), None
    if windows > 1:  # otherwise no row has several chunks
        partial = torch.empty(2 * windows, width, dtype=_as_added(grad.dtype), device=grad.device)
    arguments = {
        "local": local, "out": out, "grad": grad, "places": places, "scales": scales, "taken": taken, "order": order,
        "starts": starts, "partial": partial, "entries": entries, "features": features, "num_rows": num_rows,
        "width": width, "row_bytes": width * grad.itemsize, "grad_stride": grad.stride(0),
        "whole": _are_whole(width, out, grad),
    }  # fmt: skip
    _launch("find_starts", grad, num_rows + 1, 1, arguments)
    _launch("sum_chunks", grad, windows, width, arguments)
    if partial is not None:
        _launch("join_chunks", grad, windows, width, arguments)
    return out


def dot_bags(rows: Tensor, local: Tensor, grad: Tensor, places: Tensor, features: int) -> Tensor:
    """Return the gradient of the factors of :func:`pool_bags`: each entry's row times the gradient of its bag.

    Args:
        rows, local, features: those of the bags.
        grad: their gradient.
        places: as :func:`pool_bags` returned them.
    """
    rows, grad, width = as_read(rows.detach()), _readable(grad), rows.shape[1]
    out = torch.empty(len(local), dtype=rows.dtype, device=rows.device)
    arguments = {
        "rows": rows, "local": local, "out": out, "grad": grad, "places": places, "entries": len(local),
        "features": features, "width": width, "row_bytes": width * rows.itemsize, "grad_stride": grad.stride(0),
        "whole": _are_whole(width, rows, grad),
    }  # fmt: skip
    _launch("dot_bags", rows, len(local), 1, arguments)
    return out


def _as_added(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _readable(grad: Tensor) -> Tensor:
    """Return a matrix with contiguous rows, which may lie apart."""
    grad = grad.detach()
    return grad if grad.stride(1) == 1 and not grad.is_neg() else as_read(grad)


def _are_whole(width: int, *matrices: Tensor) -> bool:
    """Return whether the kernels can read and write all rows 16 bytes at a time."""
    everything = 0
    for each in matrices:
        everything |= each.data_ptr() | each.itemsize * (width | each.stride(0))
    return everything % 16 == 0


def _launch(kernel: str, values: Tensor, count: int, width: int, arguments: dict[str, Any]) -> None:
    """Queue a kernel, with a thread per 16 bytes of ``count`` rows of ``width`` values."""
    given = {name: value.data_ptr() if isinstance(value, Tensor) else value or 0 for name, value in arguments.items()}
    grid = group_grid(count, width, 16 // values.itemsize, multiprocessors=multiprocessors(index_of(values.device)))
    name = kernel if kernel == "find_starts" else f"{kernel}_{dtype_name(values.dtype)}"
    if grid:
        stream = torch.cuda.current_stream(values.device)
        launch_kernel(values.device, stream, name, grid, THREADS_PER_BLOCK, bags_argument(**given))
