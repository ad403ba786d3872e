"""Read a file of ratings, with any columns and any ids, into a split; by pyarrow."""

from __future__ import annotations

import heapq
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from speedswap._words import pip_install
from speedswap.apps.errors import RatingsError, named
from speedswap.apps.files import PARQUET, opened, parquet_opened
from speedswap.apps.ncf import form as forms
from speedswap.apps.ncf.form import RatingsForm, RatingsSource
from speedswap.apps.ncf.interactions import WHOLE_NUMBER, Ids, Interactions, NcfSplit, OwnIds, leave_one_out
from speedswap.apps.options import one_of

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    from speedswap.apps.columns import fitted
except ImportError as error:
    raise RatingsError(f"ratings are read by pyarrow: {pip_install('pyarrow', extra='parquet')}") from error

TEXT = pa.large_string()
MARK = "\x1f"  # stands for a separator of two characters
BLOCK_BYTES = 1 << 24
LINES_AT_ONCE = 1 << 14
SHOWN_LINES = 3
MISSING_WORDS = pa.array(["", *"NA N/A n/a #N/A <NA> NaN nan NULL null None \\N".split()], TEXT)
"""Fields without a value, as programs write them."""
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M:%S %p")
DATES = (
    *(pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC")),
    *(day + clock for day in ("%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y") for clock in CLOCKS),
    "%a %b %d %H:%M:%S %z %Y",
)
REMEDIES = {
    "rating": "not a number ({columns} rating=- leaves ratings out)",
    "numbers": "neither a number nor a date such as 2024-12-31, 2024-12-31T23:59:59Z or 12/31/2024 (with {columns} "
    "time=- the order of lines stands for time)",
    "dates": "not a date like others (with {columns} time=- the order of lines stands for time)",
}

Part = tuple[NDArray[np.int64], dict[str, Any]]
"""Some lines' numbers, and the text of each role's column, null or empty where it is missing."""


def read_split(path: Path, columns: Mapping[str, str] | None = None, *, missing: str = "skip") -> NcfSplit:
    """Read ratings, and set each user's latest one apart for testing.

    Lines are divided by tabs, ``::``, ``;``, ``|``, commas or blanks, with a heading or without, or are JSON objects;
    the file is UTF-8, plain or gzip, or Parquet. Fields may stand between quotes where
    the first lines show it, or the separator is a comma or ``;``. Lines at the beginning with ``#`` or ``%`` are
    comments, and the last of them may be the heading. Users and items may have any ids: where all ids of a column are
    whole numbers, they get rows in their order, and 1 and 1.0 are the same; else in the order of their text. A rating's
    value has no effect, only its presence. Times are numbers of any unit, or dates of one form; in those with slashes
    months come first, unless one is above 12. Without times the order of lines stands for time. Memory is some 100
    bytes per line, whatever else is in it. Needs pyarrow.

    Args:
        path: the file.
        columns: for ``user``, ``item``, ``rating`` or ``time`` the name of its column in the heading, or its number
            from 1, or ``-`` for a rating or time to be passed over. Others are found by name in the heading, as
            ``user_id``, ``customer``, ``movieId``, ``sku``, ``stars`` or ``timestamp``; without a heading the first
            columns are user, item, rating and timestamp. Where no name says which column is time, it is the only one
            of dates or large numbers.
        missing: ``skip`` leaves lines out that are malformed, or lack one of these values (nothing, ``NA``, ``NaN``,
            ``null``, ``None``, ``\\N``), and counts them; ``error`` refuses them.

    Returns:
        The split; its ``source`` says how the file was read.

    Raises:
        RatingsError: the file is missing, unreadable, damaged or empty, its columns are ambiguous, or more than half of
            its lines are malformed; the message says which.
        SettingsError: ``columns`` or ``missing`` has another value.

    Example::

        split = read_split(Path("orders.csv"), {"user": "customer", "item": "sku", "time": "-"})
        print(split.source)  # the columns and their roles, the lines left out, …
    """
    columns = columns or {}
    forms.check_columns(columns)
    one_of(forms.MISSING)(named("missing"), missing)
    wrong: dict[int, str] = {}
    with opened(path, "ratings", RatingsError) as file:
        data = io.BufferedReader(file, forms.HEAD_BYTES)
        if data.peek().startswith(PARQUET):
            with parquet_opened(path, "ratings", RatingsError) as parquet:
                form = form_of_parquet(parquet, path, columns)
                return read_ratings(parts_of_parquet(parquet, form), form, wrong, missing)
        form, text = forms.find_form(data.peek(), path, columns), io.TextIOWrapper(data, "utf-8-sig", newline="")
        if form.separator == forms.JSON_LINES:
            parts = parts_of_rows(rows_of_objects(text, form, wrong, columns), form)
        else:
            parts = parts_of_fields(text, form, wrong)
        return read_ratings(parts, form, wrong, missing)


def read_ratings(parts: Iterable[Part], form: RatingsForm, wrong: dict[int, str], missing: str) -> NcfSplit:
    """Make a split of a file's lines: set each user's latest item apart.

    Args:
        parts: the lines.
        form: the file's.
        wrong: gets the malformed lines' numbers and faults, while ``parts`` are read and afterwards.
        missing: as for ``read_split``.

    Raises:
        RatingsError: none has all values, more than half of them are malformed, or one where ``missing`` refuses that.
    """
    several = [*parts] or [(np.zeros(0, np.int64), dict.fromkeys(form.places, pa.array([], TEXT)))]
    numbers = np.concatenate([part for part, _ in several])
    texts = {role: trimmed(pa.chunked_array([part[role] for _, part in several], TEXT)) for role in form.places}
    columns, left_out = form.columns, {}

    def leave_out(rows: Any, fault: str = "", role: str = "") -> None:
        nonlocal numbers, texts
        if not rows.any():
            return
        fault = fault.format(columns=named("columns"))
        for row in np.flatnonzero(rows).tolist() if fault else ():
            value = f"{role} ({columns[role]}) is {forms.shown(texts[role][row])}, " if role else ""
            wrong[int(numbers[row])] = value + fault
        numbers = numbers[~rows]
        texts = {role: column.filter(pa.array(~rows)) for role, column in texts.items()}

    leave_out(np.all([column.is_null() for column in texts.values()], axis=0))  # they are blank
    lines = len(numbers) + len(wrong)
    for role in form.places:
        if count := texts[role].null_count:
            left_out[role] = count
            nothing = f"no {role}, for {columns[role]} has nothing, or a word such as NA"
            leave_out(np.asarray(texts[role].is_null()), nothing if missing == "error" else "")
    if form.heading is not None:  # in concatenated files it comes again; where all is text it fits anywhere
        again = [pc.equal(texts[role], form.heading[form.places[role]]) for role in forms.NEEDED]
        leave_out(np.asarray(pc.and_(*again)), "the heading again")
    if "rating" in texts:
        points = pc.replace_substring(texts["rating"], ",", ".")
        leave_out(np.asarray(fitted(points, pa.float64()).is_null()), REMEDIES["rating"], "rating")
    times, time = np.zeros(len(numbers), np.int8), None
    if "time" in texts:
        found = fitted(pc.replace_substring(texts["time"], ",", "."), pa.int64(), pa.float64(), *DATES)
        time = "dates" if pa.types.is_timestamp(found.type) else "numbers"
        leave_out(np.asarray(found.is_null()), REMEDIES[time], "time")
        times = found.drop_null().to_numpy()
    first = "; ".join(f"{form.unit} {number}: {wrong[number]}" for number in heapq.nsmallest(SHOWN_LINES, wrong))
    first += f"; and {len(wrong) - SHOWN_LINES:,} more" * (len(wrong) > SHOWN_LINES)
    if wrong and (missing == "error" or 2 * len(wrong) > lines):
        remedy = f", or leave such lines out with {named('missing')}=skip" * (missing == "error")
        raise RatingsError(f"ratings {form.path}, {first}; of {lines:,} in all: correct or remove them{remedy}")
    if not len(numbers):
        why = ", ".join(f"{count:,} without {role} ({columns[role]})" for role, count in left_out.items())
        raise RatingsError(f"ratings {form.path} has no {form.unit} with all its values: {why or 'all are blank'}")
    (user_ids, users), (item_ids, items) = (rows_of(texts[role]) for role in forms.NEEDED)
    train, test = leave_one_out(users, items, times, len(item_ids))
    source = RatingsSource(**vars(form), lines=lines, left_out=left_out, malformed=len(wrong), first=first, time=time)
    interactions = Interactions(train, len(user_ids), len(item_ids))
    return NcfSplit(interactions, *np.divmod(test, len(item_ids)), user_ids, item_ids, source)


def parts_of_fields(text: TextIO, form: RatingsForm, wrong: dict[int, str]) -> Iterator[Part]:
    """Read lines of fields: by pyarrow, and from the first quotes on that stand around fields by Python's csv."""
    for _ in range(form.first_line - 1):
        text.readline()
    line, names = form.first_line, [str(place) for place in range(form.width)]
    wanted = {role: names[place] for role, place in form.places.items()}
    separator = MARK if form.separator in ("::", forms.BLANK) else form.separator
    skipped: list[Any] = []

    def skip(row: Any) -> str:
        skipped.append(row)
        return "skip"

    parse = csv.ParseOptions(delimiter=separator, quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, TEXT), include_columns=[*wanted.values()])
    while block := text.read(BLOCK_BYTES) + text.readline():
        if form.quotes and '"' in block:
            lines = itertools.chain(io.StringIO(block, ""), text)
            yield from parts_of_rows(rows_in_quotes(lines, line, form, wrong), form)
            return
        if form.separator == forms.BLANK:
            block = "\n".join(MARK.join(row.split()) for row in io.StringIO(block, None))
        data = block.replace(form.separator, separator).encode()
        read = csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names)
        table = csv.read_csv(pa.BufferReader(data), read, parse, convert)
        numbers = np.arange(line, line + len(table) + len(skipped))
        for row in filter(lambda row: row.text.strip(), skipped):
            misfit = form.misfit(row.actual_columns, row.text.replace(separator, form.separator))
            wrong[line + row.number - 1] = misfit
        yield (
            np.delete(numbers, [row.number - 1 for row in skipped]),
            {role: table[name].combine_chunks() for role, name in wanted.items()},
        )
        line += len(numbers)
        skipped.clear()


