"""Locks of files and directories between processes: kernel locks, which end with their holder, however it ends.

speedswap takes all of its file locks here, and reads here, from ``/proc``, which process holds one. A system with other
locks differs in this file alone.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from speedswap._process import in_child
from speedswap.errors import TableBusyError, TableFormatError
from speedswap.tables.files.open_directory import FULL, OpenDirectory, OpenFile, says_if_full

_log = logging.getLogger("speedswap")


def lock(fd: int, *, wait: bool = False) -> None:
    """Lock an open file or directory against all others that open it; closing every copy of ``fd`` releases it.

    Raises:
        BlockingIOError: another holds it; with ``wait``, it is waited for instead.
        OSError: the file system has no locks.
    """
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Release a lock at once, also for a process that was forked meanwhile and has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def locked(directory: OpenDirectory, busy: Exception) -> Iterator[None]:
    """Hold a directory's lock for the block.

    Args:
        directory: the directory. On a file system without locks it counts as free.
        busy: the error to raise if another process or thread holds its lock.
    """
    try:
        lock(directory.fd)
    except BlockingIOError:
        raise busy from None
    except OSError as error:
        _log.debug("%s cannot be locked: %s", directory.path, error)
    try:
        yield
    finally:
        with suppress(OSError):
            unlock(directory.fd)


# ---- a table's single writer


_LOCK, _OWNER = "LOCK", "OWNER"
_DYING_SECONDS = 1.0  # to wait for a lock whose holder is exiting, or is unknown
_EXITING, _KILL = 0x4 | 0x400, 1 << 8  # in /proc/PID/stat: PF_EXITING and PF_SIGNALED; a pending SIGKILL
_held: weakref.WeakValueDictionary[int, WriterLock] = weakref.WeakValueDictionary()  # by id()


class WriterLock:
    """The lock of a directory's single writer, across processes and within this one.

    A forked child neither holds nor releases its parent's lock.

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
            unlock(self._file.fd)
            _held.pop(id(self), None)
            self._file.close()


def _open_locked(directory: OpenDirectory) -> OpenFile:
    was_freed, deadline = False, time.monotonic() + _DYING_SECONDS
    while True:
        file = OpenFile(_open(directory))
        try:
            lock(file.fd)
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
    for writer in _all_held():
        with suppress(OSError):  # another thread is releasing it
            if os.path.sameopenfile(writer._file.fd, file.fd):
                return True
    return False


def _all_held() -> list[WriterLock]:
    """Return a snapshot of this process's locks, safe against changes by other threads and the garbage collector."""
    return [writer for found in _held.valuerefs() if (writer := found()) is not None]


def _open(directory: OpenDirectory) -> int:
    while True:
        try:
            return directory.open(_LOCK, os.O_RDWR)
        except FileNotFoundError:
            try:
                with says_if_full(directory.path):
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
    for writer in _all_held():
        _held.pop(id(writer), None)
        writer._file.close()  # this copy of the descriptor; the parent's keeps the lock


in_child(_forget_in_child)
