"""Steps that rows have missed while they had no gradient, taken at once (csrc/idle.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import threads_for

CURVE_TERMS = 32
_MOST_COLUMNS = 4


class MissedSteps(NamedTuple):
    """The steps since each step, as one; float64, in host memory.

    Attributes:
        maps: shape (steps, n, n): the factors ``[from, to]`` of n columns.
        curves: shape (steps, CURVE_TERMS): the Chebyshev coefficients of the weight's further movement; None without.
        bases: shape (steps,): see csrc/idle.h.
    """

    maps: Tensor
    curves: Tensor | None
    bases: Tensor


def take_missed_steps(columns: Sequence[Tensor], last: Tensor, now: int, steps: MissedSteps) -> None:
    """Take the steps that rows have missed, in place.

    Args:
        columns: contiguous, shape (n, ...), floating-point, on one device: the weight, then the optimizer's state. With
            curves, the second is the momentum and the last has the squares.
        last: int32, shape (n,), on the same device: the step that each row has; at most ``now``.
        now: the step that rows get.
        steps: what the steps do; at least ``now + 1`` entries.

    Example:
        >>> weight, last = torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1], dtype=torch.int32)
        >>> halved = MissedSteps(torch.tensor([[[0.5]], [[1.0]]], dtype=torch.float64), None, torch.zeros(2))
        >>> take_missed_steps([weight], last, 1, halved)
        >>> weight.flatten().tolist()
        [0.5, 1.0]
    """
    weight = columns[0]
    is_plain = weight.dtype in (torch.float32, torch.float64) and len(columns) <= _MOST_COLUMNS
    is_alike = all(each.shape == weight.shape and each.dtype == weight.dtype for each in columns)
    if weight.device.type != "cpu" or not is_plain or not is_alike:
        _by_torch(columns, last, now, steps)
        return
    curves = 0 if steps.curves is None else steps.curves.data_ptr()
    row = weight[:1].numel(), weight.dtype.itemsize
    of_steps = steps.maps.data_ptr(), curves, steps.bases.data_ptr()
    places, threads = [each.data_ptr() for each in columns], threads_for(weight.nbytes * len(columns))
    _C.take_idle_steps(places, *row, last.data_ptr(), now, of_steps, len(last), threads)


def _by_torch(columns: Sequence[Tensor], last: Tensor, now: int, steps: MissedSteps) -> None:
    device = last.device
    dtype = torch.promote_types(columns[0].dtype, torch.float32)
    before, places = [each.to(dtype) for each in columns], last.long()

    def of_rows(values: Tensor) -> Tensor:
        return values[: now + 1].to(device, dtype)[places]

    def beside(values: Tensor, like: Tensor) -> Tensor:
        return values.view(-1, *[1] * (like.dim() - 1))

    maps, after = of_rows(steps.maps), []
    for to in range(len(columns)):
        total = torch.zeros_like(before[to])
        for source, values in enumerate(before):
            if bool(steps.maps[: now + 1, source, to].any()):
                total += values * beside(maps[:, source, to], values)
        after.append(total)
    if steps.curves is not None:
        momentum, x = before[1], before[-1].sqrt()
        spread = x + beside(of_rows(steps.bases), x)
        twice = x / spread * 4 - 2
        first, *rest = (beside(term, x) for term in of_rows(steps.curves).T.contiguous())
        value, previous = torch.zeros_like(x), torch.zeros_like(x)
        for term in reversed(rest):  # Clenshaw's recurrence
            value, previous = twice * value - previous + term, value
        moved = momentum * (twice / 2 * value - previous + first) / spread
        after[0] -= torch.where((momentum == 0) | (first == 0), 0, moved)
    for column, values in zip(columns, after, strict=True):
        column.copy_(values)
