"""A table's files as they are found: facts about them, and everything in them read once."""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from speedswap.tables.files.lock import WriterLock
from speedswap.tables.files.manifest import Manifest
from speedswap.tables.files.manifest_file import ManifestFile
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.place import Place

__all__ = ["Checked", "at_time", "check_data", "facts_of"]

_PIECE_BYTES = 4 << 20


@dataclass
class Checked:
    """The outcome of reading all of a table.

    Attributes:
        rows: rows that were read.
        nbytes: bytes that were read.
        checksums: whether rows have checksums; without them rows that can be read pass.
        damaged: ranges of rows that cannot be read, or whose checksum does not match.
        problems: a sentence for each problem.
    """

    rows: int = 0
    nbytes: int = 0
    checksums: bool = False
    damaged: list[range] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def facts_of(path: Path) -> dict[str, Any]:
    """Return facts that a table's directory tells by itself, for ``speedswap info``; nothing in it is changed.

    Raises:
        FileNotFoundError: there is nothing.
        TableFormatError: it is not a table, or its manifest is damaged.
    """
    files = Place(path).open()
    file, _ = ManifestFile.load(files)
    holder = WriterLock.holder(files)
    found = [files.status(name) for name in files.names()]
    return {
        "format": json.loads(file.body)["version"],
        "bytes_on_disk": sum(one.st_blocks * 512 for one in found if one is not None and stat.S_ISREG(one.st_mode)),
        "last_commit_at": at_time(os.fstat(file.file.fd).st_mtime),
        "open_for_writing_in": holder,
        "left_open": holder is None and WriterLock.is_noted(files),
    }


def at_time(seconds: float) -> str:
    """Return a time in the way of ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def check_data(path: Path, advance: Callable[[float], object]) -> Checked:
    """Read all data files of a table of format 1, 2 or 3, which have no checksums: find rows that cannot be read.

    Args:
        path: the table's directory.
        advance: called with a number of rows whenever so many were read, or skipped as holes.
    """
    files = Place(path).open()
    _, manifest = ManifestFile.load(files)
    assert isinstance(manifest, Manifest)
    checked = Checked(rows=manifest.num_embeddings)
    total_stride = sum(entry.layout.stride for entry in manifest.segments)
    for entry in manifest.segments:
        file = OpenFile(files.open(entry.file))
        stride, done = entry.layout.stride, 0
        for start, stop in _data_pieces(file.fd, manifest.num_embeddings * stride):
            for bad in _unreadable(file.fd, start, stop):
                rows = range(bad.start // stride, -(-bad.stop // stride))
                checked.damaged.append(rows)
                checked.problems.append(f"rows {rows.start} to {rows.stop - 1} in {entry.file} cannot be read")
            checked.nbytes += stop - start
            advance((stop - done) / total_stride)
            done = stop
        advance((manifest.num_embeddings * stride - done) / total_stride)
    return checked


def _data_pieces(fd: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that are not holes, in pieces."""
    end = 0
    while end < nbytes:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # else only a hole is left
                raise
            return
        end = min(os.lseek(fd, begin, os.SEEK_HOLE), nbytes)
        for start in range(begin, end, _PIECE_BYTES):
            yield start, min(start + _PIECE_BYTES, end)


def _unreadable(fd: int, start: int, stop: int) -> Iterator[range]:
    """Read a part of a file; yield the pages of it that the disk fails to read."""
    try:
        os.pread(fd, stop - start, start)
        return
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    for page in range(start, stop, mmap.PAGESIZE):
        try:
            os.pread(fd, mmap.PAGESIZE, page)
        except OSError:
            yield range(page, min(page + mmap.PAGESIZE, stop))
