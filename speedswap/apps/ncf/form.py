"""The form of a file of ratings, found by its first lines: the separator, the heading and the columns' roles."""

from __future__ import annotations

import codecs
import csv
import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

from speedswap.apps.errors import RatingsError, SettingsError, named

ROLES = ("user", "item", "rating", "time")
NEEDED = ROLES[:2]
MISSING = ("skip", "error")
NO_COLUMN = "-"
"""Given for a role, it has no column."""
SEPARATORS = ("::", "\t", ";", "|", ",")
"""Of equally good ones the first is taken."""
BLANK = " "  # or several, or tabs, where nothing else separates
JSON_LINES, PARQUET_ROWS = "JSON lines", "Parquet"
UNQUOTED, USUALLY_QUOTED = ("::", BLANK), (",", ";")
QUOTED = '"(?:[^"]|"")*"'
COMMENTS = "#%"
FORM = "user, item, rating and timestamp, or fewer, divided by tabs, '::', ';', '|', commas or blanks, or as JSON lines"
HEAD_BYTES = 1 << 20
SAMPLE_LINES = 50
TIME_DIGITS = 8
"""Whole numbers with more digits are times, not ratings."""
DATE = re.compile(r"(?:\d{4}-\d\d-\d\d|\d\d?([/.])\d\d?\1\d{4})(?:[T ][\d:.]+ ?[Z\d:+APM-]*)?", re.ASCII)
NAMES = {
    "user": "user userid uid username customer customerid client clientid member memberid account accountid visitor "
    "visitorid reviewer reviewerid",
    "item": "item itemid iid movie movieid product productid sku stockcode article articleid asin parentasin book "
    "bookid isbn track trackid song songid artist artistid business businessid",
    "rating": "rating ratings bookrating stars score overall",
    "time": "timestamp time ts date datetime unixtime unixreviewtime createdat",
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names.split()}
"""The roles of columns with usual names, in small letters and without the characters that divide words."""


@dataclass(frozen=True)
class RatingsForm:
    """A file, and the form of its lines.

    Attributes:
        path: the file.
        separator: ``JSON lines`` or ``Parquet`` for files without one.
        heading: the columns' names, where the first line, the first objects or the file have them.
        width: fields in every line.
        first_line: the number of the first line with values, from 1.
        places: the column of each role that has one, from 0.
        quotes: ``all`` or ``some`` if quotes stand around fields; empty if they are part of them.
    """

    path: Path
    separator: str
    heading: tuple[str, ...] | None
    width: int
    first_line: int
    places: Mapping[str, int]
    quotes: str

    @property
    def unit(self) -> str:
        """A line as messages call it."""
        return "row" if self.separator == PARQUET_ROWS else "line"

    @property
    def columns(self) -> dict[str, str]:
        """The column of each role that has one, as messages call it."""
        names = [""] * self.width if self.heading is None else [f" {name!r}" for name in self.heading]
        places = {role: self.places[role] for role in ROLES if role in self.places}
        return {role: f"column {place + 1}{names[place]}" for role, place in places.items()}

    def misfit(self, width: int, line: str) -> str:
        """Describe a line that has another width, or none for its quotes."""
        fault = f"{self.width} columns expected, {width} found"
        if not width:
            most = f"{csv.field_size_limit():,} characters"
            fault = f"a quote without end, with more after it, or around more than {most}"
        return f"{fault}: {shown(line)}"


