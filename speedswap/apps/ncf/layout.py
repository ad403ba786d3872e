"""The layout of a file: its separator and the role of its columns, by the heading's names or as the user says."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedswap.apps.errors import RatingsError, SettingsError

__all__ = [
    "DATE",
    "FIELD_MARK",
    "FORM",
    "NEEDED",
    "ROLES",
    "Layout",
    "check_columns",
    "find_layout",
    "shown",
    "split_line",
]

ROLES = ("user", "item", "rating", "time")
NEEDED = ("user", "item")
MOST_DIGITS = 9
"""Of a column's number."""
NO_COLUMN = "-"
"""Given for a role, it has no column."""
FIELD_MARK = "\x1f"
"""Divides the values of JSON lines once they are read."""
SEPARATORS = (FIELD_MARK, "::", "\t", ";", "|", ",")
"""Of equally good ones the first is taken."""
FORM = "user, item, rating and timestamp, or fewer, divided by tabs, '::', ';', '|' or commas, or as JSON lines"
TIME_DIGITS = 8
"""Whole numbers with more digits are times, not ratings."""
DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?) ?(?:(Z)|([+-])(\d\d):?(\d\d)?)?)?", re.ASCII
)
NAMES = {
    "user": "user userid uid username customer customerid client clientid member memberid account accountid visitor "
    "visitorid reviewer reviewerid",
    "item": "item itemid iid movie movieid product productid sku stockcode article articleid asin parentasin book "
    "bookid isbn track trackid song songid artist artistid business businessid",
    "rating": "rating ratings stars score overall",
    "time": "timestamp time ts date datetime unixtime unixreviewtime createdat",
}
"""Names of columns, in small letters and without the characters that divide words."""


