"""``SCALARS`` in a table's directory: attributes that change at every step, as of the last one.

What a process has written to a table's rows stays when it is killed; the manifest then says what was so when it was
last saved. So what goes with the rows, such as an optimizer's step count, is also written to this file after each step:
a few hundred bytes, without waiting for the disk. They count as long as the manifest is the one that they name.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import weakref
import zlib
from pathlib import Path
from typing import Any

from speedswap.errors import TableFormatError

__all__ = ["ScalarsFile", "read_scalars"]

_NAME = "SCALARS"
_MAX_BYTES = 4096
_CHECKSUM_BYTES = 8  # of the manifest's first line

_log = logging.getLogger("speedswap")


class ScalarsFile:
    """The file of a table that is open for writing.

    Args:
        directory: the table's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._close_fd: weakref.finalize[Any, Any] | None = None
        self._manifest: str | None = None
        self._last: dict[str, Any] | None = {}
        self._has_failed = False

    def write(self, attributes: dict[str, Any] | None) -> None:
        """Replace what the file says.

        Args:
            attributes: by name, with None for one that there is not any more; None where they are not known, so that
                those of the manifest are of an earlier step than the rows.
        """
        if self._has_failed or (attributes == self._last and self._manifest is not None):
            return
        if self._manifest is None:
            self._manifest = _manifest_checksum(self._directory)
        body = json.dumps({"manifest": self._manifest, "attributes": attributes}).encode()
        if len(body) > _MAX_BYTES - 16 and attributes is not None:
            self.write(None)
            return
        try:
            if self._fd < 0:
                self._fd = _open(self._directory / _NAME, os.O_RDWR | os.O_CREAT)
                self._close_fd = weakref.finalize(self, os.close, self._fd)
                self._close_fd.atexit = False  # the table may still be flushed then
            # In one call, over what was there before, which a kill does not interrupt; the rest of a longer text stays.
            os.pwrite(self._fd, b"%08x\n%s\n" % (zlib.crc32(body), body), 0)
            self._last = attributes
        except OSError as error:
            self._give_up(error)

    def manifest_has_changed(self) -> None:
        """Note that the manifest was saved: what is written from now on goes with the new one."""
        self._manifest = None

    def close(self) -> None:
        """Close the file."""
        if self._close_fd is not None:
            self._close_fd()
        self._fd, self._close_fd = -1, None

    def _give_up(self, error: OSError) -> None:
        """Leave the file without a meaning rather than with an old one."""
        self._has_failed = True
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
        _log.warning(
            "the step count cannot be kept with the rows of %s at every step (%s); it is saved when the table is "
            "flushed or closed",
            self._directory,
            error,
        )


def read_scalars(directory: Path, attributes: dict[str, Any], *, unclean: bool) -> tuple[dict[str, Any], bool]:
    """Return a table's attributes as of its last step, and whether some of them may be of an earlier one.

    Args:
        directory: the table's.
        attributes: those of its manifest.
        unclean: whether the process that wrote the table did not close it.

    Raises:
        TableFormatError: what is there is no regular file.
    """
    try:
        fd = _open(directory / _NAME, os.O_RDONLY)
    except FileNotFoundError:
        return attributes, unclean and bool(attributes)
    try:
        raw = os.pread(fd, _MAX_BYTES, 0)
    finally:
        os.close(fd)
    newer = _parsed(raw)
    if newer is None or newer["manifest"] != _manifest_checksum(directory):
        return attributes, unclean and bool(attributes)
    if newer["attributes"] is None:
        return attributes, True
    merged = attributes | newer["attributes"]
    return {name: value for name, value in merged.items() if value is not None}, False


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """What a file says; None where it is damaged."""
    checksum, _, rest = raw.partition(b"\n")
    body, end, _ = rest.partition(b"\n")
    if not end or checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"manifest", "attributes"}:
        return None
    return found if found["attributes"] is None or isinstance(found["attributes"], dict) else None


def _manifest_checksum(directory: Path) -> str:
    """The checksum with which the manifest begins; empty if it cannot be read."""
    try:
        fd = _open(directory / "MANIFEST", os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.pread(fd, _CHECKSUM_BYTES, 0).decode("ascii", "replace")
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    """Open a regular file without following a link, or waiting for whoever is at the other end of a pipe."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TableFormatError(f"{path} cannot be opened as a regular file ({error.strerror}); remove it") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TableFormatError(f"{path} is not a regular file; remove it")
    return fd