@dataclass(frozen=True)
class RatingsSource(RatingsForm):
    """A file as it was read, for the user to check.

    Attributes:
        lines: lines other than the heading and blank ones.
        left_out: lines without a value, by the first role that lacked one.
        malformed: other lines that were left out.
        first: the first of those, with their faults.
        time: ``numbers`` or ``dates``; None where the order of lines stands for time.
    """

    lines: int
    left_out: Mapping[str, int]
    malformed: int
    first: str
    time: str | None

    def __str__(self) -> str:
        separator = {"\t": "tabs", BLANK: "blanks"}.get(self.separator, repr(self.separator))
        heading = "no heading" if self.heading is None else "with heading"
        is_named = self.separator in (JSON_LINES, PARQUET_ROWS)
        form = self.separator if is_named else f"divided by {separator}, {heading}"
        said = [f"{self.path}: {form}; " + ", ".join(f"{role} is {name}" for role, name in self.columns.items())]
        if "rating" not in self.places:
            said.append("no ratings, so that every line counts the same")
        if self.time != "numbers":
            said.append("times are dates" if self.time else "no times, so that the order of lines stands for them")
        left = sum(self.left_out.values()) + self.malformed
        why = [f"{count:,} without {role}" for role, count in self.left_out.items()]
        why += [f"{self.malformed:,} malformed: {self.first}"] * bool(self.malformed)
        left_out = f"{left:,} left out ({', '.join(why)})" if left else "none left out"
        return "; ".join(said) + f"\n{self.lines:,} {self.unit}s read, {left_out}"


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
    text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)  # a character may be cut at the end
    if len(head) >= HEAD_BYTES:
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
        if not text:
            raise RatingsError(f"ratings {path} has a line of more than {HEAD_BYTES:,} bytes: is it text?")
    numbered = [(number, line) for number, line in enumerate(re.split("\r\n|\r|\n", text), 1) if line.strip()]
    comments = [*takewhile(lambda each: each[1][0] in COMMENTS, numbered)]
    first_line, lines = len(comments) and comments[-1][0] + 1, [line for _, line in numbered[len(comments) :]]
    if not lines:
        raise RatingsError(f"ratings {path} is empty: give lines of {FORM}")
    if is_json := lines[0].lstrip().startswith("{"):
        objects: list[dict[str, str]] = []
        for line in lines:
            with suppress(ValueError):  # they are left out later
                objects.append(json_values(line))
        keys = [*dict.fromkeys(chain.from_iterable(objects))]
        tables = {JSON_LINES: [keys, *([each.get(key, "") for key in keys] for each in objects[:SAMPLE_LINES])]}
    else:
        tables = {separator: fields_of(lines, separator) for separator in SEPARATORS}
    tables = {separator: table for separator, table in tables.items() if table and len(table[0]) > 1}
    words = lines[0].split()
    if not tables and not is_json and len(words) > 1 and (known_names(words, columns) or any(map(is_value, words))):
        tables = {BLANK: fields_of(lines, BLANK)}
    if not tables:
        raise RatingsError(f"ratings {path}, line {numbered[len(comments)][0]}: {shown(lines[0])} is not {FORM}")

    def goodness(separator: str) -> tuple[int, bool, int]:
        table = tables[separator]
        return known_names(table[0], columns), len({*map(len, table)}) == 1, len(table[0])

    separator = max(tables, key=goodness)
    first, *sample = tables[separator]
    heading: Sequence[str] | None = first
    if is_json or known_names(first, columns):
        first_line = 1 if is_json else numbered[len(comments)][0] + 1
        if not sample:
            raise RatingsError(f"ratings {path} is empty: give lines of {FORM}")
    else:
        titles = fields_of([line.lstrip(COMMENTS + BLANK) for _, line in comments], separator)
        heading, sample = next((each for each in reversed(titles) if len(each) == len(first)), None), [first, *sample]
        if not columns and not (known_names(heading, columns) if heading else any(map(is_value, first))):
            number, line = comments[-1] if heading else numbered[len(comments)]
            user, item, *_ = heading or first
            raise RatingsError(
                f"ratings {path}, line {number}: {shown(line)} may be a heading or not: if it is, give the columns by "
                f"name, say {named('columns')} user={user},item={item}; if not, by number, user=1,item=2"
            )
    places, quotes = find_places(heading, sample, columns, path), "" if is_json else quotes_of(lines, separator)
    return RatingsForm(
        path, separator, tuple(heading) if heading else None, len(first), max(first_line, 1), places, quotes
    )


def json_values(line: str) -> dict[str, str]:
    """Return the values of a JSON object as they are written, those of whole numbers without decimals.

    Raises:
        ValueError: the line has something else.
    """
    try:
        found = json.loads(line, parse_int=str, parse_float=lambda text: text.removesuffix(".0"), parse_constant=str)
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
    except (AttributeError, RecursionError) as error:
        raise ValueError("something else") from error


