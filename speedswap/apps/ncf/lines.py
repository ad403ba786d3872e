"""A file of ratings in pieces of whole lines, checked to be text, and many lines at a time taken apart into fields."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.layout import FIELD_MARK, FORM, Layout, shown
from speedswap.apps.reading import opened

__all__ = ["Fields", "Piece", "Rows", "read_pieces", "read_rows"]

CHUNK_BYTES = 1 << 22
LINE_BYTES = 1 << 24
CSV_ROWS = 1 << 12
"""More at a time are slower: their lists outlive a pass of the garbage collector."""
NEWLINE, RETURN, SPACE, TAB = b"\n\r \t"
USUAL_SPACES = 4
UNIT = FIELD_MARK.encode()
"""Stands for a separator of two characters."""
LONGEST = 1 << 16
"""Characters of a JSON value that may be an id; others are reviews and the like."""


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


# ---- fields ---------------------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    """One column of some lines."""

    data: NDArray[np.uint8]
    """UTF-8, with at least one byte after each field."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def texts(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Return the fields of some rows."""
        data = self.data.tobytes()
        return [
            data[start:end] for start, end in zip(self.starts[rows].tolist(), self.ends[rows].tolist(), strict=True)
        ]

    def trimmed(self) -> Fields:
        """Return the fields without spaces around them."""
        data, starts, ends = self
        for _ in range(USUAL_SPACES):
            before, after = ((starts < ends) & is_space(data[at]) for at in (starts, ends - 1))
            if not before.any() and not after.any():
                return Fields(data, starts, ends)
            starts = starts + before
            ends = np.maximum(ends - after, starts)
        # A field may be millions of spaces: not one at a time.
        letters = np.flatnonzero(~is_space(data))
        first, last = np.searchsorted(letters, starts), np.searchsorted(letters, ends) - 1
        empty = first > last
        letters = np.append(letters, 0)
        return Fields(data, np.where(empty, ends, letters[first]), np.where(empty, ends, letters[last] + 1))


class Rows(NamedTuple):
    """Some lines, with a column of fields for each role."""

    columns: Mapping[str, Fields]
    line_numbers: NDArray[np.int64]


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
    text = piece.text if piece.text.endswith(b"\n") else piece.text + b"\n"
    separator = layout.separator.encode()
    if len(separator) > 1:
        text, separator = text.replace(separator, UNIT), UNIT
    data = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(data == NEWLINE)
    separators = np.flatnonzero(data == separator[0])
    starts = np.concatenate([[0], newlines[:-1] + 1])
    ends = newlines - ((data[newlines - 1] == RETURN) & (newlines > starts))
    counts = np.diff(np.searchsorted(separators, newlines), prepend=0)
    line_numbers = np.arange(piece.first_line, piece.first_line + len(newlines))
    odd = np.flatnonzero(counts != layout.width - 1)
    if len(odd):
        lines = Fields(data, starts[odd], ends[odd]).trimmed()
        for line in odd[(counts[odd] > 0) | (lines.starts < lines.ends)][:1].tolist():
            content = text[starts[line] : ends[line]].replace(UNIT, layout.separator.encode())
            raise wrong_width(content, int(line_numbers[line]), int(counts[line]) + 1, layout, path)
        starts, ends, line_numbers = (np.delete(values, odd) for values in (starts, ends, line_numbers))
    between = separators.reshape(len(starts), layout.width - 1)
    columns = {
        role: Fields(
            data,
            between[:, place - 1] + 1 if place else starts,
            between[:, place] if place < layout.width - 1 else ends,
        ).trimmed()
        for role, place in layout.places.items()
    }
    return Rows(columns, line_numbers)


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
        columns = {role: joined([row[place] for row in rows]).trimmed() for role, place in layout.places.items()}
        yield Rows(columns, np.array(line_numbers, np.int64))


def joined(texts: list[str]) -> Fields:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    data = np.frombuffer(b"".join([*encoded, b"\n"]), np.uint8)
    return Fields(data, np.concatenate([[0], ends[:-1]]) if len(ends) else ends, ends)


def wrong_width(line: bytes | str, number: int, width: int, layout: Layout, path: Path) -> RatingsError:
    return RatingsError(
        f"ratings {path}, line {number}: {shown(line)} is not {FORM}, as the first line has them: {width} fields "
        f"where that has {layout.width}; correct the line, or remove it"
    )


def is_space(characters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    space: NDArray[np.bool_] = (characters == SPACE) | (characters == TAB)
    return space
