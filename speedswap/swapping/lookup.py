"""Differentiable lookups in a batch's rows: a row's gradients are added in the order of its positions.

A lookup for a loss that depends on every row of the table also takes gradients of all rows, for the next step.

On the CPU the backward pass of each operation is one of these operations, so gradients of gradients work. On a GPU bags
have their own kernels; like torch's, these have no gradients of gradients. Anything else (other devices, complex rows,
``torch.func``) is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speedswap import kernels
from speedswap.errors import WeightError
from speedswap.kernels.cuda.lookups import dot_bags, pool_bags, sum_entries
from speedswap.swapping.batch_rows import GradientOfAll
from speedswap.swapping.row_step import RowStep

_SUMMABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SMALL = 512  # up to this many ids torch's lookup is faster, with the same bits


def look_up(weight: Tensor, local: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the row of each position, as ``F.embedding(local, weight)`` does.

    Args:
        weight: the rows, shape (n, dim), on any device.
        local: int64, any shape, 0 to n - 1, on weight's device.
        dtype: what rows are rounded to; weight's by default. A row's gradients are summed in weight's dtype.

    Returns:
        Shape (*local.shape, dim).
    """
    is_small = local.numel() <= _SMALL and weight.dtype not in (torch.float16, torch.bfloat16)
    if is_small or _needs_torch(weight):
        rows = torch.embedding(weight, local)
        return rows if dtype is None else rows.to(dtype)
    return _Expand.apply(weight, local, dtype or weight.dtype)  # type: ignore[no-any-return, no-untyped-call]


def look_up_with_all(module: Any, ids: Tensor, gradients: list[GradientOfAll]) -> tuple[Tensor, Tensor]:
    """Look rows up for training, along with gradients of every row.

    Args:
        module: an embedding, or a collection's table, whose rows are trained.
        ids: int32 or int64, shape (n,), on the device that needs the rows.
        gradients: read when these rows' gradient arrives; a function of the returned leaf appends to it before.

    Returns:
        The distinct rows, a leaf; and the row of each id, shape (n, embedding_dim).

    Raises:
        WeightError: the module's weight was replaced by a tensor.
        IdError, LostUpdateError: as for any lookup.
    """
    leaf, local = module._look_up(ids)
    step: RowStep = module._step
    if getattr(leaf, "gradient_keeper", None) is not step:
        raise WeightError(
            f"the weight of the embedding over table {module.table.name!r} was replaced, as functional_call does; call "
            "full_softmax with the embedding's own weight, or give it the table"
        )

    def receive(_: Tensor) -> None:
        for each in gradients:
            step.receive_of_all(each)

    leaf.register_post_accumulate_grad_hook(receive)
    return leaf, look_up(leaf, local)


