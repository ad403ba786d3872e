"""Paths at which tables, files and folders appear complete or not at all, never through a link.

``.NAME.speedswap-new`` is an incomplete or a replaced table; ``.NAME.speedswap-old`` is a table that is being replaced
on a file system that cannot exchange names. Unfinished files and folders have names that begin with ``.speedswap-``.
The process that writes one holds its lock, which ends with it, so the next process that writes there recognizes and
removes the leftovers of a killed one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from speedswap.errors import TableBusyError, TableFormatError
from speedswap.tables.files.locks import WriterLock, lock
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, says_if_full, sync_names

_log = logging.getLogger("speedswap")
OURS = re.compile(
    r"LOCK|OWNER|MANIFEST|MANIFEST(\.[0-9a-f]+)?\.tmp|keys-[0-9]+\.bin|rows(-[0-9]+)?\.log"
    r"|HEAD(-[0-9]+)?"
)
_SHARD = re.compile(r"\.?shard-[0-9]+-of-[0-9]+(\.speedswap-(new|old))?")  # a rank's directory, in a table of ranks
_NAME_BYTES = 255
_TRIES = 500
_AT_CWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2


class Place:
    """The path of a present or future table.

    Args:
        path: the path that users open.

    Attributes:
        shown: that path, made absolute so that a later ``chdir`` does not change it; for messages.
        path: the same path with links resolved.
        hidden: the directory in which a table for this place is built.
    """

    def __init__(self, path: Path) -> None:
        self.shown = path.absolute()
        self.path = Path(os.path.realpath(path))
        if not self.path.name:
            raise TableFormatError(f"path is {str(path)!r}, the root directory and no table; give another path")
        self.hidden, self._old = _hidden(self.path, "new"), _hidden(self.path, "old")
        self._made: list[Path] = []  # parent directories created for this table

    def open(self) -> OpenDirectory:
        """Open the directory at this place.

        Raises:
            FileNotFoundError: it does not exist, or is not a directory.
            TableFormatError: it cannot be read.
        """
        try:
            if self.recover():
                return OpenDirectory(self.path, shown=self.shown)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            raise TableFormatError(f"{self.shown} is not a table: it cannot be read ({error.strerror})") from error
        raise FileNotFoundError(f"path is {str(self.shown)!r}, where there is no table; create one with Table.create")

    def refuse_existing(self) -> None:
        """Raise FileExistsError if anything is at the path of a new table."""
        if not os.path.lexists(self.shown):
            return
        remedy = "it is not a table: give a path where nothing is yet"
        if os.path.lexists(self.shown / "MANIFEST"):
            remedy = "open it with Table.open, or remove it first"
        elif os.path.lexists(self.shown / "LOCK"):
            remedy = "it is a table without its MANIFEST, never finished or damaged: remove it first"
        raise FileExistsError(f"path is {str(self.shown)!r}, which exists; {remedy}")

    # ------------------------------------------------------------------ making a table

    def begin(self) -> tuple[OpenDirectory, WriterLock]:
        """Create the hidden directory, locked, and its missing parents; remove a leftover one first.

        Raises:
            TableBusyError: another process is making a table for this place.
            FileExistsError: the place is inside another table, or the hidden name is taken by something that is not
                speedswap's.
            TableFullError: the disk has no room.
        """
        refuse_within_table(self.path)
        try:
            self._make_parents()
            for _ in range(_TRIES):
                if (begun := self._try_to_begin()) is not None:
                    return begun
            raise TableBusyError(
                errno.EBUSY, f"path is {str(self.path)!r}, where another process is making a table; wait for it"
            )
        except BaseException:
            self.remove_parents()
            raise

    def _try_to_begin(self) -> tuple[OpenDirectory, WriterLock] | None:
        try:
            with says_if_full(self.path.parent):
                os.mkdir(self.hidden)
        except FileExistsError:
            self._discard_leftover(self.hidden)
            return None
        try:
            directory = OpenDirectory(self.hidden, follow=False, shown=self.shown)
            lock = WriterLock(directory)
        except (FileNotFoundError, TableBusyError):
            return None  # another process took it for a leftover before it was locked
        except BaseException:
            for name in ("OWNER", "LOCK"):
                with suppress(OSError):
                    os.unlink(self.hidden / name)
            _remove_empty(self.hidden)
            raise
        if directory.is_at(self.hidden):
            return directory, lock
        lock.release()
        return None

    def publish(self) -> None:
        """Move the finished table to the path, durably.

        Raises:
            FileExistsError: the path has been taken in the meantime.
        """
        self.refuse_existing()
        try:
            rename_without_replacing(self.hidden, self.path)
        except FileExistsError:
            self.refuse_existing()
            raise
        for directory in (self.path, *self._made):
            sync_names(directory.parent)

    def replace(self) -> None:
        """Exchange the finished table with the one at the path, durably: a table is there at every instant."""
        if not _rename_at_once(self.hidden, self.path, _EXCHANGE):
            # This file system cannot exchange names: two renames. recover() repairs what a kill in between leaves.
            self._discard_leftover(self._old)  # left by a process killed after the second; this process owns the path
            try:
                os.rename(self.path, self._old)
                os.rename(self.hidden, self.path)
            except BaseException:
                if not os.path.lexists(self.path):
                    os.rename(self._old, self.path)
                raise
            os.rename(self._old, self.hidden)
        sync_names(self.path.parent)

    # ------------------------------------------------------------------ after a process that was killed

    def recover(self) -> bool:
        """Restore a table that a killed process was replacing; return whether the path exists."""
        for _ in range(_TRIES):
            if os.path.lexists(self.path) or not self._put_back():
                break
        return os.path.lexists(self.path)

    def _put_back(self) -> bool:
        """Rename a table that was set aside back to its path; return whether one may be there now."""
        try:
            directory = OpenDirectory(self._old, follow=False)
            lock = WriterLock(directory, say=False)
        except TableBusyError:
            time.sleep(0.01)  # its owner is between two renames
            return True
        except (OSError, TableFormatError) as error:
            if isinstance(error, OSError) and error.errno in TRANSIENT:
                raise
            return False
        try:
            if directory.is_at(self._old) and not os.path.lexists(self.path):
                os.rename(self._old, self.path)
                sync_names(self.path.parent)
                _log.warning("put back %s, set aside by a process that was killed as it replaced it", self.path)
        finally:
            lock.release()
        return True

    def clear(self) -> None:
        """Remove what killed processes have left next to the table."""
        for leftover in (self.hidden, self._old):
            if os.path.lexists(leftover):
                try:
                    self._discard_leftover(leftover)
                except (OSError, TableFormatError) as error:
                    _log.debug("%s stays: %s", leftover, error)

    def _discard_leftover(self, leftover: Path) -> None:
        """Remove a hidden directory that no process is using.

        Raises:
            TableBusyError: a process is using it.
            FileExistsError: it is not speedswap's.
        """
        if _remove_empty(leftover):
            return
        try:
            directory = OpenDirectory(leftover, follow=False)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            raise _in_the_way(leftover, "is not a directory") from None
        names = directory.names()
        if foreign := sorted(name for name in names if not is_ours(directory, name)):
            raise _in_the_way(leftover, f"holds {foreign[0]!r}")
        if names and "LOCK" not in names:
            raise _in_the_way(leftover, "has no LOCK")
        try:
            lock = WriterLock(directory, say=False)
        except FileNotFoundError:
            return
        except TableBusyError as error:
            raise TableBusyError(
                errno.EBUSY,
                f"path is {str(self.path)!r}, where another process is making a table ({error.strerror}); wait for it, "
                "or give another path",
            ) from None
        try:
            # Its table may have been finished before it was locked here, and then it has another name.
            if directory.is_at(leftover):
                _discard(directory, leftover)
                _log.warning("removed %s, left behind by a process that was killed", leftover)
        finally:
            lock.release()

    def discard(self, directory: OpenDirectory) -> None:
        """Remove a table's directory, whose lock is held, from the path or from its hidden name."""
        if directory.is_at(self.path):  # rename it first, so that no process finds half of it
            if os.path.lexists(self.hidden):
                self._discard_leftover(self.hidden)
            os.rename(self.path, self.hidden)
        if directory.is_at(self.hidden):
            _discard(directory, self.hidden)

    # ------------------------------------------------------------------ directories above

    def _make_parents(self) -> None:
        missing = [parent for parent in self.path.parents if not os.path.lexists(parent)]
        for directory in reversed(missing):
            with says_if_full(directory.parent), suppress(FileExistsError):
                os.mkdir(directory)
                self._made.append(directory)

    def remove_parents(self) -> None:
        """Remove the parent directories that were created for the table, if they are empty."""
        for directory in reversed(self._made):
            _remove_empty(directory)


