"""Bags of rows in a GPU's memory: their sums, means and maxima, and the gradients of rows and factors.

A bag's entries, and a row's, are added in an order that depends on them alone: the results are the same in every run.
float16 and bfloat16 are added as float32 and rounded once. Everything is queued on torch's current stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.launch import dtype_name, launch_threads
from speedswap.kernels.cuda.shapes import BAGS, CHUNK
from speedswap.kernels.host import as_read, empty


def pool_bags(
    rows: Tensor,
    factors: Tensor | None,
    trains: bool,
    local: Tensor,
    offsets: Tensor,
    mode: str,
    features: int,
    counts: Tensor | None,
    is_mean: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the sum, mean or maximum over each bag of rows, and what their gradients need.

    Args:
        rows: floating-point, shape (n, dim).
        factors: for "sum": of each entry, of rows' dtype.
        trains: True if gradients are needed.
        local: int64, shape (entries,), contiguous, 0 to n - 1. The caller has checked.
        offsets: int64, shape (bags + 1,), ascending from 0 to entries. The caller has checked.
        mode: "sum", "mean" or "max".
        features: the number of features, in whose order the bags are: a divisor of their number.
        counts: bool, shape (entries,): False for each entry that does not count; None if all do.
        is_mean: for "mean": bool, features items: False for each feature whose bags are sums; None if there is none.

    Returns:
        The bags, shape (samples, features · dim); and for their gradients, None without them:

        - each entry's sample and feature, -1 if it does not count; int64, shape (entries,);
        - each entry's factor over its bag's divisor, float32 or float64, shape (entries,); None if all are 1;
        - for maxima, the entry that gave each item, -1 in a bag without entries; int64, of the bags' shape.

    Raises:
        TypeError: factors have another dtype than rows.
    """
    if factors is not None and factors.dtype != rows.dtype:
        raise TypeError(f"factors are {factors.dtype}, but the rows {rows.dtype}; convert them with .to({rows.dtype})")
    rows, num_bags, width = rows.detach(), offsets.shape[0] - 1, rows.shape[1]
    if not (rows.is_contiguous() and offsets.is_contiguous()):
        rows, offsets = as_read(rows), as_read(offsets)
    out = empty((num_bags // features, features * width), rows.dtype, rows.device)
    places = torch.empty_like(local) if trains else None
    scales = taken = None
    if trains and (factors is not None or mode == "mean"):
        scales = local.new_empty(local.shape, dtype=_as_added(rows.dtype))
    if trains and mode == "max":
        taken = local.new_empty(out.shape)
    factors, counts, is_mean = [None if each is None else as_read(each.detach()) for each in (factors, counts, is_mean)]
    argument = _bags(
        rows, local, width, features, rows=rows, offsets=offsets, factors=factors, counts=counts, is_mean=is_mean,
        out=out, places=places, scales=scales, taken=taken, num_bags=num_bags, samples=out.shape[0],
        means=mode == "mean",
    )  # fmt: skip
    name = "pool_max" if mode == "max" else "pool"
    launch_threads(f"{name}_{dtype_name(rows.dtype)}", rows.device, num_bags * _groups(rows, width), argument)
    return out, (places, scales, taken)


def sum_entries(
    grad: Tensor, local: Tensor, order: Tensor | None, num_rows: int, features: int = 1, *noted: Tensor | None
) -> Tensor:
    """Return the sum of each row's entries: the gradient of the rows of :func:`pool_bags`, or of a lookup.

    A row's entries are added in their order, ``CHUNK`` of them at a time, and then the sums of these chunks.

    Args:
        grad: the gradient of the bags, shape (samples, features · dim), or of each entry, (entries, dim).
        local: int64, shape (entries,), contiguous, 0 to num_rows - 1.
        order: as :func:`speedswap.kernels.order_of` returns it; None to sort now.
        num_rows: the number of rows.
        features: the bags' number of features.
        noted: for bags, what :func:`pool_bags` returned.

    Returns:
        A new tensor, shape (num_rows, dim); zeros for a row without entries.
    """
    grad, width = _readable(grad), grad.shape[1] // features
    out = empty((num_rows, width), grad.dtype, grad.device)
    if not local.shape[0]:
        return out.zero_()
    if order is None:
        order = torch.sort(local.int() if num_rows < 2**31 else local, stable=True)[1]
    windows = -(-local.shape[0] // CHUNK)
    starts = local.new_empty(num_rows + 1)
    partial = grad.new_empty(2 * windows, width, dtype=_as_added(grad.dtype))
    argument = _bags(
        grad, local, width, features, out=out, grad=grad, order=order, starts=starts, partial=partial,
        num_rows=num_rows, **dict(zip(("places", "scales", "taken"), noted, strict=False)),
    )  # fmt: skip
    device, name, threads = grad.device, dtype_name(grad.dtype), windows * _groups(grad, width)
    launch_threads("find_starts", device, num_rows + 1, argument)
    launch_threads(f"sum_chunks_{name}", device, threads, argument)
    if windows > 1:  # otherwise no row has several chunks
        launch_threads(f"join_chunks_{name}", device, threads, argument)
    return out


def dot_bags(rows: Tensor, local: Tensor, grad: Tensor, places: Tensor, features: int) -> Tensor:
    """Return the gradient of the factors of :func:`pool_bags`: each entry's row times the gradient of its bag.

    Args:
        rows, local, features: those of the bags.
        grad: their gradient.
        places: each entry's, as :func:`pool_bags` returned them.
    """
    rows, grad, out = as_read(rows.detach()), _readable(grad), rows.new_empty(local.shape[0])
    argument = _bags(grad, local, rows.shape[1], features, rows=rows, out=out, grad=grad, places=places)
    launch_threads(f"dot_bags_{dtype_name(grad.dtype)}", grad.device, local.shape[0], argument)
    return out


def _as_added(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _readable(grad: Tensor) -> Tensor:
    """Return a matrix with contiguous rows, which may lie apart."""
    grad = grad.detach()
    return grad if grad.stride(1) == 1 and not grad.is_neg() else as_read(grad)


def _groups(values: Tensor, width: int) -> int:
    """Return the threads for a row of values, of which each takes 16 bytes."""
    return -(-width // (16 // values.itemsize))


def _bags(values: Tensor, local: Tensor, width: int, features: int, **given: Any) -> bytes:
    """Return the kernels' ``Bags``.

    Args:
        values: the bags' rows, or their gradient.
        local: the row of each entry.
        width, features: of the bags.
        given: what else it holds: tensors and numbers.
    """
    row_bytes = width * values.itemsize
    numbers: dict[str, Any] = {
        "local": local, "width": width, "features": features, "entries": local.shape[0], "row_bytes": row_bytes,
        "grad_stride": values.stride(0), "shift": (features - 1).bit_length(),
    }  # fmt: skip
    return _C.describe_bags(BAGS, {**numbers, **given}, values.dtype, row_bytes)
