"""Columns that pyarrow has read, as other types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def cast(values: Any, *kinds: Any) -> tuple[Any, int | None]:
    """Return values as the first of some types that fits them all, and None; or None, and the first row that fits none.

    Args:
        values: an array of pyarrow, of one chunk or several.
        *kinds: types of pyarrow.
    """
    unfit = []
    for kind in kinds:
        try:
            return values.cast(kind), None
        except pa.ArrowInvalid:
            unfit.append(first_unfit(values, kind))
    return None, max(unfit)


def first_unfit(values: Any, kind: Any) -> int:
    """Return the first row with a value that does not fit a type; there must be one."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values[low:middle].cast(kind)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def whole_numbers(column: Any, *, is_hex: bool, missing: int) -> tuple[NDArray[np.int64], int | None]:
    """Return whole numbers up to the first row that has none, and that row; None if all have one.

    Args:
        column: an array of numbers, or of text, which may be empty.
        is_hex: True for text of hexadecimal digits.
        missing: the number of an empty row.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)
        column = pc.binary_join_element_wise("0x", column, "") if is_hex else column
    numbers, wrong = cast(column, pa.int64())
    if wrong is not None:
        numbers = column[:wrong].cast(pa.int64())
    return pc.fill_null(numbers, missing).to_numpy(), wrong
