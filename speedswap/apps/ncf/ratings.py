"""Read a file of ratings, in the columns and with the ids that it happens to have, into a split.

``layout`` finds separator and columns, ``columns`` takes the lines apart and makes numbers of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speedswap._install import pip_install
from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.interactions import Interactions, Split, leave_one_out
from speedswap.apps.ncf.layout import FIELD_MARK, FORM, ROLES, Layout, check_columns, find_layout
from speedswap.apps.options import one_of

if TYPE_CHECKING:
    from speedswap.apps.ncf.columns import Piece

__all__ = ["MISSING", "Source", "read_split"]

MISSING = ("skip", "error")
SAMPLE_LINES = 50


@dataclass(frozen=True)
class Source:
    """A file as it was read, for the user to check."""

    path: Path
    separator: str
    heading: bool
    columns: Mapping[str, str]
    """The column of each role that has one."""
    lines: int
    """Lines other than the heading and blank ones."""
    left_out: Mapping[str, int]
    """Lines without a value, by the first role that lacked one."""
    users: int
    items: int
    pairs: int
    """Distinct pairs of a user and an item."""
    text_ids: tuple[str, ...]
    """Those of user and item whose ids are text."""
    time: str | None
    """``numbers`` or ``dates``; None where the order of lines stands for time."""

    def __str__(self) -> str:
        separator = {"\t": "tabs"}.get(self.separator, repr(self.separator))
        form = f"divided by {separator}, {'with' if self.heading else 'no'} heading"
        form = "JSON lines" if self.separator == FIELD_MARK else form
        named = ", ".join(f"{role} is {column}" for role, column in self.columns.items())
        said = [f"{self.path}: {form}; {named}"]
        if "rating" not in self.columns:
            said.append("no ratings, so that every line counts the same")
        if self.time is None:
            said.append("no times, so that the order of lines stands for them")
        elif self.time == "dates":
            said.append("times are dates")
        left = sum(self.left_out.values())
        why = ", ".join(f"{count:,} without {role}" for role, count in self.left_out.items())
        ids = ["text" if role in self.text_ids else "whole numbers" for role in ROLES[:2]]
        read = (
            f"{self.lines:,} lines read, {f'{left:,} left out ({why})' if left else 'none left out'}; {self.users:,} "
            f"users (ids are {ids[0]}), {self.items:,} items ({ids[1]}), {self.pairs:,} different pairs"
        )
        return "; ".join(said) + "\n" + read


def read_split(path: Path, columns: Mapping[str, str] | None = None, *, missing: str = "skip") -> Split:
    """Read ratings, and set each user's latest one apart for testing.

    Lines are divided by tabs, ``::``, ``;``, ``|`` or commas, with a heading or without, or are JSON objects; the file
    is UTF-8, plain or gzip. A field may stand between quotes, except with ``::``. Users and items may have any ids:
    where all ids of a column are whole numbers, they get rows in their order, else in the order of their text. A
    rating's value has no effect, only its presence. Times are numbers of any unit or ISO dates (UTC without a zone);
    without them the order of lines stands for time. Memory is some 100 bytes per line, whatever else is in it, and the
    ids. Needs pyarrow.

    Args:
        path: the file.
        columns: for ``user``, ``item``, ``rating`` or ``time`` the name of its column in the heading, or its number
            from 1, or ``-`` for a rating or time to be passed over. Others are found by name in the heading, as
            ``user_id``, ``customer``, ``movieId``, ``sku``, ``stars`` or ``timestamp``; without a heading the first
            columns are user, item, rating and timestamp. Where no name says which column is time, it is the only one
            of dates or large numbers.
        missing: ``skip`` leaves lines out that lack one of these values (nothing, ``NA``, ``NaN``, ``null``, ``None``,
            ``\\N``) and counts them; ``error`` refuses the first.

    Returns:
        The split; its ``source`` says how the file was read.

    Raises:
        RatingsError: the file is missing, unreadable, damaged or empty, its columns are ambiguous, or a line is
            malformed; the message says which.
        SettingsError: ``columns`` or ``missing`` has another value.

    Example::

        split = read_split(Path("orders.csv"), {"user": "customer", "item": "sku", "time": "-"})
        print(split.source)  # the columns and their roles, the lines left out, …
    """
    columns = columns or {}
    check_columns(columns)
    one_of(MISSING)("missing", missing)
    try:
        from speedswap.apps.ncf.columns import COLUMNS, read_pieces, read_rows, take
    except ImportError as error:
        raise RatingsError(f"ratings are read by pyarrow: {pip_install('pyarrow', extra='demo')}") from error
    pieces = read_pieces(path)
    layout, pieces = open_layout(pieces, path, columns)
    parsers: dict[str, Any] = {role: COLUMNS[role]() for role in ROLES if role in layout.places}
    lines, left_out = 0, dict.fromkeys(layout.places, 0)
    for rows in read_rows(pieces, layout, path):
        lines += rows.size
        for role, count in take(rows, parsers, layout, path, missing).items():
            left_out[role] += count
    left_out = {role: count for role, count in left_out.items() if count}
    if lines == sum(left_out.values()):
        why = ", ".join(f"{count:,} without {role} ({layout.column(role)})" for role, count in left_out.items())
        raise RatingsError(
            f"ratings {path} has no line with all its values: {why}; give other columns"
            if lines
            else f"ratings {path} is empty: give lines of {FORM}"
        )
    return split_of(parsers, layout, path, lines, left_out)


def open_layout(pieces: Iterator[Piece], path: Path, columns: Mapping[str, str]) -> tuple[Layout, Iterator[Piece]]:
    """Find the layout; return it with the pieces after the heading."""
    for piece in pieces:
        blank = len(piece.text) - len(piece.text.lstrip())
        begin = piece.text.rfind(b"\n", 0, blank) + 1  # of the first line that is not blank
        lines = [line for line in piece.text[begin:].split(b"\n", 2 * SAMPLE_LINES)[: 2 * SAMPLE_LINES] if line.strip()]
        if not lines:
            continue
        first_line = piece.first_line + piece.text.count(b"\n", 0, begin)
        layout = find_layout(lines[:SAMPLE_LINES], first_line, path, columns)
        if layout.heading is not None:
            end = begin + len(lines[0]) + 1
            piece = piece._replace(text=piece.text[end:], first_line=piece.first_line + piece.text.count(b"\n", 0, end))
        return layout, chain([piece] if piece.text else [], pieces)
    raise RatingsError(f"ratings {path} is empty: give lines of {FORM}")


def split_of(parsers: Mapping[str, Any], layout: Layout, path: Path, lines: int, left_out: dict[str, int]) -> Split:
    user_ids, users = parsers["user"].finish()
    item_ids, items = parsers["item"].finish()
    times = parsers["time"].finish() if "time" in parsers else np.zeros(len(users), np.int8)
    train, test = leave_one_out(users, items, times, len(item_ids))
    test_users, test_items = np.divmod(test, len(item_ids))
    source = Source(
        path,
        layout.separator,
        layout.heading is not None,
        {role: layout.column(role) for role in ROLES if role in layout.places},
        lines,
        left_out,
        len(user_ids),
        len(item_ids),
        len(train) + len(test),
        tuple(role for role, ids in (("user", user_ids), ("item", item_ids)) if ids.is_text),
        parsers["time"].kind if "time" in parsers else None,
    )
    return Split(Interactions(train, len(user_ids), len(item_ids)), test_users, test_items, user_ids, item_ids, source)