def pool(
    weight: Tensor,
    local: Tensor,
    offsets: Tensor,
    mode: str,
    factors: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    is_mean: Tensor | None = None,
    features: int = 1,
) -> Tensor:
    """Return the sum, mean or maximum over each bag of rows, as ``F.embedding_bag`` does.

    Args:
        weight: the rows, shape (n, dim), on any device.
        local: int64, any shape of count items, 0 to n - 1, on weight's device, as the lookup returned it.
        offsets: int64, shape (bags + 1,), ascending from 0 to count: the start of each bag, and count.
        mode: "sum", "mean" or "max".
        factors: for "sum": a factor per entry, shape (count,), of weight's dtype.
        counts: bool, shape (count,): True for each entry that counts; all by default.
        is_mean: for "mean": bool, shape (features, 1), on weight's device: False for each feature whose bags are sums.
        features: the number of features; bags are ordered by feature, and their number is a multiple of it.

    Returns:
        Shape (bags / features, features · dim): row s has the s-th bag of every feature, side by side; zeros for an
        empty bag.
    """
    order = kernels.order_of(local)
    if local.ndim != 1 or not local.is_contiguous():
        local = local.reshape(-1).contiguous()
    if weight.is_cuda and not _needs_torch(weight):
        bags = local, offsets, mode, features, counts, is_mean
        return _BagsOnGpu.apply(weight, factors, (order, *bags))  # type: ignore[no-any-return, no-untyped-call]
    if counts is not None:
        ends = torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])
        local, offsets, factors = local[counts], ends[offsets], None if factors is None else factors[counts]
    divisors = None
    if is_mean is not None:
        sizes = torch.where(is_mean, offsets.diff().view(features, -1).clamp(min=1), 1).reshape(-1)
        divisors, mode = sizes.to(torch.promote_types(weight.dtype, torch.float32)), "sum"  # halves cannot count
    if _needs_torch(weight):
        wide = weight if divisors is None else weight.to(divisors.dtype)  # the sum itself may overflow half precision
        pooled = F.embedding_bag(local, wide, offsets, mode=mode, per_sample_weights=factors, include_last_offset=True)
        return _side_by_side(pooled if divisors is None else pooled / divisors.unsqueeze(1), features).to(weight.dtype)
    if mode == "mean":
        divisors, mode = offsets.diff().clamp(min=1).to(torch.promote_types(weight.dtype, torch.float32)), "sum"
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    rows, factors = (each.float() if is_half and each is not None else each for each in (weight, factors))
    if mode == "max":
        pooled = _side_by_side(_MaxOfBags.apply(rows, local, offsets), features)  # type: ignore[no-untyped-call]
    else:
        pooled = _SumOfBags.apply(rows, factors, local, offsets, divisors, features)  # type: ignore[no-untyped-call]
    return pooled.to(weight.dtype)


def _side_by_side(bags: Tensor, features: int) -> Tensor:
    """Rearrange bags from feature-major order to one row of concatenated features per sample."""
    if features == 1:
        return bags
    count, dim = len(bags) // features, bags.shape[1]
    return bags.view(features, count, dim).transpose(0, 1).reshape(count, features * dim)


def _needs_torch(weight: Tensor) -> bool:
    """Return whether neither the CPU loops nor the kernels can sum these rows."""
    is_near = weight.is_cpu or (weight.is_cuda and (type(weight) is Tensor or kernels.has_memory(weight)))
    return not is_near or weight.dtype not in _SUMMABLE or torch._C._are_functorch_transforms_active()


