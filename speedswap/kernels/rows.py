"""Values of rows that are computed, not copied: initial ones, those of a file, and steps of optimizers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.driver import dtype_name, lacking, launch_threads
from speedswap.kernels.cuda.shapes import MOST_IDLE_COLUMNS, idle_argument
from speedswap.kernels.host import as_ids, get_num_threads, has_memory, threads_for

_DTYPES = (torch.float32, torch.float64)


def fill_uniform(into: Tensor, rows: range | Tensor, low: float, high: float, *, seed: int, column_key: int) -> None:
    """Fill rows of a column with values in [low, high).

    A value depends only on (seed, column_key, row, element): Philox4x32-10 of Salmon et al., SC 2011.

    Args:
        into: float32 (32 random bits per value) or float64 (53), shape (n, ...), each row contiguous, on any device. On
            a GPU the fill is queued on torch's current stream.
        rows: the rows' numbers: a range; or for ``into`` in host memory also int64, shape (n,), contiguous, there too.
        low: the least value, rounded to into's dtype.
        high: the bound that no value reaches, rounded to that dtype; if equal to low, all values are low.
        seed: 0 to 2**64 - 1.
        column_key: 0 to 2**64 - 1; columns with different keys are independent.

    Raises:
        ValueError: low is above high, their difference is not finite, or rows are not those of into.
        TypeError: into is neither float32 nor float64.
    """
    largest = torch.finfo(into.dtype).max if into.dtype in _DTYPES else math.inf
    if not (low <= high and high - low <= largest):
        raise ValueError(f"low is {low} and high is {high}; they must be finite, with low at most high")
    _fill("uniform", into, rows, low, high, seed, column_key)


def fill_normal(into: Tensor, rows: range | Tensor, mean: float, std: float, *, seed: int, column_key: int) -> None:
    """Fill rows of a column with normally distributed values; otherwise as :func:`fill_uniform`.

    Box and Muller's method, 1958, in double precision; rounded once for float32.

    Args:
        mean: the distribution's mean.
        std: its standard deviation, 0 or more.

    Raises:
        ValueError: mean or std is not finite, std is negative, or rows are not those of into.
        TypeError: into is neither float32 nor float64.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"mean is {mean} and std is {std}; both must be finite, and std 0 or more")
    _fill("normal", into, rows, mean, std, seed, column_key)


def _fill(kind: str, into: Tensor, rows: range | Tensor, a: float, b: float, seed: int, column_key: int) -> None:
    if into.dtype not in _DTYPES:
        raise TypeError(f"dtype is {into.dtype}; fill float32 or float64 and convert")
    if len(rows) != len(into) or (isinstance(rows, range) and rows and (rows.start < 0 or rows.step != 1)):
        raise ValueError(f"rows is {rows} for {len(into)} rows; give each its number, 0 or more")
    for name, key in (("seed", seed), ("column_key", column_key)):
        if not 0 <= key < 2**64:
            raise ValueError(f"{name} is {key}; it must be 0 to 2**64 - 1")
    if into.numel() == 0:
        return
    if not into[0].is_contiguous():
        raise ValueError(f"into has strides {into.stride()}; its rows must be contiguous")
    size, width = into.itemsize, into[0].numel()
    if into.device.type == "cpu":
        fill = _C.fill_uniform if kind == "uniform" else _C.fill_normal
        first, given = (rows.start, 0) if isinstance(rows, range) else (0, rows.data_ptr())
        place = (into.data_ptr(), into.stride(0) * size, first, len(into), width, size)
        fill(*place, a, b, seed, column_key, get_num_threads(), given)
        return
    if not isinstance(rows, range):
        raise ValueError(f"rows were given for memory on {into.device}; give a range, or fill memory of the host")
    if into.data_ptr() % size:
        raise ValueError(f"rows at {into.data_ptr():#x} are not aligned to items of {size} bytes")
    launch_threads(
        f"fill_{kind}_f{8 * size}", into.device, len(into) * -(-width // (16 // size)), into.data_ptr(),
        into.stride(0) * size, rows.start, len(into), width, float(a), float(b), seed, column_key,
    )  # fmt: skip


def read_ahead(rows: Tensor, ids: Tensor) -> None:
    """Start reading rows of a mapped file, which are otherwise read one page fault after another.

    Args:
        rows: the file's, uint8, shape (n, row_bytes), contiguous, over the mapping.
        ids: int64, shape (m,), in range, best ascending.
    """
    ids = as_ids(ids)
    _C.read_ahead(rows.data_ptr(), rows.shape[1], ids.data_ptr(), len(ids), get_num_threads())


def decode_rows(rows: Tensor, scales: Tensor, tile: tuple[int, int], ids: Tensor, out: Tensor) -> None:
    """Multiply float8 rows by their scales, in float32, and round the products once.

    Args:
        rows: the bytes of e4m3, uint8, shape (n, width), contiguous.
        scales: shape (row tiles, column tiles), contiguous: float32, or uint8 for powers of two (ue8m0).
        tile: rows and columns that have one scale.
        ids: int64, shape (m,), in range.
        out: float32 or bfloat16, shape (m, width), contiguous, in host memory.
    """
    ids = as_ids(ids)
    _C.decode_rows(
        rows.data_ptr(), rows.shape[1], scales.data_ptr(), scales.dtype == torch.uint8, scales.shape[1], tile,
        ids.data_ptr(), len(ids), out.data_ptr(), out.dtype == torch.bfloat16, get_num_threads(),
    )  # fmt: skip


def step_adagrad(weight: Tensor, grad: Tensor, sums: Tensor, settings: Sequence[float]) -> bool:
    """Take a row-wise Adagrad step of every row, in place and in one pass; on a GPU queued on torch's current stream.

    Args:
        weight, grad, sums: the rows, shape (n, dim), their gradients, and their accumulators, shape (n, 1).
        settings: the learning rate; eps; the multiple of the weight that is added to the gradient; the share of the
            weight that stays; the bound of a gradient's items; and that of a row's norm, 0 for none.

    Returns:
        False if nothing was done: the tensors are not plain, contiguous and float32, or not in memory of the CPU or of
        a GPU with kernels; or the step is being compiled or transformed by torch.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    device = weight.device
    is_near = device.type == "cpu" or (device.type == "cuda" and lacking() is None)
    if not (is_near and weight.numel() and weight.shape == grad.shape and sums.shape == (len(weight), 1)):
        return False
    for each in (weight, grad, sums):
        is_plain = type(each) in (Tensor, torch.nn.Parameter) and each.dtype is torch.float32 and not each.is_neg()
        if not (is_plain and each.device == device and each.is_contiguous() and has_memory(each)):
            return False
    numbers = array("q", [weight.data_ptr(), grad.data_ptr(), sums.data_ptr(), *weight.shape])
    rows = numbers.tobytes() + array("f", settings).tobytes()
    if weight.is_cuda:
        launch_threads("step_adagrad", device, 32 * len(weight), rows)  # a warp per row
    else:
        _C.step_adagrad(rows, threads_for(weight.nbytes))
    for written in (weight, sums):
        torch.autograd.graph.increment_version(written)
    return True


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
        width = weight[:1].numel()
        if threads := len(last) * width:
            near = steps.numbers[: now + 1].pin_memory().to(weight.device, non_blocking=True)
            argument = idle_argument(
                [each.data_ptr() for each in columns], last=last.data_ptr(), steps=near.data_ptr(), num_rows=len(last),
                width=width, now=now, before=before, bends=steps.bends,
            )  # fmt: skip
            launch_threads(f"take_steps_{dtype_name(weight.dtype)}", weight.device, threads, argument)
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
