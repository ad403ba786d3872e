"""Read a file of ratings, with any columns and any ids, into a split.

The separator and the columns' roles are found here, by the first lines; ``columns`` reads the values.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedswap._install import pip_install
from speedswap.apps.errors import RatingsError, SettingsError, named
from speedswap.apps.files import opened
from speedswap.apps.ncf.interactions import NcfSplit
from speedswap.apps.options import one_of

ROLES = ("user", "item", "rating", "time")
NEEDED = ROLES[:2]
MISSING = ("skip", "error")
NO_COLUMN = "-"
"""Given for a role, it has no column."""
SEPARATORS = ("::", "\t", ";", "|", ",")
"""Of equally good ones the first is taken."""
FORM = "user, item, rating and timestamp, or fewer, divided by tabs, '::', ';', '|' or commas, or as JSON lines"
HEAD_BYTES = 1 << 20
SAMPLE_LINES = 50
TIME_DIGITS = 8
"""Whole numbers with more digits are times, not ratings."""
DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ][\d:.]+ ?[Z\d:+-]*)?", re.ASCII)
NAMES = {
    "user": "user userid uid username customer customerid client clientid member memberid account accountid visitor "
    "visitorid reviewer reviewerid",
    "item": "item itemid iid movie movieid product productid sku stockcode article articleid asin parentasin book "
    "bookid isbn track trackid song songid artist artistid business businessid",
    "rating": "rating ratings stars score overall",
    "time": "timestamp time ts date datetime unixtime unixreviewtime createdat",
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names.split()}
"""The roles of columns with usual names, in small letters and without the characters that divide words."""


@dataclass(frozen=True)
class RatingsForm:
    """A file, and the form of its lines."""

    path: Path
    separator: str
    """Empty for JSON lines."""
    heading: tuple[str, ...] | None
    """The columns' names, where the first line or the first object has them."""
    width: int
    """Fields in every line."""
    first_line: int
    """The number of the first line with values, from 1."""
    places: Mapping[str, int]
    """The column of each role that has one, from 0."""

    @property
    def columns(self) -> dict[str, str]:
        """The column of each role that has one, as messages call it."""
        names = [""] * self.width if self.heading is None else [f" {name!r}" for name in self.heading]
        places = {role: self.places[role] for role in ROLES if role in self.places}
        return {role: f"column {place + 1}{names[place]}" for role, place in places.items()}

    def line(self, number: int) -> str:
        """Return a line as messages call it."""
        return f"ratings {self.path}, line {number}"


@dataclass(frozen=True)
class RatingsSource(RatingsForm):
    """A file as it was read, for the user to check."""

    lines: int
    """Lines other than the heading and blank ones."""
    left_out: Mapping[str, int]
    """Lines without a value, by the first role that lacked one."""
    time: str | None
    """``numbers`` or ``dates``; None where the order of lines stands for time."""

    def __str__(self) -> str:
        separator = {"\t": "tabs"}.get(self.separator, repr(self.separator))
        heading = "no heading" if self.heading is None else "with heading"
        form = f"divided by {separator}, {heading}" if self.separator else "JSON lines"
        said = [f"{self.path}: {form}; " + ", ".join(f"{role} is {name}" for role, name in self.columns.items())]
        if "rating" not in self.places:
            said.append("no ratings, so that every line counts the same")
        if self.time != "numbers":
            said.append("times are dates" if self.time else "no times, so that the order of lines stands for them")
        left = sum(self.left_out.values())
        why = ", ".join(f"{count:,} without {role}" for role, count in self.left_out.items())
        read = f"{self.lines:,} lines read, {f'{left:,} left out ({why})' if left else 'none left out'}"
        return "; ".join(said) + "\n" + read


