"""Lines of whole numbers, read into columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C

__all__ = ["Lines", "read_lines"]


class Lines(NamedTuple):
    """The outcome of reading some lines.

    Attributes:
        rows: lines read.
        end: the byte of the text after them.
        lines: the same as rows, with blank ones.
        wrong: True if the line that begins there is malformed.
    """

    rows: int
    end: int
    lines: int
    wrong: bool


def read_lines(
    text: bytes, values: Tensor, *, bases: str, missing: Sequence[int], start: int = 0, first: int = 0
) -> Lines:
    """Read lines of numbers separated by tabs into the rows of ``values`` from ``first`` on.

    Ends where ``values`` is full, at a malformed line, or at a last line without a newline. Blank lines are skipped.

    Args:
        text: ASCII lines, ending in LF or CR LF.
        values: int64, shape (columns, rows), contiguous, on the CPU.
        bases: per column ``d`` for decimal numbers, perhaps with a minus; ``x`` for hexadecimal ones of up to 15
            digits; or ``b`` for 0 or 1, never empty.
        missing: per column, the value of an empty field.
        start: the byte of the text to begin at.
        first: the row to begin with.

    Raises:
        ValueError: shape, dtype or a number of columns is wrong.

    >>> values = torch.zeros(3, 2, dtype=torch.int64)
    >>> read_lines(b"-7\\tff\\t\\n\\tA\\t3\\n", values, bases="dxd", missing=[0, -1, 5])
    Lines(rows=2, end=12, lines=2, wrong=False)
    >>> values.T
    tensor([[ -7, 255,   5],
            [  0,  10,   3]])
    """
    columns = len(bases)
    if values.dtype != torch.int64 or values.ndim != 2 or len(values) != columns or not values.is_contiguous():
        raise ValueError(f"values is {values.dtype}, {tuple(values.shape)}; pass contiguous int64, ({columns}, rows)")
    if len(missing) != columns or set(bases) - set("bdx"):
        raise ValueError(f"bases is {bases!r} for {len(missing)} values of missing; pass one of b, d and x per column")
    room = values.shape[1] - first
    if not 0 <= first <= values.shape[1]:
        raise ValueError(f"first is {first}; pass a row of values, 0 to {values.shape[1]}")
    instead = torch.tensor(list(missing), dtype=torch.int64)
    rows, size, lines, wrong = _C.read_lines(
        text, start, bases, instead.data_ptr(), values.data_ptr() + 8 * first, values.shape[1], room
    )
    return Lines(rows, start + size, lines, wrong)
