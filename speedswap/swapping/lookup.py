"""Lookups in a batch's rows, and the way of their gradients: each row's are added in the order of its positions.

Each operation's way back is one of these operations again, so that gradients of gradients work. What the engine does
not have (other devices, complex rows, ``torch.func``) is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Groups

__all__ = ["look_up", "pool"]


def look_up(rows: Tensor, local: Tensor, groups: Groups | None = None) -> Tensor:
    """Return the row of each position, as ``F.embedding(local, rows)`` does.

    Args:
        rows: shape (n, dim), on any device.
        local: int64, any shape, 0 to n - 1, on rows' device.
        groups: ``kernels.group(local, n)``, where it is known; used in the backward pass.

    Returns:
        Shape (*local.shape, dim).
    """
    if _is_torchs(rows):
        return F.embedding(local, rows)
    return _Expand.apply(rows, local, groups)  # type: ignore[no-any-return, no-untyped-call]


def pool(
    rows: Tensor,
    local: Tensor,
    offsets: Tensor,
    mode: str,
    weights: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the sum, mean or maximum over each bag of rows, as ``F.embedding_bag`` does.

    Args:
        rows: shape (n, dim), on any device.
        local: int64, shape (count,), 0 to n - 1, on rows' device.
        offsets: int64, shape (bags + 1,), ascending from 0 to count: where each bag begins, and count.
        mode: "sum", "mean" or "max".
        weights: for "sum": rows' dtype, shape (count,).
        counts: bool, shape (count,): which entries count; all by default. For rows on a GPU: elsewhere those that do
            not are left out beforehand, but there the host would have to wait for how many remain.

    Returns:
        Shape (bags, dim); zeros for a bag without ids.
    """
    if counts is not None:
        # Torch leaves out one row; it becomes the first, and what does not count points to it.
        rows = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
        local = torch.where(counts, local + 1, 0)
    if _is_torchs(rows):
        return F.embedding_bag(
            local,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
            padding_idx=None if counts is None else 0,
        )
    if rows.dtype in (torch.float16, torch.bfloat16):
        return pool(rows.float(), local, offsets, mode, None if weights is None else weights.float()).to(rows.dtype)
    if mode == "max":
        return _MaxOfBags.apply(rows, local, offsets)  # type: ignore[no-any-return, no-untyped-call]
    total: Tensor = _SumOfBags.apply(rows, weights, local, offsets)  # type: ignore[no-untyped-call]
    if mode == "sum":
        return total
    return total / offsets.diff().clamp(min=1).to(total.dtype).unsqueeze(1)


def _is_torchs(rows: Tensor) -> bool:
    return not kernels.summable(rows) or torch._C._are_functorch_transforms_active()


def _own(result: Tensor) -> Tensor:
    """Return a new tensor's memory as no view: what a Function returns as a view may not be changed in place."""
    return result.data


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, local: Tensor, groups: Groups | None) -> Tensor:
        ctx.save_for_backward(local)
        ctx.num_rows, ctx.groups = len(rows), groups
        return _own(kernels.expand(rows, local))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (local,) = ctx.saved_tensors
        if not torch.is_grad_enabled():  # no gradient of this gradient is wanted
            return kernels.sum_rows(grad, local, ctx.num_rows, ctx.groups), None, None
        return _SumOfRows.apply(grad, local, ctx.num_rows, ctx.groups), None, None  # type: ignore[no-untyped-call]


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, local: Tensor, num_rows: int, groups: Groups | None) -> Tensor:
        ctx.save_for_backward(local)
        ctx.groups = groups
        return _own(kernels.sum_rows(values, local, num_rows, groups))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (local,) = ctx.saved_tensors
        return look_up(grad, local, ctx.groups), None, None, None


def _turned(local: Tensor, offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The entries ordered by row: which they are, the bag of each, and where each row's begin."""
    order, starts = kernels.group(local, num_rows)
    bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff(), output_size=len(local))
    return order, bags[order], starts


class _SumOfBags(torch.autograd.Function):
    """out[b] = Σ weights[k] · rows[local[k]] over the entries k of bag b."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, local: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(None if weights is None else rows, weights, local, offsets)
        ctx.num_rows = len(rows)
        return _own(kernels.sum_segments(rows, local, offsets, weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, local, offsets = ctx.saved_tensors
        to_rows, to_weights = None, None
        if ctx.needs_input_grad[0]:
            to_rows = _back(grad, weights, local, offsets, ctx.num_rows)
        if ctx.needs_input_grad[1]:
            to_weights = _ProductsOfBags.apply(rows, grad, local, offsets)  # type: ignore[no-untyped-call]
        return to_rows, to_weights, None, None


def _back(grad: Tensor, weights: Tensor | None, local: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """out[r] = Σ weights[k] · grad[bag of k] over the entries k of row r."""
    order, bags, starts = _turned(local, offsets, num_rows)
    ordered = None if weights is None else weights[order]
    return _SumOfBags.apply(grad, ordered, bags, starts)  # type: ignore[no-any-return, no-untyped-call]


class _ProductsOfBags(torch.autograd.Function):
    """out[k] = rows[local[k]] · others[bag of k]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, others: Tensor, local: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, others, local, offsets)
        return _own(kernels.dot_segments(rows, local, offsets, others))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, others, local, offsets = ctx.saved_tensors
        to_rows = _back(others, grad, local, offsets, len(rows)) if ctx.needs_input_grad[0] else None
        to_others = None
        if ctx.needs_input_grad[1]:
            to_others = _SumOfBags.apply(rows, grad, local, offsets)  # type: ignore[no-untyped-call]
        return to_rows, to_others, None, None


class _MaxOfBags(torch.autograd.Function):
    """out[b, c] = rows[local[k], c] for that entry k of bag b where it is greatest."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, local: Tensor, offsets: Tensor) -> Tensor:
        greatest, taken = kernels.max_segments(rows, local, offsets)
        ctx.save_for_backward(local, offsets, taken)
        ctx.num_rows = len(rows)
        return _own(greatest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        local, offsets, taken = ctx.saved_tensors
        to_rows = _SumOfTaken.apply(grad, taken, local, offsets, ctx.num_rows)  # type: ignore[no-untyped-call]
        return to_rows, None, None


class _SumOfTaken(torch.autograd.Function):
    """out[r, c] = Σ values[b, c] over the bags b whose greatest of column c is row r's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, taken: Tensor, local: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(taken, local)
        order, bags, starts = _turned(local, offsets, num_rows)
        return _own(kernels.sum_taken(values, bags, starts, order, taken))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        taken, local = ctx.saved_tensors
        if not len(local):
            return grad.new_zeros(taken.shape), None, None, None, None
        found = grad.gather(0, local[taken.clamp(min=0)])
        return found.masked_fill(taken < 0, 0), None, None, None, None
