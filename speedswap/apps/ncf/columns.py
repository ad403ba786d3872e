"""The values of a file of ratings, read by pyarrow, as a split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from speedswap.apps.columns import cast
from speedswap.apps.errors import RatingsError, named
from speedswap.apps.ncf.interactions import Ids, Interactions, NcfSplit, OwnIds, leave_one_out
from speedswap.apps.ncf.ratings import NEEDED, RatingsForm, RatingsSource, json_values, shown

TEXT = pa.large_string()
MARK = "\x1f"
"""Stands for a separator of two characters."""
BLOCK_BYTES = 1 << 24
LINES_AT_ONCE = 1 << 14
MISSING_WORDS = pa.array(["", *"NA N/A n/a #N/A <NA> NaN nan NULL null None \\N".split()], TEXT)
"""Fields without a value, as programs write them."""
NUMBERS = (pa.int64(), pa.float64())
DATES = tuple(pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC"))
REMEDIES = {
    "rating": "not a number: correct it, or leave ratings out with {columns} rating=-",
    "numbers": "neither a number nor a date such as 2024-12-31 or 2024-12-31T23:59:59Z: correct it, or take the order "
    "of lines for time with {columns} time=-",
    "dates": "not a date like the first one: correct it, or take the order of lines for time with {columns} time=-",
}


def read_ratings(data: IO[bytes], form: RatingsForm, missing: str) -> NcfSplit:
    """Read a file's users, items and times, and set each user's latest item apart.

    Raises:
        RatingsError: a line is malformed or has a wrong value, or none has all values; the message says which.
    """
    texts, blank_lines = (read_lines if form.separator else read_objects)(data, form)
    numbers = np.arange(form.first_line, form.first_line + len(texts["user"]) + len(blank_lines))
    numbers = numbers[np.isin(numbers, blank_lines, invert=True)]  # of the rows' lines
    lacks = {role: np.asarray(column.is_null()) for role, column in texts.items()}
    present = ~np.all([*lacks.values()], axis=0)  # a line with nothing at all is blank
    lines, left_out = int(present.sum()), {}
    for role, lacking in lacks.items():
        if count := int((lacking & present).sum()):
            left_out[role] = count
            if missing == "error":
                raise RatingsError(
                    f"{form.line(numbers[lacking & present][0])}: no {role}, for {form.columns[role]} has nothing, or "
                    f"a word such as NA: fill it in, or leave such lines out with {named('missing')}=skip"
                )
            present &= ~lacking
    if not present.any():
        why = ", ".join(f"{count:,} without {role} ({form.columns[role]})" for role, count in left_out.items())
        raise RatingsError(f"ratings {form.path} has no line with all its values: {why or 'all are blank'}")
    texts = {role: column.filter(pa.array(present)) for role, column in texts.items()}
    numbers = numbers[present]

    def converted(role: str, kinds: Sequence[Any], remedy: str) -> Any:
        found, wrong = cast(texts[role], *kinds)
        if wrong is None:
            return found
        hint = "; if the line is a heading, give the columns by its names" if form.heading is None and not wrong else ""
        value = shown(texts[role][wrong])
        where = form.line(numbers[wrong])
        remedy = remedy.format(columns=named("columns"))
        raise RatingsError(f"{where}: {role} ({form.columns[role]}) is {value}, {remedy}{hint}")

    if form.heading is not None:  # in concatenated files it comes again; where all is text it fits anywhere
        user, item = (pc.equal(texts[role], form.heading[form.places[role]]) for role in NEEDED)
        if (row := pc.index(pc.and_(user, item), True).as_py()) >= 0:
            raise RatingsError(f"{form.line(numbers[row])} is the heading again: remove it, and all others")
    if "rating" in texts:
        converted("rating", NUMBERS[1:], REMEDIES["rating"])
    times, time = np.zeros(len(numbers), np.int8), None
    if "time" in texts:
        time = "numbers" if cast(texts["time"][:1], *DATES)[1] is not None else "dates"
        times = converted("time", DATES if time == "dates" else NUMBERS, REMEDIES[time]).to_numpy()
    (user_ids, users), (item_ids, items) = (rows_of(texts[role]) for role in NEEDED)
    train, test = leave_one_out(users, items, times, len(item_ids))
    source = RatingsSource(**vars(form), lines=lines, left_out=left_out, time=time)
    interactions = Interactions(train, len(user_ids), len(item_ids))
    return NcfSplit(interactions, *np.divmod(test, len(item_ids)), user_ids, item_ids, source)


def read_lines(data: IO[bytes], form: RatingsForm) -> tuple[dict[str, Any], list[int]]:
    """Return the text of each role's column, null where it is missing; and the numbers of lines that are no rows."""
    blank_lines: list[int] = []

    def skip(row: Any) -> str:
        if row.text.strip():
            return "error"
        blank_lines.append(row.number)
        return "skip"

    source: Any = data
    separator = form.separator if len(form.separator) == 1 else MARK
    if separator == MARK:
        source = pa.BufferReader(data.read().replace(form.separator.encode(), MARK.encode()))
    names = [str(place) for place in range(form.width)]
    wanted = {role: names[place] for role, place in form.places.items()}
    try:
        table = csv.read_csv(
            source,
            csv.ReadOptions(
                use_threads=False, block_size=BLOCK_BYTES, column_names=names, skip_rows=form.first_line - 1
            ),
            csv.ParseOptions(
                delimiter=separator,
                quote_char=False if separator == MARK else '"',
                newlines_in_values=separator != MARK,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, TEXT),
                include_columns=[*{**dict.fromkeys(wanted.values()), names[-1]: None}],
            ),
        )
    except pa.ArrowInvalid as error:
        said = str(error).replace(MARK, form.separator).replace("Row #", "line ")
        remedy = "save the file as UTF-8" if "UTF8" in said else "correct the line, or remove it"
        raise RatingsError(f"ratings {form.path}: {said}; {remedy}") from error
    end = table[names[-1]][-1].as_py() if len(table) else ""
    if "\n" in end and end.count(separator) >= form.width - 1:
        raise RatingsError(f"{form.line(form.first_line + len(table) - 1)} has a quote that does not end")
    return {role: trimmed(table[name]) for role, name in wanted.items()}, blank_lines


