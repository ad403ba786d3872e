"""Read files of ratings: MovieLens' ``u.data``, ``ratings.dat`` and ``ratings.csv``, plain or gzip."""

from __future__ import annotations

import gzip
import io
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.ncf.errors import RatingsError
from speedswap.apps.ncf.interactions import Interactions, Split, leave_one_out

__all__ = ["read_split"]

CHUNK_BYTES = 1 << 24
GZIP_MAGIC = b"\x1f\x8b"
COLUMNS = [("user", np.int64), ("item", np.int64), ("rating", np.float64), ("time", np.int64)]
ROW = np.dtype(COLUMNS)
FORM = "user, item, rating and timestamp, divided by tabs, '::' or commas"
HEADING = (("user",), ("item", "movie"), ("rating",), ("time",))
"""Of a heading, what stands somewhere in the name of each column."""


class Format(NamedTuple):
    """How a file's lines are made."""

    separator: bytes
    heading: bool


def read_split(path: Path) -> Split:
    """Read ratings, and set each user's latest one apart for testing.

    What was given with a rating is of no account: that there is one counts. Users and items may have any whole numbers
    as their ids; they get rows in the order of those.

    Raises:
        RatingsError: the file is missing, unreadable, damaged or empty, or a line is malformed; the message says which.
    """
    chunks = list(read_chunks(path))
    if not chunks:
        raise RatingsError(f"ratings {path} is empty: give lines of {FORM}")
    rows = np.concatenate(chunks)
    del chunks
    user_ids, users = np.unique(rows["user"], return_inverse=True)
    item_ids, items = np.unique(rows["item"], return_inverse=True)
    train, test = leave_one_out(users, items, rows["time"], len(item_ids))
    test_users, test_items = np.divmod(test, len(item_ids))
    return Split(Interactions(train, len(user_ids), len(item_ids)), test_users, test_items, user_ids, item_ids)


def read_chunks(path: Path) -> Iterator[NDArray[np.void]]:
    """Yield the rows of a file, many at a time."""
    form: Format | None = None
    first_line = 1
    for text in read_lines(path):
        if form is None:
            form = find_format(text.split(b"\n", 1)[0], path)
            if form.heading:
                text = text.partition(b"\n")[2]
                first_line = 2
        rows = parse(text, form, path, first_line)
        if len(rows):
            yield rows
        first_line += text.count(b"\n")


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in pieces of whole lines."""
    try:
        with open(path, "rb") as file:
            compressed = path.suffix == ".gz" or file.peek(2)[:2] == GZIP_MAGIC
            data: IO[bytes] = gzip.GzipFile(fileobj=file) if compressed else file  # type: ignore[assignment]
            unfinished = b""
            while chunk := data.read(CHUNK_BYTES):
                whole, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    yield unfinished + whole + newline
                    unfinished = rest
                else:
                    unfinished += chunk
                if len(unfinished) > CHUNK_BYTES:
                    raise RatingsError(f"ratings {path} has a line of more than {CHUNK_BYTES:,} bytes: is it text?")
            if unfinished:
                yield unfinished
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RatingsError(f"ratings {path} is not a whole gzip file ({error}): make it or copy it again") from error
    except OSError as error:
        raise RatingsError(f"ratings {path} cannot be read: {error.strerror or error}") from error


def find_format(line: bytes, path: Path) -> Format:
    """Tell a file's format from its first line."""
    for separator in (b"::", b"\t", b","):
        fields = line.removeprefix(b"\xef\xbb\xbf").strip().lower().split(separator)
        if len(fields) < len(COLUMNS):
            continue
        if any(character.isalpha() for character in fields[0].decode("latin-1")):
            for field, names in zip(fields, HEADING, strict=False):
                if not any(name.encode() in field for name in names):
                    raise RatingsError(
                        f"ratings {path}, line 1: the heading {shown(line)} is not of {FORM}: put the columns in this "
                        "order"
                    )
            return Format(separator, heading=True)
        return Format(separator, heading=False)
    raise RatingsError(f"ratings {path}, line 1: {shown(line)} is not {FORM}")


def parse(text: bytes, form: Format, path: Path, first_line: int) -> NDArray[np.void]:
    """The rows of some lines; the first one's number is for messages."""
    if not text.strip():
        return np.empty(0, ROW)
    try:
        return load(text, form.separator)
    except (ValueError, DeprecationWarning, UnicodeDecodeError):
        # Once more, line by line, to say which one it is.
        for number, line in enumerate(text.split(b"\n"), first_line):
            try:
                if line.strip():
                    load(line, form.separator)
            except (ValueError, DeprecationWarning, UnicodeDecodeError) as error:
                raise RatingsError(
                    f"ratings {path}, line {number}: {shown(line)} is not {FORM}, as the first line has them: correct "
                    "the line, or take it out"
                ) from error
        raise


def load(text: bytes, separator: bytes) -> NDArray[np.void]:
    if separator == b"::":
        if b"\t" in text:
            raise ValueError("two separators")
        text = text.replace(b"::", b"\t")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # NumPy's, of whole numbers with a fraction
        return np.loadtxt(
            io.StringIO(text.decode("ascii")),
            ROW,
            comments=None,
            delimiter="," if separator == b"," else "\t",
            ndmin=1,
        )


def shown(line: bytes, most: int = 60) -> str:
    text = line.decode("ascii", "replace").rstrip()
    return repr(text if len(text) <= most else text[:most] + "…")