def refuse_within_table(path: Path) -> None:
    """Raise FileExistsError if something is to be created at a path inside a table's directory."""
    path = Path(os.path.realpath(path))
    for inner, directory in zip((path, *path.parents), path.parents, strict=False):
        names = os.listdir(directory) if (directory / "MANIFEST").is_file() and not is_shard(inner.name) else []
        if "LOCK" in names or any(map(is_shard, names)):
            raise FileExistsError(
                f"path is {str(path)!r}, inside the table in {str(directory)!r}; give one outside of any table"
            )


def is_ours(directory: OpenDirectory, name: str) -> bool:
    """Return whether a name in a table's directory can be a file of the table, or a rank's table."""
    if _is_folder(directory, name):
        shard = _shard(directory, name)
        return shard is not None and all(OURS.fullmatch(each) and not _is_folder(shard, each) for each in shard.names())
    return OURS.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Return whether a name is that of a rank's directory, finished or being built."""
    return _SHARD.fullmatch(name) is not None


def _shard(directory: OpenDirectory, name: str) -> OpenDirectory | None:
    """Open a rank's directory within a table's, if a name can be one."""
    if not is_shard(name):
        return None
    return OpenDirectory(Path(name), follow=False, shown=directory.path / name, within=directory)


def _is_folder(directory: OpenDirectory, name: str) -> bool:
    found = directory.status(name)
    return found is not None and stat.S_ISDIR(found.st_mode)


