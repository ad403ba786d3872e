"""Read a file of ratings, with any columns and any ids, into a split."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from speedswap._words import pip_install
from speedswap.apps.errors import RatingsError, named
from speedswap.apps.files import PARQUET, opened, parquet_opened
from speedswap.apps.ncf.form import HEAD_BYTES, JSON_LINES, MISSING, check_columns, find_form
from speedswap.apps.ncf.interactions import NcfSplit
from speedswap.apps.options import one_of


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
    check_columns(columns)
    one_of(MISSING)(named("missing"), missing)
    try:
        import speedswap.apps.ncf.columns as reading
    except ImportError as error:
        raise RatingsError(f"ratings are read by pyarrow: {pip_install('pyarrow', extra='parquet')}") from error
    wrong: dict[int, str] = {}
    with opened(path, "ratings", RatingsError) as file:
        data = io.BufferedReader(file, HEAD_BYTES)
        if data.peek().startswith(PARQUET):
            with parquet_opened(path, "ratings", RatingsError) as parquet:
                form = reading.form_of_parquet(parquet, path, columns)
                return reading.read_ratings(reading.parts_of_parquet(parquet, form), form, wrong, missing)
        form, text = find_form(data.peek(), path, columns), io.TextIOWrapper(data, "utf-8-sig", newline="")
        if form.separator == JSON_LINES:
            parts = reading.parts_of_rows(reading.rows_of_objects(text, form, wrong, columns), form)
        else:
            parts = reading.parts_of_fields(text, form, wrong)
        return reading.read_ratings(parts, form, wrong, missing)