def read_split(path: Path, columns: Mapping[str, str] | None = None, *, missing: str = "skip") -> NcfSplit:
    """Read ratings, and set each user's latest one apart for testing.

    Lines are divided by tabs, ``::``, ``;``, ``|`` or commas, with a heading or without, or are JSON objects; the file
    is UTF-8, plain or gzip. A field may stand between quotes, except with ``::``. Users and items may have any ids:
    where all ids of a column are whole numbers, they get rows in their order, else in the order of their text. A
    rating's value has no effect, only its presence. Times are numbers of any unit or ISO dates, all with a zone or all
    without; without times the order of lines stands for time. Memory is some 100 bytes per line, whatever else is in
    it. Needs pyarrow.

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
    one_of(MISSING)(named("missing"), missing)
    try:
        from speedswap.apps.ncf.columns import read_ratings
    except ImportError as error:
        raise RatingsError(f"ratings are read by pyarrow: {pip_install('pyarrow', extra='demo')}") from error
    with opened(path, "ratings", RatingsError) as file:
        data = io.BufferedReader(file, HEAD_BYTES)
        return read_ratings(data, find_form(data.peek(), path, columns), missing)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse columns unless they have one per role, user and item included.

    Raises:
        SettingsError: a role is unknown, a name is empty, or user or item is to have no column.
    """
    given, setting = [name for name in columns.values() if name != NO_COLUMN], named("columns")
    for role, name in columns.items():
        if role not in ROLES:
            raise SettingsError(f"{setting} has {role!r}: give names or numbers for some of {', '.join(ROLES)}")
        if not isinstance(name, str) or not name:
            raise SettingsError(f"{setting} has {name!r} for the {role}: give the column's name, or its number from 1")
        if name == NO_COLUMN and role in NEEDED:
            raise SettingsError(f"{setting} has '-' for the {role}, without which nothing is learnt: give a column")
        if given.count(name) > 1:
            raise SettingsError(f"{setting} has {name!r} twice: give each of {', '.join(columns)} a different column")


# ---- the form of a file ---------------------------------------------------------------------------------------------


def find_form(head: bytes, path: Path, columns: Mapping[str, str]) -> RatingsForm:
    """Find separator, heading and columns by a file's first bytes.

    Raises:
        RatingsError: they are not clear; the message says how to use ``columns``.
    """
    whole = head if len(head) < HEAD_BYTES else head[: head.rfind(b"\n") + 1]
    if head and not whole:
        raise RatingsError(f"ratings {path} has a line of more than {HEAD_BYTES:,} bytes: is it text?")
    try:
        text = whole.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        form = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        line = whole.count(b"\n", 0, error.start) + 1
        raise RatingsError(
            f"ratings {path}, line {line} is not UTF-8: save the file as UTF-8, say iconv -f {form} -t utf-8"
        ) from error
    numbered = [(number, line) for number, line in enumerate(re.split("\r\n|\r|\n", text), 1) if line.strip()]
    empty = RatingsError(f"ratings {path} is empty: give lines of {FORM}")
    if not numbered:
        raise empty
    first_line, lines = numbered[0][0], [line for _, line in numbered[:SAMPLE_LINES]]
    where = f"ratings {path}, line {first_line}: {shown(lines[0])}"
    if is_json := lines[0].lstrip().startswith("{"):
        objects = [json_values(line, number, path) for number, line in numbered[:SAMPLE_LINES]]
        tables = {"": [[*objects[0]], *([each.get(key, "") for key in objects[0]] for each in objects)]}
    else:
        tables = {separator: fields_of(lines, separator) for separator in SEPARATORS}
        tables = {separator: table for separator, table in tables.items() if len(table[0]) > 1}
    if not tables:
        raise RatingsError(f"{where} is not {FORM}")

    def goodness(separator: str) -> tuple[int, bool, int]:
        table = tables[separator]
        return known_names(table[0], columns), len({*map(len, table)}) == 1, len(table[0])

    separator = max(tables, key=goodness)
    first, *sample = tables[separator]
    if is_json or known_names(first, columns):
        if not sample:
            raise empty
        places = find_places(tuple(first), sample, columns, path)
        return RatingsForm(path, separator, tuple(first), len(first), 1 if is_json else first_line + 1, places)
    if not columns and not any(is_number(field) or DATE.fullmatch(field) for field in first):
        raise RatingsError(
            f"{where} may be a heading or not: if it is, give the columns by name, say {named('columns')} "
            f"user={first[0]},item={first[1]}; if not, by number, user=1,item=2"
        )
    places = find_places(None, [first, *sample], columns, path)
    return RatingsForm(path, separator, None, len(first), first_line, places)


def json_values(line: str | bytes, number: int, path: Path) -> dict[str, str]:
    """Return the values of a JSON object as they are written.

    Raises:
        RatingsError: the line has something else.
    """
    try:
        found = json.loads(line, parse_int=str, parse_float=str, parse_constant=str).items()
    except (ValueError, AttributeError, RecursionError) as error:
        text = shown(line if isinstance(line, str) else line[:1000].decode(errors="replace"))
        raise RatingsError(
            f"ratings {path}, line {number}: {text} is not a JSON object: correct it, or remove it"
        ) from error
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found}


