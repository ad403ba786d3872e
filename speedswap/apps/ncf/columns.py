"""A file of ratings: its lines, taken apart by pyarrow many at a time, and the values of its columns."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.interactions import IdMap
from speedswap.apps.ncf.layout import DATE, FIELD_MARK, FORM, NEEDED, Layout, shown
from speedswap.apps.reading import opened

__all__ = ["COLUMNS", "read_pieces", "read_rows", "take"]

CHUNK_BYTES = 1 << 22
LINE_BYTES = 1 << 24
CSV_ROWS = 1 << 12
"""More at a time are slower: their lists outlive a pass of the garbage collector."""
LONGEST = 1 << 16
"""Characters of a JSON value that may be an id; others are reviews and the like."""
MISSING_WORDS = pa.array(["", *"NA N/A n/a #N/A <NA> NaN nan NULL null None \\N".split()])
"""Fields without a value, as programs write them."""
NO_NUMBER = "not a number: correct it, or leave ratings out with columns rating=-"
NO_TIME = (
    "neither a number nor a date such as 2024-12-31 or 2024-12-31T23:59:59Z: correct it, or take the order of lines "
    "for time with columns time=-"
)


class Piece(NamedTuple):
    """Some lines of a file."""

    text: bytes
    """UTF-8 without NUL; whole lines, though the file's last one may lack its newline."""
    first_line: int
    """The number of the first line, from 1."""


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield a file in pieces of whole lines, without the byte order mark.

    Raises:
        RatingsError: the file is missing, damaged, not UTF-8, or has a line of more than 16 MiB.
    """
    first_line = 1
    keys: list[str] = []
    for text in read_lines(path):
        if first_line == 1:
            check_no_utf16(text, path)
            text = text.removeprefix(codecs.BOM_UTF8)
        check_text(text, path, first_line)
        if keys or (first_line == 1 and text.lstrip().startswith(b"{")):
            yield table_of(text, first_line, keys, path)
        else:
            yield Piece(text, first_line)
        first_line += text.count(b"\n")


def table_of(text: bytes, first_line: int, keys: list[str], path: Path) -> Piece:
    """Return JSON lines as a table; the first one begins with a heading in line 0, the first object's keys."""
    lines = list(enumerate(text.decode().removesuffix("\n").split("\n"), first_line))
    written = io.StringIO()
    table = csv.writer(written, delimiter=FIELD_MARK, lineterminator="\n")
    if not keys:
        keys.extend(next(values_of(line, number, path) for number, line in lines if line.strip()))
        table.writerow(keys)
        first_line -= 1
    for number, line in lines:
        values = values_of(line, number, path) if line.strip() else None
        table.writerow([] if values is None else [values.get(key, "") for key in keys])
    found = written.getvalue().encode(errors="replace")
    check_text(found, path, first_line)
    return Piece(found, first_line)


def values_of(line: str, number: int, path: Path) -> dict[str, str]:
    """Return a JSON object's values as they are written, without those that are too long for an id."""
    try:
        found = json.loads(line, parse_int=str, parse_float=str, parse_constant=str).items()
    except (ValueError, AttributeError, RecursionError) as error:
        raise RatingsError(
            f"ratings {path}, line {number}: {shown(line)} is not a JSON object: correct it, or remove it"
        ) from error
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in found}
    return {key: text if len(text) <= LONGEST else "" for key, text in texts.items()}


def read_lines(path: Path) -> Iterator[bytes]:
    with opened(path, "ratings", RatingsError) as data:
        unfinished = b""
        while chunk := data.read(CHUNK_BYTES):
            whole, newline, rest = chunk.rpartition(b"\n")
            if newline:
                yield unfinished + whole + newline
                unfinished = rest
            else:
                unfinished += chunk
            if len(unfinished) > LINE_BYTES:
                raise RatingsError(f"ratings {path} has a line of more than {LINE_BYTES:,} bytes: is it text?")
        if unfinished:
            yield unfinished


def check_no_utf16(text: bytes, path: Path) -> None:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RatingsError(f"ratings {path} is UTF-16: save it as UTF-8, say iconv -f utf-16 -t utf-8")


