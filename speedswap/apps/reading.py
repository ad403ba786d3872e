"""Input files, plain or gzip, with a bound on the size that they expand to."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from speedswap.errors import SpeedswapError

__all__ = ["BombError", "bytes_on_disk", "opened"]

GZIP_MAGIC = b"\x1f\x8b"
MOST_TIMES = 200
"""The largest expansion of gzip that is read: text expands three to ten times, endless repetition a thousand times."""
HARMLESS_BYTES = 1 << 25
"""The bytes that are read of any file."""


class BombError(OSError):
    """A small file that would become a very large one."""


class Counted(io.RawIOBase):
    """A file's bytes, counted."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)
        self.count += count
        return count


class Expanded(io.RawIOBase):
    """A gzip file's contents.

    Raises:
        BombError: while reading, they are ``MOST_TIMES`` as large as the file so far, and not small.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._packed = Counted(file)
        self._contents = gzip.GzipFile(fileobj=io.BufferedReader(self._packed))
        self._count = 0

    @property
    def packed_bytes(self) -> int:
        """The bytes read of the file itself."""
        return self._packed.count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._contents.readinto(buffer)
        self._count += count
        if self._count > max(HARMLESS_BYTES, MOST_TIMES * self._packed.count):
            raise BombError(
                f"it is gzip that becomes more than {MOST_TIMES} times as large; if that is right, unpack it first"
            )
        return count


@contextmanager
def opened(path: Path, what: str, unreadable: type[SpeedswapError]) -> Iterator[IO[bytes]]:
    """Open a file, plain or gzip, told by its first bytes or the suffix ``.gz``.

    Args:
        path: the file.
        what: its contents, for messages.
        unreadable: the error to raise, also while it is read, where it is missing, damaged or would become far larger
            than it is.
    """
    try:
        with open(path, "rb") as file:
            compressed = path.suffix == ".gz" or file.peek(2)[:2] == GZIP_MAGIC
            yield io.BufferedReader(Expanded(file)) if compressed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise unreadable(f"{what} {path} is not a whole gzip file ({error}): make it or copy it again") from error
    except OSError as error:
        raise unreadable(f"{what} {path} cannot be read: {error.strerror or error}") from error


def bytes_on_disk(file: IO[bytes]) -> int:
    """Return the bytes read of a file that ``opened`` has opened, as they are on disk."""
    contents = getattr(file, "raw", None)
    return contents.packed_bytes if isinstance(contents, Expanded) else file.tell()