def read_objects(data: IO[bytes], form: RatingsForm) -> tuple[dict[str, Any], list[int]]:
    """Return the text of each role's values in JSON lines, a row for each line."""
    keys = {role: (form.heading or ())[place] for role, place in form.places.items()}
    parts: dict[str, list[Any]] = {role: [] for role in keys}
    numbered = enumerate(data, 1)
    while lines := list(itertools.islice(numbered, LINES_AT_ONCE)):
        objects = [json_values(line, number, form.path) if line.strip() else {} for number, line in lines]
        for role, key in keys.items():
            texts = (each.get(key, "").encode(errors="replace") for each in objects)
            parts[role].append(pa.array([*texts], pa.large_binary()).cast(TEXT))
    return {role: trimmed(pa.chunked_array(part, TEXT)) for role, part in parts.items()}, []


def trimmed(texts: Any) -> Any:
    texts = pc.ascii_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, MISSING_WORDS), None, texts)


def rows_of(texts: Any) -> tuple[OwnIds, Ids]:
    """Return the ids, as numbers if all of them are whole numbers as Python writes them, and each line's row."""
    encoded = texts.dictionary_encode()
    ids = encoded.chunk(0).dictionary
    numbers, _ = cast(ids, pa.int64())
    if numbers is not None and pc.all(pc.equal(numbers.cast(TEXT), ids)).as_py():  # 007 is text
        ids = numbers
    order = pc.sort_indices(ids).to_numpy()
    rows = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    return OwnIds(ids.to_numpy(zero_copy_only=False)[order]), order.argsort()[rows]
