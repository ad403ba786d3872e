"""A table's memory mapped from a file: for tables of the older formats, and for arrays over a file."""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from speedswap.errors import TableTooLargeError
from speedswap.tables.files.open_directory import OpenFile, says_if_full
from speedswap.tables.memory.host import Memory, physical_bytes

__all__ = ["FileMemory"]

# Linux's default read-ahead, and the most that it takes of one piece of advice.
_READ_AHEAD_BYTES = 128 * 2**10


class FileMemory(Memory):
    """A shared mapping of one file of raw records.

    A store into a hole of a mapped file ends the process with SIGBUS if the disk has no room, so a file that is to be
    written takes its full size first. On file systems that write every block to a new place (btrfs) even that is not
    safe; keep some of the disk free there.

    Args:
        fd: the file, open for reading, and for writing too if ``writable``; closed with the memory.
        path: for messages.
        nbytes: its size.
        writable: whether rows are to be written.

    Raises:
        TableFullError: the disk has no room for such a file.
        TableTooLargeError: the process has not enough addresses for it.
    """

    def __init__(self, fd: int, path: Path, nbytes: int, *, writable: bool) -> None:
        self._writable = writable
        self._file = OpenFile(fd)
        if writable:
            with says_if_full(path):
                os.posix_fallocate(fd, 0, nbytes)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            raise TableTooLargeError(
                f"{path} with its {nbytes / 2**40:.2f} TiB cannot be mapped ({error}); use fewer or narrower rows"
            ) from error
        if nbytes > physical_bytes() // 2:
            # Read-ahead around random rows would fetch 32 pages for one.
            self._mapping.madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            # torch warns of read-only buffers; a table opened for reading refuses writes itself.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        end = 0
        while end < self.nbytes:
            try:
                start = os.lseek(self._file.fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            end = os.lseek(self._file.fd, start, os.SEEK_HOLE)
            yield start, min(end, self.nbytes)

    def expect(self, start: int, stop: int) -> None:
        for offset in range(start - start % mmap.PAGESIZE, stop, _READ_AHEAD_BYTES):
            self._mapping.madvise(mmap.MADV_WILLNEED, offset, min(_READ_AHEAD_BYTES, stop - offset))

    def flush(self) -> None:
        if self._writable:
            self._mapping.flush()
            os.fsync(self._file.fd)

    def close(self) -> None:
        super().close()
        self._file.close()

    def is_same_file(self, other: FileMemory) -> bool:
        """Return whether both are mappings of one file."""
        return os.path.samestat(os.fstat(self._file.fd), os.fstat(other._file.fd))
