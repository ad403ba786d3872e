"""An open directory of untrusted files, never opened through links; and the lock of its single writer."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speedswap.errors import TableBusyError, TableFormatError, TableFullError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # errors that say nothing about a file's content

# Never block on a FIFO under a file's name, or on a lease.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_log = logging.getLogger("speedswap")


class OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False  # a table may still be flushed then

    def close(self) -> None:
        """Close the file now; harmless if it is closed."""
        self._close()


class OpenDirectory(OpenFile):
    """A directory whose files are accessed through its descriptor, even after a rename or a ``chdir``.

    Args:
        path: its current path.
        follow: True if ``path`` itself may be a link.
        shown: the path in messages; ``path`` by default.
        within: the open directory to which ``path`` is relative; by default the working directory.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        NotADirectoryError: it is not a directory, or is a link that must not be followed.
    """

    def __init__(
        self, path: Path, *, follow: bool = True, shown: Path | None = None, within: OpenDirectory | None = None
    ) -> None:
        self.path = shown or path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        super().__init__(os.open(path, flags, dir_fd=None if within is None else within.fd))

    def names(self) -> list[str]:
        """Return the names of all its entries."""
        return os.listdir(self.fd)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open an existing file.

        Raises:
            FileNotFoundError: it does not exist.
            TableFormatError: it is not a regular file.
        """
        self._check(name, os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        try:
            fd = os.open(name, flags | _CAREFULLY, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise TableFormatError(f"{self.path / name} changed while it was opened") from error
        try:
            self._check(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, name: str) -> int:
        """Open a new file for reading and writing; an existing one is an error."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o666, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a name if it exists; the target of a link stays."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry without following links; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_regular(self, name: str) -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def require_regular(self, name: str) -> None:
        """Raise TableFormatError if an entry exists and is not a regular file."""
        found = self.status(name)
        if found is not None:
            self._check(name, found)

    def sync(self) -> None:
        """Sync the directory, so that its names are durable."""
        _sync(self.fd)

    @contextmanager
    def locked(self, busy: Exception) -> Iterator[None]:
        """Hold the directory's lock for the block; it is released when its holder exits, however it exits.

        Args:
            busy: the error to raise if another process holds it. On a file system without locks it counts as free.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError as error:
            _log.debug("%s cannot be locked: %s", self.path, error)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # also for a child forked in the meantime

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to this directory, without a link as its last part."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self.fd))
        except OSError:
            return False

    @property
    def exists(self) -> bool:
        """True until the directory is removed."""
        return os.fstat(self.fd).st_nlink > 0

    def _check(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise TableFormatError(
                f"the table in {self.path} is damaged: {name} is {kind}, which is neither followed nor opened; remove "
                "it, and copy the file itself there if it is missing then"
            )


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that distinguishes a file from every other file, and from its own earlier contents."""
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes to a file at an offset, retrying after partial writes."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def sync_names(directory: Path) -> None:
    """Sync a directory, so that its names are durable, if it may be read."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync directories
            raise


@contextmanager
def says_if_full(
    path: Path, outcome: str = "no row was changed: free space there, or keep the table on another disk"
) -> Iterator[None]:
    """Raise TableFullError in place of the system's error for a full disk.

    Args:
        path: of the file.
        outcome: the resulting state, and the remedy.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, TableFullError) or error.errno not in FULL:
            raise
        raise TableFullError(
            error.errno,
            f"no room on the disk of {path.parent} ({os.strerror(error.errno or 0)}); {outcome}",
        ) from error


_LOCK, _OWNER = "LOCK", "OWNER"
_DYING_SECONDS = 1.0  # to wait for a lock whose holder is exiting, or is unknown
_EXITING, _KILL = 0x4 | 0x400, 1 << 8  # in /proc/PID/stat: PF_EXITING and PF_SIGNALED; a pending SIGKILL
_held: weakref.WeakValueDictionary[int, WriterLock] = weakref.WeakValueDictionary()  # by id()


class WriterLock:
    """The lock of a directory's single writer, across processes and within this one.

    It is a kernel lock (``flock``), released when its holder exits, however it exits. A forked child neither holds nor
    releases its parent's lock.

    Args:
        directory: the table's.
        say: True to record this process in OWNER.

    Raises:
        TableBusyError: another writer holds it.
        TableFormatError: LOCK or OWNER is not a regular file.
        FileNotFoundError: the directory has been removed.
        TableFullError: LOCK does not exist, and the disk has no room for it.
        OSError: the file system is read-only, or has no locks; the remedy is mode ``r``.
    """

    def __init__(self, directory: OpenDirectory, *, say: bool = True) -> None:
        self._directory = directory
        self._file = _open_locked(directory)
        self._says = say
        _held[id(self)] = self
        if say:
            try:
                _write_owner(directory)
            except BaseException:
                self._says = False
                self.release()
                raise

    @staticmethod
    def is_noted(directory: OpenDirectory) -> bool:
        """Return whether OWNER names a writer: one that holds the lock, or ended without releasing it."""
        return directory.status(_OWNER) is not None

    @staticmethod
    def holder(directory: OpenDirectory) -> str | None:
        """Return the process that holds the lock, according to OWNER, without touching the lock; None if it is free."""
        found = directory.status(_LOCK)
        if found is None:
            return None
        try:
            with open("/proc/locks") as locks:
                held = any(f":{found.st_ino} " in line and " FLOCK " in line for line in locks)
        except OSError as error:
            _log.debug("locks could not be read: %s", error)
            held = WriterLock.is_noted(directory)
        return _owner(directory) if held else None

    @property
    def is_held(self) -> bool:
        return _held.get(id(self)) is self

    def release(self) -> None:
        """Release the lock; harmless if it is not held, and completes an interrupted release."""
        if not self.is_held:
            return
        try:
            if self._says:
                self._directory.remove(_OWNER)
                self._says = False  # after an interrupted release, OWNER may already be another writer's
        finally:
            # Closing is not enough: a process forked by a library may still hold a copy of the descriptor.
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)
            _held.pop(id(self), None)
            self._file.close()


def _open_locked(directory: OpenDirectory) -> OpenFile:
    was_freed, deadline = False, time.monotonic() + _DYING_SECONDS
    while True:
        file = OpenFile(_open(directory))
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not was_freed and _is_of_this_process(file):
                gc.collect()  # its table may be reachable only from a cycle, such as a caught exception's
                was_freed = True
                continue
            owner = _owner(directory)
            if time.monotonic() < deadline and not _is_running(owner):
                time.sleep(0.01)
                continue
            raise TableBusyError(
                errno.EBUSY,
                f"table {str(directory.path)!r} is open for writing in process {owner}; close it there, or open it "
                "here with mode='r'",
            ) from None
        except OSError as error:
            raise OSError(
                error.errno,
                f"{directory.path / _LOCK} cannot be locked ({error.strerror}), and a table is written by one process "
                "at a time; keep it on a file system that has locks (flock), or open it with mode='r'",
            ) from error
        # Only its owner removes a directory; the locked file is then no longer the one of that name.
        named = directory.status(_LOCK)
        if named is not None and os.path.samestat(os.fstat(file.fd), named):
            return file


def _is_running(owner: str) -> bool:
    """Return whether a process is still running here; a killed one keeps its locks until its memory is freed."""
    pid, _, host = owner.partition(" on ")
    try:
        with open(f"/proc/{int(pid)}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    is_ending = state in "ZX" or int(numbers[5]) & _EXITING or int(numbers[27]) & _KILL
    return host == socket.gethostname() and not is_ending


def _is_of_this_process(file: OpenFile) -> bool:
    """Return whether a writer in this process holds the lock on a file."""
    for lock in _all_held():
        with suppress(OSError):  # another thread is releasing it
            if os.path.sameopenfile(lock._file.fd, file.fd):
                return True
    return False


def _all_held() -> list[WriterLock]:
    """Return a snapshot of this process's locks, safe against changes by other threads and the garbage collector."""
    return [lock for found in _held.valuerefs() if (lock := found()) is not None]


def _open(directory: OpenDirectory) -> int:
    while True:
        try:
            return directory.open(_LOCK, os.O_RDWR)
        except FileNotFoundError:
            try:
                with says_if_full(directory.path / _LOCK):
                    return directory.create(_LOCK)
            except FileExistsError:
                continue
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise type(error)(
                error.errno,
                f"table {str(directory.path)!r} cannot be written ({error.strerror}); open it with mode='r'",
            ) from error


def _owner(directory: OpenDirectory) -> str:
    try:
        file = OpenFile(directory.open(_OWNER))
        text = os.read(file.fd, 200).decode(errors="replace").strip()
        return text if text.isprintable() and text else "of unknown number"
    except (OSError, TableFormatError):
        return "of unknown number"


def _write_owner(directory: OpenDirectory) -> None:
    """Record the holder of the lock. A full disk does not prevent a table from being opened."""
    try:
        directory.require_regular(_OWNER)
        # Never write in place: it may be a hard link to a file worth keeping.
        directory.remove(_OWNER)
        file = OpenFile(directory.create(_OWNER))
        os.write(file.fd, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        if error.errno not in FULL:
            raise
        _log.debug("no room for %s: %s", directory.path / _OWNER, error)


def _forget_in_child() -> None:
    for lock in _all_held():
        _held.pop(id(lock), None)
        lock._file.close()  # this copy of the descriptor; the parent's keeps the lock


os.register_at_fork(after_in_child=_forget_in_child)
