"""Initial values as a function of (seed, column, row, element): the same bits on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import launch
from speedswap.kernels.host import get_num_threads

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
    if into.device.type == "cpu":
        fill = _C.fill_uniform if kind == "uniform" else _C.fill_normal
        first, given = (rows.start, 0) if isinstance(rows, range) else (0, rows.data_ptr())
        size = into.itemsize
        place = (into.data_ptr(), into.stride(0) * size, first, len(into), into[0].numel(), size)
        fill(*place, a, b, seed, column_key, get_num_threads(), given)
        return
    if not isinstance(rows, range):
        raise ValueError(f"rows were given for memory on {into.device}; give a range, or fill memory of the host")
    launch.fill(kind, into, rows.start, a, b, seed, column_key)
