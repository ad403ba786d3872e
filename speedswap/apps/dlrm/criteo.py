"""Samples as Criteo's display advertising set has them, and files of them.

A sample is a label, 13 integers and 26 hexadecimal categories; in text they are divided by tabs, empty where missing.
Plain and gzip text is read in pieces of 4 MiB, each by one call of the compiled part, and Parquet column by column.
"""

from __future__ import annotations

import re
import stat
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap.apps.errors import CheckpointError, SamplesError, named
from speedswap.apps.files import PARQUET, bytes_on_disk, matching, opened, parquet_opened
from speedswap.kernels import near, read_lines

INTEGERS = 13
CATEGORIES = 26
NAMES = ("label", *(f"I{n}" for n in range(1, INTEGERS + 1)), *(f"C{n}" for n in range(1, CATEGORIES + 1)))
"""The columns, in their order."""
MISSING = -1
"""The id of an empty category, an id like others: that it is missing says something too."""
CHUNK_BYTES = 1 << 22
LINE_BYTES = 1 << 16
ROWS_AT_ONCE = 1 << 14
BASES = "b" + INTEGERS * "d" + CATEGORIES * "x"
EMPTY = (MISSING, *INTEGERS * (0,), *CATEGORIES * (MISSING,))
FORMS = {
    "b": (re.compile(rb"0|1"), "neither 0 nor 1: correct it"),
    "d": (
        re.compile(rb"-?\d{1,18}|"),
        "not a whole number of up to 18 digits: correct it, or leave it empty where it is missing",
    ),
    "x": (
        re.compile(rb"(?!(?i:f){16})[0-9a-fA-F]{1,16}|"),
        "not a hexadecimal number of up to 16 digits, not all f: correct it, or leave it empty where it is missing",
    ),
}
SHOWN_BYTES = 40
WEIGHTS = torch.randint(-(2**62), 2**62, (len(NAMES),), generator=torch.Generator().manual_seed(0))
"""Of the columns in the checksum of samples."""


class Samples(NamedTuple):
    """Some samples, column by column.

    Attributes:
        labels: float32, shape (n,): 1 for a click, 0 for none; shape (0,) for rows without a label.
        integers: int64, shape (13, n); 0 where missing.
        ids: int64, shape (26, n); ``MISSING`` where missing.
    """

    labels: Tensor
    integers: Tensor
    ids: Tensor

    @property
    def size(self) -> int:
        """Their number."""
        return self.integers.shape[1]

    def take(self, places: Tensor | slice) -> Samples:
        """Return the samples at some places."""
        labels = self.labels[places] if len(self.labels) else self.labels
        return Samples(labels, self.integers[:, places], self.ids[:, places])

    def to(self, device: torch.device) -> Samples:
        """Copy the samples to a device."""
        return Samples(*(near(tensor, device) for tensor in self))


class SamplePosition(NamedTuple):
    """A place in a source, between two samples.

    Attributes:
        file: files read to their end.
        samples: samples read of the next one.
        checksum: of the sizes of the former and the values of the latter.
    """

    file: int = 0
    samples: int = 0
    checksum: int = 0

    def require(self, found: SamplePosition) -> None:
        """Refuse to go on from this position where reading as far as it has found a different one.

        Raises:
            CheckpointError: the samples are others.
        """
        if found != self:
            raise CheckpointError(
                f"the samples are not those of the checkpoint, which had read {self.samples:,} of file "
                f"{self.file + 1}: give the same, or start without {named('resume')}"
            )


# ---- files ----------------------------------------------------------------------------------------------------------