def rename_without_replacing(source: Path, target: Path) -> None:
    """Rename a directory without replacing anything.

    Raises:
        FileExistsError: the new name is taken.
    """
    if not _rename_at_once(source, target, _NO_REPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)


def _rename_at_once(source: Path, target: Path, how: int) -> bool:
    """Call renameat2; return False if the system or the file system lacks it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(source), _AT_CWD, os.fsencode(target), how):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(target))
        return False
    return True


def _hidden(path: Path, what: str) -> Path:
    name = f".{path.name}.speedswap-{what}"
    if len(os.fsencode(name)) > _NAME_BYTES:
        digest = hashlib.blake2b(os.fsencode(path.name), digest_size=16).hexdigest()
        name = f".{digest}.speedswap-{what}"
    return path.with_name(name)


def _discard(directory: OpenDirectory, path: Path) -> None:
    """Remove a directory whose lock is held, unless it holds foreign files, which stay."""
    for name in directory.names():
        if name != "LOCK" and is_ours(directory, name):
            if (shard := _shard(directory, name)) is not None:
                for each in shard.names():
                    shard.remove(each)
                os.rmdir(name, dir_fd=directory.fd)
            else:
                directory.remove(name)
    directory.remove("LOCK")  # last, so that the owner of whatever is left is known
    _remove_empty(path)


def _remove_empty(path: Path) -> bool:
    try:
        os.rmdir(path)
    except OSError:
        return False
    return True


def _in_the_way(path: Path, why: str) -> FileExistsError:
    return FileExistsError(
        f"{path} is in the way: the table would be made there until it is finished, but it {why}, so that it is not "
        "speedswap's; move it away"
    )


UNFINISHED = ".speedswap-"
"""The prefix of the names of files and folders that are being written or removed."""

_RANDOM_BYTES = 6  # after the prefix


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that durably takes its name when the block ends without an error.

    An existing file is replaced; so is a link, whose target is unchanged.

    Raises:
        FileExistsError: it would replace a file of a table or of a checkpoint, or a device or a pipe.
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
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise FileExistsError(
            f"path is {str(path)!r}, a device, a pipe or a socket, which a file would replace; give another path"
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
    ours = re.compile(re.escape(prefix) + f"[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
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
        while os.path.lexists(path := parent / (prefix + secrets.token_hex(_RANDOM_BYTES))):
            pass
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
