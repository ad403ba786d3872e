"""Columns that pyarrow has read, as other types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

SPREAD = 1000
LATE_DAY = r"^(\d+/)?(29|3\d)[/.]"


def fitted(values: Any, *kinds: Any) -> Any:
    """Return values as the type that fits most of them, the first of equally good ones; null where it does not fit.

    Args:
        values: an array of pyarrow, of one chunk or several.
        *kinds: types of pyarrow, of whose values NaN and infinity do not fit, or formats of times as for strptime;
            tried first on values from all over.
    """
    spread = values.take(np.linspace(0, len(values) - 1, min(len(values), SPREAD)).astype(np.int64))
    unfit = [_fitted(spread, kind).null_count for kind in kinds]
    likely = [kind for kind, count in zip(kinds, unfit, strict=True) if count == min(unfit)]
    return min((_fitted(values, kind) for kind in likely), key=lambda each: each.null_count)


def _fitted(values: Any, kind: Any) -> Any:
    if isinstance(kind, str):
        times = pc.strptime(values, format=kind, unit="s", error_is_null=True)
        # strptime makes 03/01 of 02/30, and the year 99 of 12/31/99
        rolled = pc.and_(pc.match_substring_regex(values, LATE_DAY), pc.less(pc.day(times), 4))
        return pc.if_else(pc.or_(rolled, pc.less(pc.year(times), 1000)), None, times)
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    found = pa.chunked_array([piece for chunk in chunks for piece in _pieces(chunk, kind)], kind)
    return pc.if_else(pc.is_finite(found), found, None) if pa.types.is_floating(kind) else found


def _pieces(values: Any, kind: Any) -> Iterator[Any]:
    try:
        yield values.cast(kind)
    except pa.ArrowInvalid:
        half = len(values) // 2
        for piece in (values[:half], values[half:]) if half else ():
            yield from _pieces(piece, kind)
        if not half:
            yield pa.nulls(1, kind)


def whole_numbers(column: Any, *, is_hex: bool, missing: int) -> tuple[NDArray[np.int64], int | None]:
    """Return whole numbers, and the first row that has none; None if all have one.

    Args:
        column: an array of numbers, or of text, which may be empty.
        is_hex: True for text of hexadecimal digits; those of 64 bits, and unsigned numbers, are taken as their bits.
        missing: the number of an empty row; other rows must have another.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    kind = pa.uint64() if is_hex and column.type == pa.uint64() else pa.int64()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)
        if is_hex:
            column, kind = pc.binary_join_element_wise("0x", column, ""), pa.uint64()
    numbers, empty = fitted(column, kind), pa.scalar(missing % 2**64 if kind == pa.uint64() else missing, kind)
    numbers = pc.if_else(pc.equal(numbers, empty), None, numbers) if kind == pa.uint64() else numbers
    wrong = pc.index(pc.and_(pc.is_valid(column), pc.is_null(numbers)), True).as_py()
    return pc.fill_null(numbers, empty).to_numpy().view(np.int64), None if wrong < 0 else wrong