def check_text(text: bytes, path: Path, first_line: int) -> None:
    wrong = text.find(b"\0")
    if wrong >= 0:
        line = first_line + text.count(b"\n", 0, wrong)
        raise RatingsError(f"ratings {path}, line {line} has a byte of zero: is it text?")
    if text.isascii():
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        around = text[text.rfind(b"\n", 0, error.start) + 1 :].split(b"\n", 1)[0]
        raise RatingsError(
            f"ratings {path}, line {line}: {shown(around)} is not UTF-8: save the file as UTF-8, say "
            "iconv -f latin1 -t utf-8"
        ) from error


# ---- rows -----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Some lines, with a column of text for each role."""

    columns: dict[str, Any]
    size: int
    line_number: Callable[[int], int]
    """Gives the number of a row's line."""


def read_rows(pieces: Iterable[Piece], layout: Layout, path: Path) -> Iterator[Rows]:
    """Yield lines taken apart; blank ones are skipped.

    Raises:
        RatingsError: a line has more or fewer fields than the first, or a quote that does not end.
    """
    pieces = iter(pieces)
    for piece in pieces:
        if len(layout.separator) == 1 and b'"' in piece.text:
            # A quoted field may hold separators and newlines, also one at a piece's end.
            yield from quoted_rows(itertools.chain([piece], pieces), layout, path)
            return
        yield plain_rows(piece, layout, path)


def plain_rows(piece: Piece, layout: Layout, path: Path) -> Rows:
    separator = layout.separator if len(layout.separator) == 1 else FIELD_MARK
    text = piece.text
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").removesuffix(b"\r")
    if separator != layout.separator:
        text = text.replace(layout.separator.encode(), separator.encode())
    if b"\r" in text:
        line = piece.first_line + text.count(b"\n", 0, text.index(b"\r"))
        raise RatingsError(f"ratings {path}, line {line} has a carriage return within it: end each line with a newline")
    numbered = partial(numbered_lines, text, piece.first_line, separator, layout, path)
    names = [str(place) for place in range(layout.width)]
    wanted = {role: names[place] for role, place in layout.places.items()}
    if not text.strip(b"\n"):
        return Rows({}, 0, int)
    odd: list[str] = []

    def skip(row: Any) -> str:
        odd.append(row.text)
        return "skip"

    table = read_csv(
        pa.BufferReader(text),
        ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
        ParseOptions(delimiter=separator, quote_char=False, invalid_row_handler=skip),
        ConvertOptions(
            check_utf8=False, column_types=dict.fromkeys(names, pa.string()), include_columns=list(wanted.values())
        ),
    )
    if any(line.strip(" \t") or separator in line for line in odd):
        numbered()
    columns = {role: table[name].combine_chunks() for role, name in wanted.items()}
    return Rows(columns, len(table), lambda row: numbered()[row])


def numbered_lines(text: bytes, first_line: int, separator: str, layout: Layout, path: Path) -> list[int]:
    """Return the numbers of the lines that are not blank.

    Raises:
        RatingsError: one has another number of fields than the first.
    """
    found = []
    for number, line in enumerate(text.split(b"\n"), first_line):
        width = line.count(separator.encode()) + 1
        if width == layout.width:
            found.append(number)
        elif width > 1 or line.strip(b" \t"):
            raise wrong_width(line.replace(separator.encode(), layout.separator.encode()), number, width, layout, path)
    return found


def quoted_rows(pieces: Iterator[Piece], layout: Layout, path: Path) -> Iterator[Rows]:
    first = next(pieces)
    lines = (
        line for piece in itertools.chain([first], pieces) for line in io.StringIO(piece.text.decode(), newline="\n")
    )
    reader = csv.reader(lines, delimiter=layout.separator, skipinitialspace=True, strict=True)
    before = first.first_line - 1
    while True:
        rows: list[list[str]] = []
        line_numbers: list[int] = []
        line, ended = before + reader.line_num + 1, True
        try:
            for row in itertools.islice(reader, CSV_ROWS):
                ended = False
                if len(row) == layout.width:
                    rows.append(row)
                    line_numbers.append(line)
                elif any(field.strip() for field in row) or len(row) > 1:
                    raise wrong_width(layout.separator.join(row), line, len(row), layout, path)
                line = before + reader.line_num + 1
        except csv.Error as error:
            raise RatingsError(
                f"ratings {path}, line {line}: a quoted field is malformed ({error}): put a field with quotes in it "
                "between quotes and double those"
            ) from error
        if ended:
            return
        columns = {role: pa.array([row[place] for row in rows], pa.string()) for role, place in layout.places.items()}
        yield Rows(columns, len(rows), line_numbers.__getitem__)