def _own(result: Tensor) -> Tensor:
    """Return a new tensor that owns its memory: a view returned by a Function must not be changed in place."""
    return result.data


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, local: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(local, kernels.order_of(local))
        ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
        return _own(kernels.expand(weight.to(dtype), local))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        local, order = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        if not torch.is_grad_enabled():  # no gradient of this gradient is needed
            return kernels.sum_rows(grad, local, ctx.num_rows, order), None, None
        return _SumOfRows.apply(grad, local, ctx.num_rows), None, None  # type: ignore[no-untyped-call]


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, local: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(local)
        return _own(kernels.sum_rows(values, local, num_rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (local,) = ctx.saved_tensors
        return look_up(grad, local), None, None


def _by_row(local: Tensor, offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort entries by row: return their numbers, each one's bag, and the start of each row's entries."""
    order, starts = kernels.group(local, num_rows)
    bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff(), output_size=len(local))
    return order, bags[order], starts


class _SumOfBags(torch.autograd.Function):
    """out[b] = Σ factors[k] · weight[local[k]] / divisors[b] over the entries k of bag b, laid out by features."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        factors: Tensor | None,
        local: Tensor,
        offsets: Tensor,
        divisors: Tensor | None,
        features: int,
    ) -> Tensor:
        ctx.save_for_backward(None if factors is None else weight, factors, local, offsets, divisors)
        ctx.num_rows, ctx.features = len(weight), features
        return _own(kernels.sum_segments(weight, local, offsets, factors, divisors=divisors, features=features))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, factors, local, offsets, divisors = ctx.saved_tensors
        to_weight, to_factors = None, None
        if ctx.needs_input_grad[0] and not torch.is_grad_enabled():  # no gradient of this gradient is needed
            to_weight = kernels.sum_segments_back(
                grad, local, ctx.num_rows, offsets, factors, divisors=divisors, features=ctx.features
            )
        if ctx.needs_input_grad[1] or (ctx.needs_input_grad[0] and to_weight is None):
            bags = _one_below_another(grad, ctx.features)
            if divisors is not None:
                bags = bags / divisors.unsqueeze(1)
            if to_weight is None and ctx.needs_input_grad[0]:
                to_weight = _back(bags, factors, local, offsets, ctx.num_rows)
            if ctx.needs_input_grad[1]:
                to_factors = _ProductsOfBags.apply(weight, bags, local, offsets)  # type: ignore[no-untyped-call]
        return to_weight, to_factors, None, None, None, None


def _one_below_another(rows: Tensor, features: int) -> Tensor:
    """Rearrange rows of concatenated features to bags in feature-major order."""
    if features == 1:
        return rows
    count, dim = len(rows), rows.shape[1] // features
    return rows.reshape(count, features, dim).transpose(0, 1).reshape(features * count, dim)


def _back(grad: Tensor, factors: Tensor | None, local: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """Return out[r] = Σ factors[k] · grad[bag of k] over the entries k of row r."""
    order, bags, starts = _by_row(local, offsets, num_rows)
    ordered = None if factors is None else factors[order]
    return _SumOfBags.apply(grad, ordered, bags, starts, None, 1)  # type: ignore[no-any-return, no-untyped-call]


class _ProductsOfBags(torch.autograd.Function):
    """out[k] = weight[local[k]] · others[bag of k]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, others: Tensor, local: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(weight, others, local, offsets)
        return _own(kernels.dot_segments(weight, local, offsets, others))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, others, local, offsets = ctx.saved_tensors
        to_weight = _back(others, grad, local, offsets, len(weight)) if ctx.needs_input_grad[0] else None
        to_others = None
        if ctx.needs_input_grad[1]:
            to_others = _SumOfBags.apply(weight, grad, local, offsets, None, 1)  # type: ignore[no-untyped-call]
        return to_weight, to_others, None, None


class _MaxOfBags(torch.autograd.Function):
    """out[b, c] = weight[local[k], c] for the entry k of bag b that maximizes it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, local: Tensor, offsets: Tensor) -> Tensor:
        greatest, winners = kernels.max_segments(weight, local, offsets)
        ctx.save_for_backward(local, offsets, winners)
        ctx.num_rows = len(weight)
        return _own(greatest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        local, offsets, winners = ctx.saved_tensors
        to_weight = _SumOfWinners.apply(grad, winners, local, offsets, ctx.num_rows)  # type: ignore[no-untyped-call]
        return to_weight, None, None


class _SumOfWinners(torch.autograd.Function):
    """out[r, c] = Σ values[b, c] over the bags b whose maximum in column c comes from row r."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, winners: Tensor, local: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(winners, local)
        order, bags, starts = _by_row(local, offsets, num_rows)
        return _own(kernels.sum_taken(values, bags, starts, order, winners))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        winners, local = ctx.saved_tensors
        if not len(local):
            return grad.new_zeros(winners.shape), None, None, None, None
        found = grad.gather(0, local[winners.clamp(min=0)])
        return found.masked_fill(winners < 0, 0), None, None, None, None


class _BagsOnGpu(torch.autograd.Function):
    """The bags of :func:`pool`, by the kernels: each written to its place, and its gradient read from there."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factors: Tensor | None, given: tuple[Any, ...]) -> Tensor:
        order, *bags = given
        local, _, _, features, _, _ = bags
        out, noted = pool_bags(weight, factors, any(ctx.needs_input_grad), *bags)
        ctx.save_for_backward(weight if ctx.needs_input_grad[1] else None, local, order, *noted)
        ctx.num_rows, ctx.features = weight.shape[0], features
        return _own(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, local, order, *noted = ctx.saved_tensors
        of_rows, of_factors, *_ = ctx.needs_input_grad
        to_weight = sum_entries(grad, local, order, ctx.num_rows, ctx.features, *noted) if of_rows else None
        to_factors = dot_bags(weight, local, grad, noted[0], ctx.features) if of_factors else None
        return to_weight, to_factors, None