def quotes_of(lines: Sequence[str], separator: str) -> str:
    """Return ``all`` or ``some`` if quotes stand around fields, and nothing if they are part of them.

    Quotes stand around fields if all of the first line are in some, or if lines become more regular by them. Otherwise
    they hide nothing, and most fields that begin with one must end with it; with separators for which few programs
    write any, each must, and have others within, doubled.
    """
    if separator in UNQUOTED:
        return ""
    if re.fullmatch(f"{QUOTED}({re.escape(separator)}{QUOTED})*", lines[0].strip()):
        return "all"
    is_usual, rows = separator in USUALLY_QUOTED, [line.split(separator) for line in lines]
    marked = [field.strip() for row in rows for field in row if '"' in field]
    if not marked:
        return "some" * is_usual
    misfits = sum(len(row) != len(rows[0]) for row in rows)
    in_quotes = [row for row, _ in quoted_rows(lines, separator, 0)]
    if sum(len(row) != len(in_quotes[0]) for row in in_quotes) < misfits:
        return "some"
    begun = [field for field in marked if field.startswith('"') or not is_usual]
    whole = [field for field in begun if re.fullmatch(QUOTED, field) and (is_usual or '""' in field[1:-1])]
    return "some" * (2 * len(whole) > len(begun) or not begun if is_usual else whole == begun)


def quoted_rows(lines: Iterable[str], separator: str, width: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each row's fields, and its lines.

    A line whose quotes are wrong is a row of its own, without fields. So is the first of several with ``width`` fields
    each, since a quote in it that belongs to a field seems to end in another line.
    """
    source, again, taken = iter(lines), deque[str](), list[str]()

    def take() -> str:
        taken.append(again.popleft() if again else next(source, ""))
        return taken[-1]

    while True:
        reader = csv.reader(iter(take, ""), delimiter=separator, skipinitialspace=True, strict=True)
        try:
            for fields in reader:
                if len(taken) > 1 and all(line.count(separator) + 1 == width for line in taken):
                    raise csv.Error
                yield fields, taken[:]
                taken.clear()
            return
        except csv.Error:
            again.extendleft(reversed(taken[1:]))
            yield [], taken[:1]
            taken.clear()


def fields_of(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Split the first lines into fields."""
    rows: Iterable[list[str]] = (line.split(None if separator == BLANK else separator) for line in lines)
    if lines and quotes_of(lines, separator):
        rows = (fields for fields, _ in quoted_rows([line + "\n" for line in lines], separator, 0) if fields)
    return [[field.strip() for field in row] for row in islice(rows, SAMPLE_LINES)]


def known_names(fields: Sequence[str], columns: Mapping[str, str]) -> int:
    """Count the columns found by name, those of ``columns`` first; 0 where the line is not a heading."""
    known_as = [plain(field) for field in fields]
    said = sum(plain(name) in known_as for name in columns.values() if not name.isdecimal())
    known = len({role_of(field) for field in fields} - {None})
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
            usual = [place for place, field in enumerate(names) if role_of(field) == role]
            found = [place for place in usual if place not in places.values()]
        else:
            found = [place for place, field in enumerate(names) if field == name]
            found = found or [place for place, field in enumerate(names) if plain(field) == plain(name)]
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
    """Return a column's name in lower case and Unicode's form NFC."""
    return unicodedata.normalize("NFC", name.strip().lower())


def role_of(name: str) -> str | None:
    """Return the role of a column with a usual name."""
    return ROLE_OF.get(re.sub("[-_. ]", "", name.lower()))


def is_value(text: str) -> bool:
    """Return whether a field is a number or a date, which no heading has."""
    return is_number(text) or DATE.fullmatch(text) is not None


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).removeprefix("-").isdecimal()


def shown(value: Any, most: int = 60) -> str:
    """Return a line or value as messages show it."""
    text = str(value).rstrip()
    return repr(text if len(text) <= most else text[:most] + "…")
