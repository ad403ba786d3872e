"""Files and folders that appear complete or not at all, never through a link.

Unfinished ones have a temporary name and are locked by their writer. The lock ends with the writer, so the next process
that writes there recognizes and removes the leftovers of a killed one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from speedswap.tables.files.locks import lock
from speedswap.tables.files.open_directory import sync_names
from speedswap.tables.files.place import OURS

UNFINISHED = ".speedswap-"
"""The prefix of the names of files and folders that are being written or removed."""

_NAME_BYTES = 6  # digits of the number after the prefix

_log = logging.getLogger("speedswap")


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that durably takes its name when the block ends without an error.

    An existing file is replaced; so is a link, whose target is unchanged.

    Raises:
        FileExistsError: it would replace a file of a table or of a checkpoint.
        OSError: the file cannot be created or written. An existing file stays, and nothing else is left.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with write_whole(folder / "some.txt") as file:
        ...     _ = file.write(b"text")
        ...     (folder / "some.txt").exists()
        False
        >>> (folder / "some.txt").read_text()
        'text'
    """
    is_of_table = OURS.fullmatch(path.name) and os.path.lexists(path.with_name("MANIFEST"))
    if os.path.lexists(path) and (is_of_table or os.path.lexists(path.with_name("CHECKPOINT"))):
        raise FileExistsError(
            f"path is {str(path)!r}, a file of a table or a checkpoint, which would be destroyed; give another path"
        )
    unfinished, descriptor = _owned(path.parent, UNFINISHED, _new_file)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


@contextmanager
def fresh_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary folder for the block to fill and rename; if it is not renamed, it is removed."""
    folder, descriptor = _owned(parent, UNFINISHED, os.mkdir)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(descriptor)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Create a private folder; return it with a descriptor that holds its lock and must be closed at the end."""
    return _owned(parent, prefix, lambda path: os.mkdir(path, 0o700))


def remove_leftovers(parent: Path, prefix: str = UNFINISHED) -> list[Path]:
    """Remove the leftovers of this user's killed runs from a folder, with a warning for each.

    Args:
        parent: the folder; it need not exist.
        prefix: prefix of the leftovers' names.

    Returns:
        The paths removed.
    """
    removed = []
    ours = re.compile(re.escape(prefix) + f"[0-9a-f]{{{2 * _NAME_BYTES}}}")
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if ours.fullmatch(entry.name))
    except OSError:
        return []
    for name in names:
        path = parent / name
        with suppress(OSError), _opened(path) as descriptor:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                continue
            lock(descriptor)  # fails if the owner is alive
            _remove(path)
            removed.append(path)
            _log.warning("removed %s, left behind by a killed run", path)
    return removed


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; refuse a pipe instead of waiting for it.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    with _opened(Path(os.path.realpath(path))) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(os.dup(descriptor), "rb")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _owned(parent: Path, prefix: str, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Create a file or folder under a new name; return it with a descriptor that holds its lock."""
    while True:
        path = _free_name(parent, prefix)
        descriptor = make(path)
        if descriptor is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another run took it for a leftover
        with suppress(OSError):  # without locks no run can take it for a leftover
            lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink and os.path.lexists(path):
            return path, descriptor
        os.close(descriptor)  # another run took it for a leftover before it was locked


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _free_name(parent: Path, prefix: str) -> Path:
    while os.path.lexists(path := parent / (prefix + secrets.token_hex(_NAME_BYTES))):
        pass
    return path