@dataclass(frozen=True)
class Layout:
    """The form of a file's lines."""

    separator: str
    width: int
    """Fields in every line."""
    heading: tuple[str, ...] | None
    """The columns' names, where the first line has them."""
    places: Mapping[str, int]
    """The column of each role that has one, from 0."""

    def column(self, role: str) -> str:
        """Return a role's column as messages call it."""
        place = self.places[role]
        return f"column {place + 1}" + (f" {self.heading[place]!r}" if self.heading is not None else "")


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse columns that are not one of each role, user and item among them.

    Raises:
        SettingsError: a role is unknown, a name is empty, or user or item is to have no column.
    """
    for role, name in columns.items():
        if role not in ROLES:
            raise SettingsError(f"columns has {role!r}: give names or numbers for some of {', '.join(ROLES)}")
        if not isinstance(name, str) or not name:
            raise SettingsError(f"columns has {name!r} for the {role}: give the column's name, or its number from 1")
        if name == NO_COLUMN and role in NEEDED:
            raise SettingsError(f"columns has '-' for the {role}, without which nothing is learnt: give a column")
    named = [name for name in columns.values() if name != NO_COLUMN]
    for name in named:
        if named.count(name) > 1:
            raise SettingsError(f"columns has {name!r} twice: give each of {', '.join(columns)} a column of its own")


def find_layout(lines: Sequence[bytes], first_line: int, path: Path, columns: Mapping[str, str]) -> Layout:
    """Find a file's layout by its first lines.

    Args:
        lines: some of the first lines, not blank; the first may be a heading.
        first_line: its number, for messages.
        path: for messages.
        columns: for some roles the name of the column, its number from 1, or ``-`` for none.

    Raises:
        RatingsError: it is ambiguous; the message says how to use ``columns``.
    """
    where = f"ratings {path}, line {first_line}: {shown(lines[0])}"
    first = {separator: split_line(lines[0], separator) for separator in SEPARATORS}
    first = {separator: fields for separator, fields in first.items() if len(fields) > 1}
    if not first:
        raise RatingsError(f"{where} is not {FORM}")
    scores = {separator: heading_score(fields, columns) for separator, fields in first.items()}
    best = max(scores, key=lambda separator: scores[separator])
    if scores[best]:
        fields = first[best]
        places = places_by_name(fields, path, columns)
        if "time" not in {*places, *columns}:
            sample = [split_line(line, best) for line in lines[1:]]
            free = [place for place in range(len(fields)) if place not in places.values()]
            places |= time_found(sample, free)
        return Layout(best, len(fields), tuple(fields), places)
    best = max(first, key=lambda separator: evenness(lines, separator))
    fields = first[best]
    named = [name for name in columns.values() if not name.isdecimal() and name != NO_COLUMN]
    if named:
        raise RatingsError(f"{where} has no column {named[0]!r}: give the names in the heading, or numbers from 1")
    if not columns and not any(is_number(field) or DATE.fullmatch(field) for field in fields):
        raise RatingsError(
            f"{where} may be a heading or not: if it is, give the columns by name, say columns "
            f"user={fields[0]},item={fields[1]}; if not, by number, user=1,item=2"
        )
    sample = [split_line(line, best) for line in lines]
    return Layout(best, len(fields), None, places_by_number(sample, path, columns))


def split_line(line: bytes, separator: str) -> list[str]:
    """Split one line into fields; none where quotes are wrong."""
    text = line.decode().rstrip("\r\n")
    if len(separator) > 1:
        return [field.strip() for field in text.split(separator)]
    try:
        fields = next(csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True), [])
    except csv.Error:
        return []
    return [field.strip() for field in fields]


def heading_score(fields: Sequence[str], columns: Mapping[str, str]) -> int:
    """Count the columns found by name; 0 where the line is not a heading."""
    said = sum(exact_place(fields, name) is not None for name in columns.values() if not name.isdecimal())
    known = {role for role in ROLES for field in fields if plain(field) in NAMES[role].split()}
    if not said and any(map(is_number, fields)):
        return 0
    return said * len(ROLES) + len(known)


def evenness(lines: Sequence[bytes], separator: str) -> tuple[bool, int]:
    widths = [len(split_line(line, separator)) for line in lines]
    return len(set(widths)) == 1, widths[0]


def places_by_name(fields: Sequence[str], path: Path, columns: Mapping[str, str]) -> dict[str, int]:
    places: dict[str, int] = {}
    heading = ", ".join(map(repr, fields))
    for role, name in columns.items():
        if name == NO_COLUMN:
            continue
        place = exact_place(fields, name)
        if place is None and name.isdecimal():
            place = numbered_place(name, role, len(fields), path)
        if place is None:
            raise RatingsError(
                f"ratings {path} has no column {name!r} for the {role}, but {heading}: give one of these"
            )
        if fields.count(fields[place]) > 1 and not name.isdecimal():
            raise RatingsError(f"ratings {path} has several columns {name!r} for the {role}: give its number from 1")
        places[role] = place
    for role in ROLES:
        if role in columns:
            continue
        names = NAMES[role].split()
        found = [place for place, field in enumerate(fields) if plain(field) in names and place not in places.values()]
        if len(found) > 1:
            several = " and ".join(repr(fields[place]) for place in found)
            raise RatingsError(
                f"ratings {path} has columns {several}, each of which may be the {role}: say which with columns, "
                f"{role}={fields[found[0]]}"
            )
        if found:
            places[role] = found[0]
        elif role in NEEDED:
            raise RatingsError(
                f"ratings {path}: no column of {heading} is known for the {role}: say which with columns, {role}=NAME"
            )
    return check_different(places, path, fields)


def places_by_number(sample: Sequence[Sequence[str]], path: Path, columns: Mapping[str, str]) -> dict[str, int]:
    width = len(sample[0])
    numbers = {role: name for role, name in columns.items() if name != NO_COLUMN}
    if numbers:
        for role in NEEDED:
            if role not in numbers:
                raise RatingsError(
                    f"ratings {path} has no heading, and columns has {', '.join(numbers)} only: give {role}=NUMBER too"
                )
        places = {role: numbered_place(name, role, width, path) for role, name in numbers.items()}
        return check_different(places, path, [str(place + 1) for place in range(width)])
    if width > len(ROLES):
        raise RatingsError(
            f"ratings {path} has {width} columns and no heading: say which is which with columns, as in "
            "user=1,item=2,time=4"
        )
    places = {role: place for place, role in enumerate(ROLES[:width])}
    time = time_found(sample, range(2, width)) or time_found(sample, range(2), numbers=False)
    if time and width > len(NEEDED):
        others = (place for place in range(width) if place != time["time"])
        places = dict(zip(ROLES, others, strict=False)) | time
    return {role: place for role, place in places.items() if role not in columns}


def time_found(sample: Sequence[Sequence[str]], places: Iterable[int], *, numbers: bool = True) -> dict[str, int]:
    """Return the time's place: that of the only column of dates, or of numbers too large for ratings."""

    def is_time(text: str) -> bool:
        large = numbers and text.isdecimal() and len(text.lstrip("0")) > TIME_DIGITS
        return large or DATE.fullmatch(text) is not None

    found = []
    for place in places:
        texts = [fields[place] for fields in sample if len(fields) > place and fields[place]]
        if texts and all(map(is_time, texts)):
            found.append(place)
    return {"time": found[0]} if len(found) == 1 else {}


def exact_place(fields: Sequence[str], name: str) -> int | None:
    """Find a column by its name; by other capitals where only one matches."""
    if name in fields:
        return fields.index(name)
    alike = [place for place, field in enumerate(fields) if field.lower() == name.strip().lower()]
    return alike[0] if len(alike) == 1 else None


def numbered_place(number: str, role: str, width: int, path: Path) -> int:
    place = int(number[-MOST_DIGITS:]) if len(number.lstrip("0")) <= MOST_DIGITS else 0
    if not 1 <= place <= width:
        raise RatingsError(
            f"ratings {path} has columns 1 to {width}, but columns has {number[:20]} for the {role}: give one of them"
        )
    return place - 1


def check_different(places: dict[str, int], path: Path, names: Sequence[str]) -> dict[str, int]:
    taken: dict[int, str] = {}
    for role, place in places.items():
        if place in taken:
            raise RatingsError(
                f"ratings {path}: column {names[place]!r} is to be the {taken[place]} and the {role}: give two columns"
            )
        taken[place] = role
    return places


def plain(name: str) -> str:
    return "".join(character for character in name.lower() if character not in "_-. ")


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).removeprefix("-").isdecimal()


def shown(text: bytes | str, most: int = 60) -> str:
    """Return a line or value as messages show it."""
    if isinstance(text, bytes):
        text = text[: 4 * most + 1].decode("utf-8", "replace")
    text = text.rstrip()
    return repr(text if len(text) <= most else text[:most] + "…")
