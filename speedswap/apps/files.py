"""Files and folders of a run: under their names whole or not at all, never through a link.

Unfinished ones have a name of their own and are locked by their writer. The lock ends with the writer: by that the next
run recognizes the leftovers of a killed one, and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from speedswap.apps.errors import OutputError
from speedswap.errors import SpeedswapError
from speedswap.tables import Table
from speedswap.tables.files.place import exchange

__all__ = [
    "UNFINISHED",
    "copy_table",
    "fresh_folder",
    "open_archive",
    "open_regular",
    "remove_aside",
    "remove_leftovers",
    "says_unwritable",
    "scratch_folder",
    "take_name",
    "write_given",
    "write_whole",
]

UNFINISHED = ".speedswap-"
"""The prefix of the names of files and folders that are being written or removed."""
SCRATCH = "speedswap-scratch-"
"""The prefix of the names of temporary folders."""

_NAME_BYTES = 6  # of the number that follows the prefix

_log = logging.getLogger("speedswap")


@contextmanager
def says_unwritable(what: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the system into an ``OutputError`` that names the file and the reason."""
    try:
        yield
    except SpeedswapError:
        raise
    except OSError as error:
        raise OutputError(f"{what} cannot be written: {error.strerror or error}; {remedy}") from error


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes its name, durable, when the block ends without an error.

    An existing file of the name is replaced; so is a link, whose target stays as it is.

    Raises:
        OutputError: the file cannot be made or written. An existing one stays.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with write_whole(folder / "some.txt") as file:
        ...     _ = file.write(b"text")
        ...     (folder / "some.txt").exists()
        False
        >>> (folder / "some.txt").read_text()
        'text'
    """
    with says_unwritable(str(path), "make room or give another directory"):
        unfinished, lock = _owned(path.parent, UNFINISHED, _new_file)
        try:
            with open(lock, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextmanager
def write_given(path: Path) -> Iterator[BinaryIO]:
    """Open a file that the user has named: as ``write_whole`` does, but through links, and into devices and pipes.

    Raises:
        OutputError: it cannot be written.
    """
    path = Path(path)
    real = Path(os.path.realpath(path))
    # A pipe is reached by the given path alone.
    if not path.exists() or (path.is_file() and os.access(real.parent, os.W_OK)):
        with write_whole(real) as file:
            yield file
        return
    with says_unwritable(str(path), "give another file"), open(path, "wb") as file:
        yield file


@contextmanager
def fresh_folder(parent: Path) -> Iterator[Path]:
    """Make a folder under a name of its own, for the block to fill and rename; otherwise it is removed again."""
    folder, lock = _owned(parent, UNFINISHED, os.mkdir)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def take_name(folder: Path, name: Path) -> None:
    """Give a folder a name, durably. Where another one has it, the two exchange names atomically."""
    if not name.is_dir():
        os.rename(folder, name)
    elif not exchange(folder, name):
        # This file system cannot exchange them: one after the other.
        aside = name.with_name(f".{name.name}.before")
        os.rename(name, aside)
        os.rename(folder, name)
        os.rename(aside, folder)
    _sync_folder(name.parent)


def remove_aside(path: Path) -> None:
    """Remove a folder after renaming it: at no moment does half of it have its name."""
    aside = _free_name(path.parent, UNFINISHED)
    os.rename(path, aside)
    _sync_folder(path.parent)
    _remove(aside)


def scratch_folder(owner: object, scratch: Path | None) -> tuple[Path, Callable[[], None]]:
    """Make a temporary folder that goes with its owner, and remove those of killed runs.

    Args:
        owner: an object; the folder is removed with it, or when the process ends.
        scratch: the directory to make it in; the system's by default.

    Returns:
        The folder, and a function that removes it.

    Raises:
        OutputError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir() if scratch is None else scratch).absolute()
    remove_leftovers(parent, SCRATCH)
    with says_unwritable(f"scratch {parent}", "give another directory with scratch"):
        folder, lock = _owned(parent, SCRATCH, lambda path: os.mkdir(path, 0o700))
    return folder, weakref.finalize(owner, _remove_scratch, folder, lock, os.getpid())


def copy_table(saved: Path, storage: str, path: Path | None) -> Table:
    """Copy a saved table, with all its columns and attributes, to a storage: to the directory ``path`` if given."""
    if path is None:
        return Table.load(saved, storage=storage)
    with Table.open(saved, mode="r") as source:
        source.save(path)
    return Table.open(path)


def remove_leftovers(
    parent: Path, prefix: str = UNFINISHED, rescue: Callable[[Path], None] | None = None
) -> list[Path]:
    """Remove the leftovers of this user's killed runs from a folder, with a warning for each.

    Args:
        parent: the folder; it need not exist.
        prefix: of the leftovers' names.
        rescue: moves files to keep out of a leftover folder.

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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where the owner is alive
            if rescue is not None and stat.S_ISDIR(found.st_mode):
                rescue(path)
            _remove(path)
            removed.append(path)
            _log.warning("removed %s, left behind by a killed run", path)
    return removed


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; a pipe is refused, not waited for.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    with _opened(Path(os.path.realpath(path))) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(os.dup(descriptor), "rb")


@contextmanager
def open_archive(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file that is a zip archive without compression, so that its contents are no larger than it.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
        ValueError: it is compressed.
        zipfile.BadZipFile: it is not an archive.
    """
    with open_regular(path) as file:
        with zipfile.ZipFile(file) as parts:
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise ValueError("it is compressed, and may be of any size")
        file.seek(0)
        yield file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _owned(parent: Path, prefix: str, make: Callable[[Path], int | None]) -> tuple[Path, int]:
    """Make a file or folder under a new name; return it with a descriptor that holds its lock."""
    while True:
        path = _free_name(parent, prefix)
        descriptor = make(path)
        if descriptor is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another run took it for a leftover
        with suppress(OSError):  # without locks no run can take it for a leftover
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink and os.path.lexists(path):
            return path, descriptor
        os.close(descriptor)  # another run took it for a leftover before it was locked


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _free_name(parent: Path, prefix: str) -> Path:
    while os.path.lexists(path := parent / (prefix + secrets.token_hex(_NAME_BYTES))):
        pass
    return path


def _remove_scratch(folder: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