def wrong_width(line: bytes | str, number: int, width: int, layout: Layout, path: Path) -> RatingsError:
    return RatingsError(
        f"ratings {path}, line {number}: {shown(line)} is not {FORM}, as the first line has them: {width} fields "
        f"where that has {layout.width}; correct the line, or remove it"
    )


# ---- values ---------------------------------------------------------------------------------------------------------


class WrongValue(Exception):
    """A field that is wrong for its column."""

    def __init__(self, row: int, text: str, remedy: str) -> None:
        super().__init__(row, text, remedy)
        self.row, self.text, self.remedy = row, text, remedy


class IdColumn:
    """A column of ids, whose rows ascend: numbers if all of them are whole numbers, else text as it is written."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._is_text = False

    def parse(self, texts: Any, numbers: Any) -> Any:
        """Return the ids in some lines."""
        if numbers is None and not self._is_text:
            self._is_text = True
            self._kept = [  # numbers so far were written as Python writes them
                pa.DictionaryArray.from_arrays(ids.indices, ids.dictionary.cast(pa.string())) for ids in self._kept
            ]
        return texts if self._is_text else numbers

    def keep(self, values: Any) -> None:
        """Add these to the column."""
        self._kept.append(values.dictionary_encode())

    def finish(self) -> tuple[IdMap, NDArray[np.int64]]:
        """Return the ids, and each line's row."""
        large = [
            pa.DictionaryArray.from_arrays(ids.indices, ids.dictionary.cast(pa.large_string())) for ids in self._kept
        ]
        column = pa.chunked_array(large if self._is_text else self._kept).unify_dictionaries()
        self._kept = []
        ids = column.chunk(0).dictionary
        order = pc.sort_indices(ids).to_numpy()
        row_of = np.empty(len(ids), np.int64)
        row_of[order] = np.arange(len(ids))
        rows = row_of[np.concatenate([chunk.indices.to_numpy() for chunk in column.chunks])]
        ids = ids.take(pa.array(order))
        return IdMap(ids.cast(pa.large_binary()).to_pylist() if self._is_text else ids.to_numpy()), rows


class RatingColumn:
    """A column of ratings, which must be numbers and have no effect."""

    def parse(self, texts: Any, numbers: Any) -> Any:
        """Refuse ratings that are not numbers."""
        if numbers is None:
            read_floats(texts.drop_null(), present_rows(texts), NO_NUMBER)
        return texts

    def keep(self, values: Any) -> None:
        """Forget these."""


class TimeColumn:
    """A column of times: whole numbers, fractions or ISO dates, of any unit, since only their order counts."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.generic]] = []
        self.kind: str | None = None
        """``numbers`` or ``dates``, from the first value on."""

    def parse(self, texts: Any, numbers: Any) -> Any:
        """Return the times of some lines."""
        rows, given = present_rows(texts), texts.drop_null()
        if len(given):
            self.kind = self.kind or ("dates" if math.isnan(as_float(given[0].as_py())) else "numbers")
        if self.kind == "numbers" and numbers is not None:
            return numbers
        found = dates(given.to_pylist(), rows) if self.kind == "dates" else read_floats(given, rows, NO_TIME)
        values = np.zeros(len(texts), found.dtype)
        values[rows] = found
        return pa.array(values)

    def keep(self, values: Any) -> None:
        """Add these to the column."""
        if len(values):
            self._kept.append(values.to_numpy())

    def finish(self) -> NDArray[np.generic]:
        """Return each line's time."""
        return np.concatenate(self._kept)  # float64 where one of them is


