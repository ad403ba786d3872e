"""Steps that rows have missed while they had no gradient, taken at once (csrc/idle.h, csrc/idle.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.launch import dtype_name, launch_threads
from speedswap.kernels.cuda.shapes import MOST_IDLE_COLUMNS, idle_argument
from speedswap.kernels.host import threads_for


def _on_gpu(columns: Sequence[Tensor], last: Tensor, now: int, numbers: Tensor, before: int, *, bends: bool) -> None:
    """Queue the steps on torch's current stream, after a copy of their numbers.

    Args:
        columns: at most 4, float32 or float64, contiguous, of one shape (n, ...), on the GPU.
        last, now, before: as for :func:`speedswap.kernels.take_missed_steps`.
        numbers, bends: those of its ``steps``.
    """
    weight, device = columns[0], last.device
    width = weight[:1].numel()
    if threads := len(last) * width:
        near = numbers[: now + 1].pin_memory().to(device, non_blocking=True)
        argument = idle_argument(
            [each.data_ptr() for each in columns], last=last.data_ptr(), steps=near.data_ptr(), num_rows=len(last),
            width=width, now=now, before=before, bends=bends,
        )  # fmt: skip
        launch_threads(f"take_steps_{dtype_name(weight.dtype)}", device, threads, argument)


CURVE_TERMS = 32


class MissedSteps(NamedTuple):
    """The steps since each step, as one.

    Attributes:
        numbers: float64, in host memory, contiguous, shape (steps, n · n), or (steps, n · n + CURVE_TERMS + 1) with
            curves: the factors ``[from, to]`` of n columns; the Chebyshev coefficients of the weight's further
            movement; and their base, for which see csrc/idle.h.
        bends: True with curves.
    """

    numbers: Tensor
    bends: bool


def take_missed_steps(columns: Sequence[Tensor], last: Tensor, now: int, steps: MissedSteps, before: int = 0) -> None:
    """Take the steps that rows have missed, in place.

    Args:
        columns: contiguous, shape (n, ...), floating-point, on one device: the weight, then the optimizer's state. With
            curves, the second is the momentum and the last has the squares.
        last: int32, shape (n,), on the same device: the number of each row's last step; at most ``before + now``, and
            below ``before`` for one that has none of the steps.
        now: how many steps rows get.
        steps: what the steps do; at least ``now + 1`` entries.
        before: the number of the step before them.

    Example:
        >>> weight, last = torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1], dtype=torch.int32)
        >>> halved = MissedSteps(torch.tensor([[0.5], [1.0]], dtype=torch.float64), bends=False)
        >>> take_missed_steps([weight], last, 1, halved)
        >>> weight.flatten().tolist()
        [0.5, 1.0]
    """
    weight = columns[0]
    is_plain = weight.dtype in (torch.float32, torch.float64) and len(columns) <= MOST_IDLE_COLUMNS
    is_alike = all(each.shape == weight.shape and each.dtype == weight.dtype for each in columns)
    if not is_plain or not is_alike:
        _by_torch(columns, last, now, steps, before)
        return
    if weight.is_cuda:
        _on_gpu(columns, last, now, steps.numbers, before, bends=steps.bends)
        return
    row, numbers = (weight[:1].numel(), weight.dtype.itemsize), steps.numbers.data_ptr()
    places, threads = [each.data_ptr() for each in columns], threads_for(weight.nbytes * len(columns))
    _C.take_idle_steps(places, *row, last.data_ptr(), now, before, steps.bends, numbers, len(last), threads)


def _by_torch(columns: Sequence[Tensor], last: Tensor, now: int, steps: MissedSteps, before: int = 0) -> None:
    n, dtype = len(columns), torch.promote_types(columns[0].dtype, torch.float32)
    befores, places = [each.to(dtype) for each in columns], (last.long() - before).clamp_(0, now)
    used = steps.numbers[: now + 1]
    numbers = used.to(last.device, dtype)[places]

    def beside(values: Tensor, like: Tensor) -> Tensor:
        return values.view(-1, *[1] * (like.dim() - 1))

    after = []
    for to in range(n):
        total = torch.zeros_like(befores[to])
        for source, values in enumerate(befores):
            if bool(used[:, source * n + to].any()):
                total += values * beside(numbers[:, source * n + to], values)
        after.append(total)
    if steps.bends:
        momentum, x = befores[1], befores[-1].sqrt()
        spread = x + beside(numbers[:, -1], x)
        twice = x / spread * 4 - 2
        first, *rest = (beside(term, x) for term in numbers[:, n * n : -1].T.contiguous())
        value, previous = torch.zeros_like(x), torch.zeros_like(x)
        for term in reversed(rest):  # Clenshaw's recurrence
            value, previous = twice * value - previous + term, value
        moved = momentum * (twice / 2 * value - previous + first) / spread
        after[0] -= torch.where((momentum == 0) | (first == 0), 0, moved)
    for column, values in zip(columns, after, strict=True):
        column.copy_(values)