def rows_in_quotes(
    lines: Iterable[str], number: int, form: RatingsForm, wrong: dict[int, str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row's first line, and its values."""
    for fields, taken in forms.quoted_rows(lines, form.separator, form.width * (form.quotes == "some")):
        if len(fields) == form.width:
            yield number, [fields[place] for place in form.places.values()]
        elif any(map(str.strip, taken)):
            wrong[number] = form.misfit(len(fields), taken[0])
        number += len(taken)


def rows_of_objects(
    lines: Iterable[str], form: RatingsForm, wrong: dict[int, str], columns: Mapping[str, str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each JSON line and its values.

    Raises:
        RatingsError: one has a rating or time, and none of the first lines has.
    """
    heading = form.heading or ()
    known, keys = {*heading}, [heading[place] for place in form.places.values()]
    for number, line in enumerate(lines, 1):
        try:
            found = forms.json_values(line) if line.strip() else {}
            values = [found.get(key, "") for key in keys]
            "".join(values).encode()
        except ValueError as error:  # also half of a surrogate pair
            wrong[number] = f"{forms.shown(line)} is not a JSON object of Unicode text ({error})"
            continue
        for key in found.keys() - known:
            known.add(key)
            if (role := forms.role_of(key)) and role not in {*form.places, *columns}:
                raise RatingsError(
                    f"ratings {form.path}, line {number} has {key!r}, and none of the first lines has: move it to the "
                    f"beginning, or pass over that with {named('columns')} {role}=-"
                )
        yield number, values


def parts_of_rows(rows: Iterator[tuple[int, list[str]]], form: RatingsForm) -> Iterator[Part]:
    while some := [*itertools.islice(rows, LINES_AT_ONCE)]:
        columns = zip(*(values for _, values in some), strict=True)
        texts = {role: pa.array(column, TEXT) for role, column in zip(form.places, columns, strict=True)}
        yield np.array([number for number, _ in some]), texts


def form_of_parquet(file: Any, path: Path, columns: Mapping[str, str]) -> RatingsForm:
    heading, sample = tuple(file.schema_arrow.names), list[list[str]]()
    for batch in itertools.islice(file.iter_batches(forms.SAMPLE_LINES), 1):
        flat = [pa.nulls(len(batch)) if pa.types.is_nested(each.type) else each for each in batch.columns]
        sample = [[*row] for row in zip(*(as_text(each).fill_null("").to_pylist() for each in flat), strict=True)]
    places = forms.find_places(heading, sample, columns, path)
    for role, place in places.items():
        if pa.types.is_nested(kind := file.schema_arrow.field(place).type):
            raise RatingsError(
                f"ratings {path}: column {heading[place]!r}, the {role}, has {kind}: give text or numbers"
            )
    return RatingsForm(path, forms.PARQUET_ROWS, heading, len(heading), 1, places, "")


def parts_of_parquet(file: Any, form: RatingsForm) -> Iterator[Part]:
    heading, first = form.heading or (), 1
    for batch in file.iter_batches(LINES_AT_ONCE, columns=[heading[place] for place in form.places.values()]):
        numbers, texts = np.arange(first, first := first + len(batch)), {}
        for role, place in form.places.items():
            of_that_name = batch.schema.get_all_field_indices(name := heading[place])
            column = batch.column(of_that_name[heading[:place].count(name)])
            texts[role] = as_text(column)
            if texts[role].null_count > column.null_count:
                raise RatingsError(
                    f"ratings {form.path}: column {name!r}, the {role}, has {column.type} that is not UTF-8: give text "
                    "or numbers"
                )
        yield numbers, texts


def as_text(column: Any) -> Any:
    """Return a column of Parquet as text, with times in UTC and whole numbers as digits alone; null if not UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if str(column.type) == "extension<arrow.uuid>":
        return pa.array([each and str(each) for each in column.to_pylist()], TEXT)
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    if pa.types.is_floating(column.type):
        is_whole = pc.and_(pc.equal(pc.floor(column), column), pc.less(pc.abs(column), 2.0**63))
        return pc.coalesce(pc.if_else(is_whole, column, None).cast(pa.int64()).cast(TEXT), column.cast(TEXT))
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))
    if str(column.type) in ("string", "large_string", "string_view", "binary_view"):
        column = column.cast(pa.large_binary())  # from which a cast checks that it is UTF-8
    return fitted(column, TEXT).combine_chunks()


def trimmed(texts: Any) -> Any:
    texts = pc.ascii_trim_whitespace(texts)
    return pc.if_else(pc.is_in(texts, MISSING_WORDS), None, texts)


def rows_of(texts: Any) -> tuple[OwnIds, Ids]:
    """Return the ids, and each line's row.

    They are numbers if all of them are whole numbers as Python writes them, perhaps with decimals that are zero: then 1
    and 1.0 are the same. Otherwise they are text.
    """
    encoded = texts.dictionary_encode()
    ids = encoded.chunk(0).dictionary
    rows = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    whole = pc.replace_substring_regex(ids, r"^(-?\d+)\.0*$", r"\1")
    if pc.all(pc.match_substring_regex(whole, f"^(?:{WHOLE_NUMBER.pattern})$")).as_py():  # 007 is text
        with suppress(pa.ArrowInvalid):  # beyond 64 bits
            unique, places = np.unique(whole.cast(pa.int64()).to_numpy(), return_inverse=True)
            return OwnIds(unique), places[rows]
    order = pc.sort_indices(ids).to_numpy()
    return OwnIds(ids.to_numpy(zero_copy_only=False)[order]), order.argsort()[rows]