def read_fields(texts: Any) -> tuple[Any, Any]:
    """Return fields without spaces around them, null where they stand for a missing value; and as int64 if all others
    are whole numbers.
    """
    if (numbers := whole_numbers(texts)) is None:
        texts = pc.ascii_trim(texts, " \t")
        texts = pc.if_else(pc.is_in(texts, MISSING_WORDS), None, texts)
        numbers = whole_numbers(texts)
    return texts, numbers


COLUMNS = {"user": IdColumn, "item": IdColumn, "rating": RatingColumn, "time": TimeColumn}


def present_rows(texts: Any) -> NDArray[np.int64]:
    """Return the rows with a value."""
    return np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))


def whole_numbers(texts: Any) -> Any:
    """Return texts as int64 if all are whole numbers as Python writes them, else None."""
    try:
        texts[:1].cast(pa.int64())  # a failure costs as much per field as all else
        numbers = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    filled = pc.and_(pc.starts_with(texts, "0"), pc.greater(pc.binary_length(texts), 1))  # 007 and 0x7 are text
    return None if pc.any(pc.or_(filled, pc.starts_with(texts, "-0"))).as_py() else numbers


def read_floats(texts: Any, rows: NDArray[np.int64], remedy: str) -> NDArray[np.float64]:
    """Read numbers of some rows."""
    try:
        found = np.asarray(texts.cast(pa.float64()))
    except pa.ArrowInvalid:
        found = np.array([as_float(text) for text in texts.to_pylist()])
    if len(wrong := np.flatnonzero(~np.isfinite(found))):
        raise WrongValue(int(rows[wrong[0]]), texts[int(wrong[0])].as_py(), remedy)
    return found


def as_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def dates(texts: list[str], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read dates as microseconds since 1970; without a zone, they are UTC."""
    local: list[str] = []
    minutes_ahead: list[int] = []
    for row, text in zip(rows.tolist(), texts, strict=True):
        found = DATE.fullmatch(text)
        if found is None:
            number = math.isfinite(as_float(text))
            raise WrongValue(row, text, "a number, where others are dates" if number else NO_TIME)
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


# ---- all columns ----------------------------------------------------------------------------------------------------


def take(rows: Rows, parsers: Mapping[str, Any], layout: Layout, path: Path, missing: str) -> dict[str, int]:
    """Enter some lines' values into the columns; return the count of omitted lines by the value they lack."""
    if not rows.size:
        return {}
    fields, values, present, left_out = {}, {}, np.ones(rows.size, np.bool_), {}
    for role, parser in parsers.items():
        texts, numbers = read_fields(rows.columns[role])
        fields[role] = texts
        try:
            values[role] = parser.parse(texts, numbers)
        except WrongValue as wrong:
            number = rows.line_number(wrong.row)
            first = layout.heading is None and number == 1
            raise RatingsError(
                f"ratings {path}, line {number}: {role} ({layout.column(role)}) is {shown(wrong.text)}, {wrong.remedy}"
                + ("; if the line is a heading, give the columns by its names" if first else "")
            ) from None
        lacking = present & texts.is_null().to_numpy(zero_copy_only=False)
        left_out[role] = int(lacking.sum())
        if left_out[role] and missing == "error":
            row = int(lacking.argmax())
            raise RatingsError(
                f"ratings {path}, line {rows.line_number(row)}: no {role}, for {layout.column(role)} is "
                f"{shown(rows.columns[role][row].as_py())}: fill it in, or leave such lines out with missing=skip"
            )
        present &= ~lacking
    check_no_heading(fields, rows, layout, path)
    for role, parser in parsers.items():
        parser.keep(values[role] if present.all() else values[role].filter(present))
    return left_out


def check_no_heading(fields: Mapping[str, Any], rows: Rows, layout: Layout, path: Path) -> None:
    """Refuse a heading in the middle, as concatenated files have it; where all is text it fits anywhere."""
    if layout.heading is None:
        return
    user, item = (pc.equal(fields[role], layout.heading[layout.places[role]]) for role in NEEDED)
    if (row := pc.index(pc.and_(user, item), True).as_py()) >= 0:
        line = rows.line_number(row)
        raise RatingsError(f"ratings {path}, line {line} is the heading again: remove it, and all others")
