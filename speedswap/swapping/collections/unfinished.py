"""The directory of a collection in files while its groups are made, so that a killed process leaves all or none.

A file in the directory names the groups that are being made. The next process that makes a collection there removes
what it names, if its lock is free.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from speedswap.errors import TableBusyError
from speedswap.tables import Storage, Table
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, says_if_full
from speedswap.tables.files.place import Place

__all__ = ["require_finished", "unfinished"]

_GROUPS = ".speedswap-groups"
_log = logging.getLogger("speedswap")


@contextmanager
def unfinished(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Make a directory for the block to make groups in; it goes again if that raises and leaves nothing in it.

    Args:
        path: of the collection; it may exist.
        names: of the groups.

    Raises:
        FileExistsError: a group is there.
        TableBusyError: another process is making groups there.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with says_if_full(path / "groups"):
        path.mkdir(parents=True, exist_ok=True)
    directory = OpenDirectory(path)
    try:
        with says_if_full(path / "groups"):
            file = _held(directory)
        try:
            _discard_leftovers(directory, file)
            for name in names:
                TableDirectory.discard_scratch(path / name)
                Place(path / name).refuse_existing()
            with says_if_full(path / "groups"):
                os.pwrite(file.fd, json.dumps(names).encode(), 0)
                os.fsync(file.fd)
                directory.sync()
            yield
        except BaseException:
            if not os.fstat(file.fd).st_size or not any(os.path.lexists(path / name) for name in names):
                directory.remove(_GROUPS)
            raise
        else:
            directory.remove(_GROUPS)
            directory.sync()  # it must not come back when the groups were trained
        finally:
            with suppress(OSError):
                fcntl.flock(file.fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
            file.close()
    except BaseException:
        with suppress(OSError):  # it has other files
            for each in missing:
                each.rmdir()
        raise
    finally:
        directory.close()


def require_finished(place: Storage) -> None:
    """Raise FileNotFoundError unless all groups in a place were made."""
    path = place.folder or Path()
    file = path / _GROUPS
    if file.exists() and file.stat().st_size:
        raise FileNotFoundError(
            f"path is {str(path)!r}, where a collection was not finished by the process that made it; make it again"
        )


def _held(directory: OpenDirectory) -> OpenFile:
    """Return the file that names the groups, empty or a killed process's, under this process's lock."""
    while True:
        try:
            file = OpenFile(directory.create(_GROUPS))
        except FileExistsError:
            try:
                file = OpenFile(directory.open(_GROUPS, os.O_RDWR))
            except FileNotFoundError:
                continue
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise TableBusyError(
                errno.EBUSY,
                f"path is {str(directory.path)!r}, where another process is making a collection; wait for it",
            ) from None
        except OSError as error:
            _log.debug("%s cannot be locked: %s", directory.path, error)
        if os.fstat(file.fd).st_nlink:
            return file
        file.close()  # its holder has just ended


def _discard_leftovers(directory: OpenDirectory, file: OpenFile) -> None:
    """Remove the groups that a killed process has left."""
    with suppress(ValueError):  # it was killed before it began with the first one
        for name in json.loads(os.pread(file.fd, 1 << 20, 0)):
            if Path(name).name == name and (directory.path / name).exists():
                Table.open(directory.path / name).remove()
                _log.warning("removed %s, left behind by a process that was killed", directory.path / name)
    os.ftruncate(file.fd, 0)