Pieces = Iterator[tuple[Tensor, int]]
"""Values of some lines, int64, shape (40 or 39, n), and the bytes read of the file so far, as they are on disk."""


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files of some paths and patterns with ``*``, ``?`` or ``[]``; those of one pattern by their numbers.

    Raises:
        SamplesError: a pattern matches no file, or is empty.

    >>> find_files(["setup.p?", "nowhere/day_*"])
    Traceback (most recent call last):
    speedswap.apps.errors.SamplesError: samples setup.p? matches no file: give files, or patterns such as 'day_*.gz'
    """
    return matching(patterns, "samples", SamplesError, "day_*.gz")


class SampleFiles:
    """The samples of several files, one file after the other. Memory holds 4 MiB of one of them at a time.

    Args:
        paths: text, plain or gzip, or Parquet.
        labelled: True if the rows have a label; None to tell by the first row, which the others must be like.

    Raises:
        SamplesError: also while reading: a file is missing or damaged, or a line is malformed. The message names file,
            line, column and remedy; the samples before are not lost.
    """

    def __init__(self, paths: Sequence[Path], *, labelled: bool | None = True) -> None:
        self._paths = list(paths)
        self._labelled = labelled
        self._sizes = [size_of(path) for path in self._paths]
        self.total = sum(self._sizes)
        """Bytes of all files, as they are on disk."""
        self.position = SamplePosition()
        """The place reached."""
        self._piece, self._on_disk = torch.empty(0, 0, dtype=torch.int64), 0
        self._open(0)

    @property
    def done(self) -> int:
        """Bytes read on disk, before decompression."""
        return sum(self._sizes[: self.position.file]) + self._on_disk

    def read(self, count: int) -> Samples:
        """Return the next samples.

        Args:
            count: their number; fewer are left at the end.

        Raises:
            SamplesError: a line is malformed, or a file damaged.
        """
        parts = []
        while count and (self._piece.shape[1] or self._read_on()):
            values, self._piece = self._piece[:, :count], self._piece[:, count:]
            parts.append(values)
            count -= values.shape[1]
            file, samples, checksum = self.position
            numbers = torch.arange(samples, samples + values.shape[1])
            checksum += int(((WEIGHTS[-len(values) :] @ values) * (2 * numbers + 1)).sum())
            self.position = SamplePosition(file, samples + values.shape[1], checksum % 2**63)
        columns = len(NAMES) - (self._labelled is False)
        values = torch.cat([torch.empty(columns, 0, dtype=torch.int64), *parts], dim=1)
        labels = values[0].float() if columns == len(NAMES) else torch.zeros(0)
        return Samples(labels, values[-INTEGERS - CATEGORIES : -CATEGORIES], values[-CATEGORIES:])

    def seek(self, position: SamplePosition) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: the samples before it are others.
        """
        self._open(min(position.file, len(self._paths)))
        while self.position.file == position.file and self.position.samples < position.samples:
            if not self.read(min(ROWS_AT_ONCE, position.samples - self.position.samples)).size:
                break
        position.require(self.position)

    def _open(self, file: int) -> None:
        """Begin with a file, or end after the last one."""
        self.position = SamplePosition(file, 0, zlib.crc32(" ".join(map(str, self._sizes[:file])).encode()))
        self._piece, self._on_disk = self._piece[:, :0], 0
        self._pieces = pieces_of(self._paths[file], self._labelled) if file < len(self._paths) else iter(())

    def _read_on(self) -> bool:
        """Get the next samples; return False at the end of the last file."""
        while self.position.file < len(self._paths):
            for piece, on_disk in self._pieces:
                self._piece, self._on_disk = piece, on_disk
                if piece.shape[1]:
                    self._labelled = len(piece) == len(NAMES)
                    return True
            self._open(self.position.file + 1)
        return False


def pieces_of(path: Path, labelled: bool | None) -> Pieces:
    """Read a file, which tells by its first bytes whether it is Parquet."""
    with opened(path, "samples", SamplesError) as file:
        is_parquet = file.peek(len(PARQUET)).startswith(PARQUET)
        yield from (parquet_pieces(path, labelled) if is_parquet else text_pieces(file, path, labelled))


