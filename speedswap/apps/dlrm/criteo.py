"""Files in Criteo's format: a label, 13 integers and 26 hexadecimal categories, divided by tabs, empty where missing.

Plain and gzip text is read in pieces of 4 MiB, and Parquet in groups of rows that become such text; the numbers of as
many lines as a batch needs are read by one call of the compiled part.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from speedswap.apps.dlrm.parquet import is_parquet, parquet_pieces
from speedswap.apps.dlrm.samples import CATEGORIES, INTEGERS, MISSING, NAMES, SamplePosition, Samples
from speedswap.apps.errors import CheckpointError, SamplesError
from speedswap.apps.reading import bytes_on_disk, opened
from speedswap.kernels import read_lines

__all__ = ["SampleFiles", "find_files", "text_of"]

CHUNK_BYTES = 1 << 22
LINE_BYTES = 1 << 16
SKIPPED_AT_ONCE = 1 << 14
BASES = "b" + INTEGERS * "d" + CATEGORIES * "x"
EMPTY = (0, *INTEGERS * (0,), *CATEGORIES * (MISSING,))
FORMS = {
    "b": (re.compile(rb"0|1"), "neither 0 nor 1: correct it"),
    "d": (
        re.compile(rb"-?\d{1,18}|"),
        "not a whole number of up to 18 digits: correct it, or leave it empty where it is missing",
    ),
    "x": (
        re.compile(rb"[0-9a-fA-F]{1,15}|"),
        "not a hexadecimal number of up to 15 digits: correct it, or leave it empty where it is missing",
    ),
}
SHOWN_BYTES = 40


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files of some paths and patterns with ``*``, ``?`` or ``[]``; those of one pattern by their numbers.

    Raises:
        SamplesError: a pattern matches no file, or is empty.

    >>> find_files(["setup.p?", "nowhere/day_*"])
    Traceback (most recent call last):
    speedswap.apps.errors.SamplesError: samples setup.p? matches no file: give files, or patterns such as 'day_*.gz'
    """
    found: list[Path] = []
    for pattern in map(str, patterns):
        if not pattern:
            raise SamplesError("samples has an empty name: give files, or patterns such as 'day_*.gz'")
        if glob.has_magic(pattern) and not os.path.exists(pattern):
            paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True), key=by_number)]
            paths = [path for path in paths if path.is_file()]
            if not paths:
                raise SamplesError(f"samples {pattern} matches no file: give files, or patterns such as 'day_*.gz'")
            found += paths
        elif os.path.isdir(pattern):
            raise SamplesError(f"samples {pattern} is a directory: give its files, as in '{pattern}/*'")
        else:
            found.append(Path(pattern))
    return found


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which day_9 comes before day_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


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
        self._file = self._samples = self._checksum = self._packed = self._start = 0
        self._line = 1
        self._text, self._bases = b"", BASES
        self._pieces: Iterator[tuple[bytes, int]] = iter(())
        self._open(0)

    @property
    def done(self) -> int:
        """Bytes read, as they are on disk."""
        return sum(self._sizes[: self._file]) + self._packed

    @property
    def position(self) -> SamplePosition:
        """The place reached."""
        return SamplePosition(self._file, self._samples, self._checksum)

    def read(self, count: int) -> Samples:
        """Return the next samples.

        Args:
            count: their number; fewer are left at the end.

        Raises:
            SamplesError: a line is malformed, or a file damaged.
        """
        columns = len(NAMES) if self._labelled else len(NAMES) - 1
        values = torch.empty(columns, count, dtype=torch.int64)
        filled = 0
        while True:
            before = self._start
            rows, self._start, lines, wrong = read_lines(
                self._text, values, bases=self._bases, missing=EMPTY[-columns:], start=before, first=filled
            )
            filled, self._samples, self._line = filled + rows, self._samples + rows, self._line + lines
            self._checksum = zlib.crc32(memoryview(self._text)[before : self._start], self._checksum)
            if wrong:
                raise self._malformed()
            if filled == count or not self._read_on():
                break
        values = values[:, :filled]
        labels = values[0].float() if self._labelled else torch.zeros(0)
        return Samples(labels, values[-INTEGERS - CATEGORIES : -CATEGORIES], values[-CATEGORIES:])

    def seek(self, position: SamplePosition) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: the samples before it are others.
        """
        self._open(min(position.file, len(self._paths)))
        while self._file == position.file and self._samples < position.samples:
            if not self.read(min(SKIPPED_AT_ONCE, position.samples - self._samples)).size:
                break
        if self.position != position:
            raise CheckpointError(
                f"the samples are not those of the checkpoint, which had read {position.samples:,} of file "
                f"{position.file + 1}: give the same, or start without resume"
            )

    def _open(self, file: int) -> None:
        """Begin with a file, or end after the last one."""
        self._file, self._line, self._text = file, 1, b""
        self._samples = self._packed = self._start = 0
        self._checksum = zlib.crc32(" ".join(map(str, self._sizes[:file])).encode())  # 0 for the first
        if file == len(self._paths):
            return
        path = self._paths[file]
        if is_parquet(path):
            self._bases, self._pieces = parquet_pieces(path, labelled=self._labelled)
        else:
            self._bases, self._pieces = BASES, text_pieces(path)
            self._read_on()
            if self._labelled is None and not self._text.strip(b"\r\n") and file + 1 < len(self._paths):
                self._open(file + 1)  # an empty file has no first row
                return
            if self._labelled is None:
                self._labelled = self._text.lstrip(b"\r\n").partition(b"\n")[0].count(b"\t") != len(NAMES) - 2
            self._bases = BASES if self._labelled else BASES[1:]
        self._labelled = self._bases.startswith("b")

    def _read_on(self) -> bool:
        """Get the next piece of text; return False at the end of the last file."""
        rest = self._text[self._start :]
        if len(rest) > LINE_BYTES:
            raise SamplesError(f"samples {self._paths[self._file]}, line {self._line} has no end: is it text?")
        piece, self._packed = next(self._pieces, (b"", self._packed))
        if piece:
            self._text, self._start = rest + piece, 0
        elif self._file < len(self._paths):
            self._open(self._file + 1)
        return self._file < len(self._paths)

    def _malformed(self) -> SamplesError:
        """Describe the next line, which could not be read."""
        line = self._text[self._start : self._text.index(b"\n", self._start)].removesuffix(b"\r")
        where = f"samples {self._paths[self._file]}, line {self._line}"
        fields, names = line.split(b"\t"), NAMES[-len(self._bases) :]
        if len(fields) != len(names):
            return SamplesError(
                f"{where} has {len(fields)} columns: give {len(names)}, divided by tabs: "
                f"{'a label, ' if self._labelled else ''}13 integers and 26 categories, empty where missing"
            )
        for number, (field, name, base) in enumerate(zip(fields, names, self._bases, strict=True), 1):
            form, remedy = FORMS[base]
            if not form.fullmatch(field):
                shown = field[:SHOWN_BYTES].decode("utf-8", "replace")
                return SamplesError(f"{where}, column {number} ({name}) is {shown!r}, {remedy}")
        raise AssertionError(f"{where} is well formed")


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


def text_pieces(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield a file in pieces, each with the bytes read so far, as they are on disk."""
    with opened(path, "samples", SamplesError) as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece, bytes_on_disk(file)
        yield b"\n", bytes_on_disk(file)  # the last line may lack its own


def text_of(samples: Samples) -> str:
    """Return samples as the lines of a file.

    >>> text_of(Samples(torch.ones(1), torch.arange(13).view(13, 1), torch.full((26, 1), 255)))[:8]
    '1\\t0\\t1\\t2\\t'
    """
    labels = [[int(label)] for label in samples.labels.tolist()] or [[]] * samples.size
    lines = []
    for label, integers, ids in zip(labels, samples.integers.T.tolist(), samples.ids.T.tolist(), strict=True):
        categories = ("" if each == MISSING else f"{each:08x}" for each in ids)
        lines.append("\t".join([*map(str, [*label, *integers]), *categories]))
    return "\n".join([*lines, ""])