def fields_of(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Split lines into fields."""
    rows: Iterable[list[str]] = (line.split(separator) for line in lines)
    if len(separator) == 1:
        rows = csv.reader([line + "\n" for line in lines], delimiter=separator)
    try:
        return [[field.strip() for field in row] for row in rows]
    except csv.Error:  # a very long field: this is not the separator
        return [[]]


def known_names(fields: Sequence[str], columns: Mapping[str, str]) -> int:
    """Count the columns found by name, those of ``columns`` first; 0 where the line is not a heading."""
    lowered = [field.lower() for field in fields]
    said = sum(name.strip().lower() in lowered for name in columns.values() if not name.isdecimal())
    known = len({ROLE_OF.get(plain(field)) for field in fields} - {None})
    return said * len(ROLES) + known if said or not any(map(is_number, fields)) else 0


def find_places(
    heading: Sequence[str] | None, sample: Sequence[Sequence[str]], columns: Mapping[str, str], path: Path
) -> dict[str, int]:
    """Find the column of each role: as ``columns`` says, by name, by what is in it, or by its place."""
    width = len(sample[0] if heading is None else heading)
    names = heading or ()
    listed = ", ".join(map(repr, names)) or f"numbers 1 to {width}"
    places: dict[str, int] = {}
    for role in (*columns, *(role for role in ROLES if role not in columns)):
        if (name := columns.get(role)) is None:
            usual = [place for place, field in enumerate(names) if ROLE_OF.get(plain(field)) == role]
            found = [place for place in usual if place not in places.values()]
        else:
            found = [place for place, field in enumerate(names) if field == name]
            found = found or [place for place, field in enumerate(names) if field.lower() == name.strip().lower()]
            if not found and name.isdecimal() and len(name) < 10 and 1 <= int(name) <= width:
                found = [int(name) - 1]
            if not found and name != NO_COLUMN:
                raise RatingsError(f"ratings {path} has no column {shown(name)} for the {role}, but {listed}: give one")
        if len(found) > 1:
            several = " and ".join(repr(names[place]) for place in found)
            raise RatingsError(
                f"ratings {path} has columns {several}, each of which may be the {role}: say which "
                f"with {named('columns')}, {role}={found[0] + 1} or {role}={found[1] + 1}"
            )
        if found:
            if found[0] in places.values():
                raise RatingsError(
                    f"ratings {path}: column {found[0] + 1} is to be the {role} and another role: give two columns"
                )
            places[role] = found[0]
    if (lacking := [role for role in NEEDED if role not in places]) and (columns or heading is not None):
        known_too = f"{named('columns')} has {', '.join(columns)} only, and " if columns else ""
        raise RatingsError(
            f"ratings {path}: {known_too}no column of {listed} is known for the {lacking[0]}: say "
            f"which with {named('columns')}, {lacking[0]}={'NUMBER' if heading is None else 'NAME'}"
        )
    if heading is not None and "time" not in {*places, *columns}:
        places |= time_found(sample, [place for place in range(width) if place not in places.values()])
    if places:
        return places
    if width > len(ROLES):
        raise RatingsError(
            f"ratings {path} has {width} columns and no heading: say which is which with {named('columns')}, as in "
            "user=1,item=2,time=4"
        )
    time = time_found(sample, range(2, width)) or time_found(sample, range(2 * (width > 2)), numbers=False)
    return dict(zip(ROLES, (place for place in range(width) if place not in time.values()), strict=False)) | time


def time_found(sample: Sequence[Sequence[str]], places: Iterable[int], *, numbers: bool = True) -> dict[str, int]:
    """Return the time's place: that of the only column of dates, or of numbers too large for ratings."""

    def is_time(text: str) -> bool:
        large = numbers and text.isdecimal() and len(text.lstrip("0")) > TIME_DIGITS
        return large or DATE.fullmatch(text) is not None

    values = {place: [fields[place] for fields in sample if len(fields) > place and fields[place]] for place in places}
    found = [place for place, texts in values.items() if texts and all(map(is_time, texts))]
    return {"time": found[0]} if len(found) == 1 else {}


def plain(name: str) -> str:
    return re.sub("[-_. ]", "", name.lower())


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).removeprefix("-").isdecimal()


def shown(value: Any, most: int = 60) -> str:
    """Return a line or value as messages show it."""
    text = str(value).rstrip()
    return repr(text if len(text) <= most else text[:most] + "…")