def size_of(path: Path) -> int:
    """Return a file's size.

    Raises:
        SamplesError: it is missing, or not a file, which could be read several times.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # such as a name that is too long, or has a null byte
        reason = getattr(error, "strerror", None) or error
        raise SamplesError(f"samples {str(path)[:200]} cannot be read: {reason}") from error
    if not stat.S_ISREG(found.st_mode):
        raise SamplesError(f"samples {path} is not a regular file: write what it gives to one")
    return found.st_size


# ---- text -----------------------------------------------------------------------------------------------------------


def text_pieces(file: IO[bytes], path: Path, labelled: bool | None) -> Pieces:
    """Read a file of text."""
    text, line, at_end = file.read(len(BOM_UTF8)).removeprefix(BOM_UTF8), 1, False
    while not at_end:
        chunk = file.read(CHUNK_BYTES)
        text, at_end = text + (chunk or b"\n"), not chunk  # the last line may lack its newline
        if labelled is None and text.strip(b"\r\n"):
            labelled = text.lstrip(b"\r\n").partition(b"\n")[0].count(b"\t") != len(NAMES) - 2
        count = len(NAMES) - (labelled is False)
        values = torch.empty(count, text.count(b"\n"), dtype=torch.int64)
        rows, used, lines, wrong = read_lines(text, values, bases=BASES[-count:], missing=EMPTY[-count:])
        text, line = text[used:], line + lines
        yield values[:, :rows], bytes_on_disk(file)
        if wrong:
            raise malformed(text.partition(b"\n")[0].removesuffix(b"\r"), BASES[-count:], f"{path}, line {line}")
        if len(text) > LINE_BYTES:
            raise SamplesError(f"samples {path}, line {line} has no end: is it text?")


def malformed(line: bytes, bases: str, where: str) -> SamplesError:
    """Describe a line that could not be read."""
    fields, names = line.split(b"\t"), NAMES[-len(bases) :]
    if len(fields) != len(names):
        return SamplesError(
            f"samples {where} has {len(fields)} columns: give {len(names)}, divided by tabs: "
            f"{'a label, ' if len(names) == len(NAMES) else ''}13 integers and 26 categories, empty where missing"
        )
    for number, (field, name, base) in enumerate(zip(fields, names, bases, strict=True), 1):
        form, remedy = FORMS[base]
        if not form.fullmatch(field):
            shown = field[:SHOWN_BYTES].decode("utf-8", "replace")
            return SamplesError(f"samples {where}, column {number} ({name}) is {shown!r}, {remedy}")
    raise AssertionError(f"{where} is well formed")


# ---- Parquet --------------------------------------------------------------------------------------------------------


def parquet_pieces(path: Path, labelled: bool | None) -> Pieces:
    """Read a Parquet file, whose columns are found by their names, or are exactly those of the format in order.

    A category is text of hexadecimal digits, or a whole number.
    """
    with parquet_opened(path, "samples", SamplesError) as file:
        from speedswap.apps.columns import whole_numbers

        found, rows = columns_of(file.schema_arrow.names, path, labelled), 0
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=found):
            columns = []
            for name, base, empty in zip(found, BASES[-len(found) :], EMPTY[-len(found) :], strict=True):
                try:
                    values, wrong = whole_numbers(column := batch.column(name), is_hex=base == "x", missing=empty)
                except NotImplementedError as error:  # pyarrow's, of a cast
                    kind = f"samples {path}, column {name} has {column.type}"
                    raise SamplesError(f"{kind}: give whole numbers or text") from error
                if base == "b" and wrong is None:
                    wrong = next(iter(np.flatnonzero((values != 0) & (values != 1)).tolist()), None)
                if wrong is not None:
                    value, remedy = batch.column(name)[wrong].as_py(), FORMS[base][1].replace("empty", "null")
                    raise SamplesError(f"samples {path}, row {rows + wrong + 1}, column {name} is {value!r}, {remedy}")
                columns.append(values)
            rows += len(batch)
            yield torch.from_numpy(np.stack(columns)), path.stat().st_size * rows // file.metadata.num_rows


def columns_of(names: Sequence[str], path: Path, labelled: bool | None) -> list[str]:
    """Choose the columns of the label, the integers and the categories."""
    wanted = NAMES if labelled or (labelled is None and NAMES[0] in names) else NAMES[1:]
    if missing := [name for name in wanted if name not in names]:
        if len(names) not in (len(NAMES), len(NAMES) - 1) or labelled not in (None, len(names) == len(NAMES)):
            raise SamplesError(
                f"samples {path} has {len(names)} columns and no {missing[0]!r}: give {', '.join(wanted[:2])}, … and "
                f"{wanted[-1]}, or these {len(wanted)} in order"
            )
        wanted = tuple(names)
    for name in wanted:
        if names.count(name) > 1:
            raise SamplesError(f"samples {path} has {names.count(name)} columns {name!r}: give each its own name")
    return list(wanted)
