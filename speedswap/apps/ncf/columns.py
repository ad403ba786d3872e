"""The values of columns, many fields at a time: ids and their rows, ratings, times."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.ncf.interactions import IdMap, whole_number
from speedswap.apps.ncf.layout import DATE
from speedswap.apps.ncf.lines import Fields

__all__ = ["IdColumn", "Parsed", "RatingColumn", "TimeColumn", "WrongValue"]

MISSING_WORDS = frozenset(b"|NA|N/A|n/a|#N/A|<NA>|NaN|nan|NULL|null|None|\\N".split(b"|"))
"""Fields without a value, as programs write them."""
ZERO, MINUS, POINT = b"0-."
MOST_DIGITS = 18  # of numbers that all fit into int64


class WrongValue(Exception):
    """A field that is wrong for its column."""

    def __init__(self, row: int, text: bytes, remedy: str) -> None:
        super().__init__(row, text, remedy)
        self.row, self.text, self.remedy = row, text, remedy


class Parsed(NamedTuple):
    """A column's values for some lines."""

    values: NDArray[np.generic]
    present: NDArray[np.bool_]
    """True for lines with a value."""


class Numbering(dict[bytes, int]):
    """Texts numbered in order of appearance; -1 for those that stand for a missing value."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(MISSING_WORDS, -1))

    def __missing__(self, text: bytes) -> int:
        self[text] = number = len(self) - len(MISSING_WORDS)
        return number

    def of(self, texts: list[bytes]) -> NDArray[np.int64]:
        return np.fromiter(map(self.__getitem__, texts), np.int64, len(texts))


class IdColumn:
    """A column of ids, whose rows ascend: numbers if all of them are whole numbers, else text as it is written."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.int64]] = []
        self._numbering: Numbering | None = None

    def parse(self, fields: Fields) -> Parsed:
        if self._numbering is None:
            values, present = whole_numbers(fields)
            others = np.flatnonzero(~present)
            if self._enter(values, present, others, fields.texts(others)):
                return Parsed(values, present)
            self._renumber()
        assert self._numbering is not None
        numbers = self._numbering.of(fields.texts(np.arange(len(fields.starts))))
        return Parsed(numbers, numbers >= 0)

    def keep(self, values: NDArray[np.generic]) -> None:
        """Add these to the column."""
        self._kept.append(values.astype(np.int64, copy=False))

    def value_of(self, text: str) -> int | None:
        """Return the value that ``parse`` gave a text, None for a new one."""
        return None if self._numbering is None else self._numbering.get(text.encode())

    def finish(self) -> tuple[IdMap, NDArray[np.int64]]:
        """Return the ids, and each line's row."""
        values, numbering = np.concatenate(self._kept), self._numbering
        self._kept, self._numbering = [], None
        if numbering is None:
            ids, rows = numbered(values)
            return IdMap(ids), rows
        used = np.zeros(len(numbering), np.bool_)
        used[values] = True
        texts = sorted(text for text, number in numbering.items() if number >= 0 and used[number])
        row_of = np.empty(len(used), np.int64)
        row_of[numbering.of(texts)] = np.arange(len(texts))
        return IdMap(texts), row_of[values]

    @staticmethod
    def _enter(
        values: NDArray[np.int64], present: NDArray[np.bool_], rows: NDArray[np.int64], texts: list[bytes]
    ) -> bool:
        """Enter fields other than short whole numbers; return False where one is text."""
        for row, text in zip(rows.tolist(), texts, strict=True):
            if text in MISSING_WORDS:
                continue
            if (number := whole_number(text)) is None:
                return False
            values[row], present[row] = number, True
        return True

    def _renumber(self) -> None:
        """Switch to text: the numbers so far were written as Python writes them."""
        self._numbering = numbering = Numbering()
        for place, values in enumerate(self._kept):
            ids, rows = np.unique(values, return_inverse=True)
            self._kept[place] = numbering.of([str(number).encode() for number in ids.tolist()])[rows]


class RatingColumn:
    """A column of ratings, which must be numbers and have no effect."""

    def parse(self, fields: Fields) -> Parsed:
        ok = are_decimals(fields)
        others = np.flatnonzero(~ok)
        for row, text in zip(others.tolist(), fields.texts(others), strict=True):
            if text not in MISSING_WORDS:
                if not math.isfinite(as_float(text)):
                    raise WrongValue(row, text, "not a number: correct it, or leave ratings out with columns rating=-")
                ok[row] = True
        return Parsed(ok, ok)


