"""Steps that rows of a block in a GPU's memory have missed, taken by one kernel (csrc/idle.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speedswap.kernels.cuda.launch import dtype_name, launch_threads
from speedswap.kernels.cuda.shapes import idle_argument


def take_steps(columns: Sequence[Tensor], last: Tensor, now: int, numbers: Tensor, before: int, *, bends: bool) -> None:
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
