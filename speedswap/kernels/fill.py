"""Initial values as a function of (seed, column, row, element): the same bits on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import get_num_threads
from speedswap.kernels.records import Records

_ITEM_BYTES = {torch.float32: 4, torch.float64: 8}


def fill_uniform(
    records: Records,
    offset: int,
    dtype: torch.dtype,
    width_items: int,
    first_row: int,
    num_rows: int,
    low: float,
    high: float,
    *,
    seed: int,
    column_key: int,
    rows: Tensor | None = None,
) -> None:
    """Fill a column of records ``first_row`` to ``first_row + num_rows - 1`` with values in [low, high).

    A value depends only on (seed, column_key, row, element): Philox4x32-10 of Salmon et al., SC 2011.

    Args:
        records: the column's records, on any device. On a GPU the fill is queued on torch's current stream.
        offset: the column's offset in each record, in bytes.
        dtype: float32 (32 random bits per value) or float64 (53).
        width_items: items of the column per record.
        first_row: the first record to fill.
        num_rows: the number of records to fill.
        low: the least value, rounded to dtype.
        high: the bound that no value reaches, rounded to dtype; if equal to low, all values are low.
        seed: 0 to 2**64 - 1.
        column_key: 0 to 2**64 - 1; columns with different keys are independent.
        rows: for records in host memory: int64, shape (num_rows,), contiguous, in host memory; record ``first_row + i``
            then gets the values of row ``rows[i]``.

    Raises:
        ValueError: low is above high, their difference is not finite, or the rows are not in records.
        TypeError: dtype is neither float32 nor float64.
    """
    largest = torch.finfo(dtype).max if dtype in _ITEM_BYTES else math.inf
    if not (low <= high and high - low <= largest):
        raise ValueError(f"low is {low} and high is {high}; they must be finite, with low at most high")
    _fill("uniform", records, offset, dtype, width_items, first_row, num_rows, low, high, seed, column_key, rows)


def fill_normal(
    records: Records,
    offset: int,
    dtype: torch.dtype,
    width_items: int,
    first_row: int,
    num_rows: int,
    mean: float,
    std: float,
    *,
    seed: int,
    column_key: int,
    rows: Tensor | None = None,
) -> None:
    """Fill a column of records with normally distributed values; otherwise as :func:`fill_uniform`.

    Box and Muller's method, 1958, in double precision; rounded once for float32.

    Args:
        mean: the distribution's mean.
        std: its standard deviation, 0 or more.

    Raises:
        ValueError: mean or std is not finite, std is negative, or the rows are not in records.
        TypeError: dtype is neither float32 nor float64.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"mean is {mean} and std is {std}; both must be finite, and std 0 or more")
    _fill("normal", records, offset, dtype, width_items, first_row, num_rows, mean, std, seed, column_key, rows)


def _fill(
    kind: str,
    records: Records,
    offset: int,
    dtype: torch.dtype,
    width_items: int,
    first_row: int,
    num_rows: int,
    a: float,
    b: float,
    seed: int,
    column_key: int,
    rows: Tensor | None,
) -> None:
    if dtype not in _ITEM_BYTES:
        raise TypeError(f"dtype is {dtype}; fill float32 or float64 and convert")
    if not (first_row >= 0 and num_rows >= 0 and first_row + num_rows <= records.num_rows):
        raise ValueError(
            f"rows {first_row} to {first_row + num_rows - 1} are not in the {records.num_rows} records; "
            "choose first_row and num_rows inside them"
        )
    for name, key in (("seed", seed), ("column_key", column_key)):
        if not 0 <= key < 2**64:
            raise ValueError(f"{name} is {key}; it must be 0 to 2**64 - 1")
    if num_rows == 0 or width_items == 0:
        return
    item_bytes = _ITEM_BYTES[dtype]
    out = records.pointer + first_row * records.stride + offset
    if records.device.type == "cpu":
        fill = _C.fill_uniform if kind == "uniform" else _C.fill_normal
        fill(
            out, records.stride, first_row, num_rows, width_items, item_bytes, a, b, seed, column_key,
            get_num_threads(), 0 if rows is None else rows.data_ptr(),
        )  # fmt: skip
        return
    if rows is not None:
        raise ValueError(f"rows were given for records on {records.device}; give records in host memory")
    from speedswap.kernels.cuda import launch

    launch.fill(
        kind, records.device, out, records.stride, first_row, num_rows, width_items, item_bytes, a, b, seed, column_key
    )