class TimeColumn:
    """A column of times: whole numbers, fractions or ISO dates, of any unit, since only their order counts."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.generic]] = []
        self.kind: str | None = None
        """``numbers`` or ``dates``, from the first value on."""

    def parse(self, fields: Fields) -> Parsed:
        values, present = whole_numbers(fields)
        others = np.flatnonzero(~present)
        texts = fields.texts(others)
        given = np.array([text not in MISSING_WORDS for text in texts], np.bool_)
        others, texts = others[given], [text for text in texts if text not in MISSING_WORDS]
        first_whole = int(present.argmax()) if present.any() else len(present)
        if self.kind is None and len(others) and others[0] < first_whole:
            self.kind = "dates" if math.isnan(as_float(texts[0])) else "numbers"
        elif self.kind is None and present.any():
            self.kind = "numbers"
        if self.kind == "dates" and present.any():
            raise WrongValue(first_whole, fields.texts(np.array([first_whole]))[0], "a number, where others are dates")
        present[others] = True
        if self.kind == "dates":
            values[others] = dates(texts, others)
            return Parsed(values, present)
        return Parsed(with_numbers(values, others, texts), present)

    def keep(self, values: NDArray[np.generic]) -> None:
        """Add these to the column."""
        self._kept.append(values)

    def finish(self) -> NDArray[np.generic]:
        """Return each line's time."""
        return np.concatenate(self._kept)  # float64 where one of them is


NO_TIME = (
    "neither a number nor a date such as 2024-12-31 or 2024-12-31T23:59:59Z: correct it, or take the order of lines "
    "for time with columns time=-"
)


def whole_numbers(fields: Fields) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read the fields that are whole numbers of up to 18 digits as Python writes them; 0 for the others."""
    data, starts, ends = fields
    negative = data[starts] == MINUS
    begin = starts + negative
    digits = ends - begin
    ok = (digits >= 1) & (digits <= MOST_DIGITS)
    ok &= (data[begin] != ZERO) | ((digits == 1) & ~negative)
    values = np.zeros(len(starts), np.int64)
    for number in range(int(digits[ok].max(initial=0))):
        inside = digits > number
        digit = data[np.minimum(begin + number, len(data) - 1)] - np.uint8(ZERO)
        ok &= (digit <= 9) | ~inside
        values = np.where(inside & ok, 10 * values + digit, values)
    np.negative(values, out=values, where=negative)
    values[~ok] = 0
    return values, ok


def are_decimals(fields: Fields) -> NDArray[np.bool_]:
    """Tell the fields that are digits with at most one point among them, and not too many."""
    data, starts, ends = fields
    begin = starts + (data[starts] == MINUS)
    length = ends - begin
    points = np.zeros(len(starts), np.int64)
    ok: NDArray[np.bool_] = length <= MOST_DIGITS
    for number in range(int(length[ok].max(initial=0))):
        inside = length > number
        character = data[np.minimum(begin + number, len(data) - 1)]
        point = character == POINT
        points += point & inside
        ok &= point | (character - np.uint8(ZERO) <= 9) | ~inside
    ok &= (points <= 1) & (length > points)
    return ok


def as_float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def with_numbers(values: NDArray[np.int64], rows: NDArray[np.int64], texts: list[bytes]) -> NDArray[np.generic]:
    """Enter the numbers of some rows into values; float64 where one does not fit int64."""
    for row, text in zip(rows.tolist(), texts, strict=True):
        if not math.isfinite(as_float(text)):
            raise WrongValue(row, text, NO_TIME)
    whole = [number for text in texts if (number := whole_number(text)) is not None]
    if len(whole) == len(texts):
        values[rows] = whole
        return values
    mixed = values.astype(np.float64)
    mixed[rows] = [as_float(text) for text in texts]
    return mixed


def dates(texts: list[bytes], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read dates as microseconds since 1970; without a zone, they are UTC."""
    local: list[str] = []
    minutes_ahead: list[int] = []
    for row, text in zip(rows.tolist(), texts, strict=True):
        found = DATE.fullmatch(text.decode())
        if found is None:
            raise WrongValue(row, text, NO_TIME)
        day, clock, _, sign, hours, minutes = found.groups()
        local.append(f"{day}T{clock}" if clock else day)
        minutes_ahead.append((-1 if sign == "-" else 1) * (60 * int(hours) + int(minutes or 0)) if sign else 0)
    try:
        utc = np.array(local, "datetime64[us]")
    except ValueError:  # such as February 30th
        for row, text, value in zip(rows.tolist(), texts, local, strict=True):
            try:
                np.datetime64(value, "us")
            except ValueError:
                raise WrongValue(row, text, NO_TIME) from None
        raise
    return utc.astype(np.int64) - np.array(minutes_ahead, np.int64) * 60_000_000


def numbered(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values, ascending, and the place of each value among them; without sorting a dense range."""
    low, high = int(values.min()), int(values.max())
    if high - low >= max(4 * len(values), 1 << 20):
        ids, rows = np.unique(values, return_inverse=True)
        return ids, rows
    offsets = values - low
    there = np.zeros(high - low + 1, np.bool_)
    there[offsets] = True
    row_of = np.cumsum(there, dtype=np.int64) - 1
    return np.flatnonzero(there) + low, row_of[offsets]
