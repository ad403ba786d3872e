"""An open directory of files from any source: only regular files are opened, and never through a link."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speedswap.errors import TableFormatError, TableFullError

__all__ = ["FULL", "TRANSIENT", "OpenDirectory", "OpenFile", "identity", "says_if_full", "sync_names"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without room
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # errors that tell nothing about a file's content

# A FIFO under a file's name must not be waited for, nor a lease on it.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
    """A directory whose files are reached through its descriptor, also after a rename or a ``chdir``.

    Args:
        path: where it is now.
        follow: whether ``path`` itself may be a link.
        shown: the path in messages; ``path`` by default.
        within: the open directory to which ``path`` is relative; by default the working directory.

    Raises:
        FileNotFoundError: nothing is there.
        NotADirectoryError: it is something else, or a link that must not be followed.
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
            FileNotFoundError: there is none.
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
        """Remove a name, if it is there; the target of a link stays."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, of a link itself and not of its target; None if there is no entry."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_regular(self, name: str) -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def require_regular(self, name: str) -> None:
        """Raise TableFormatError if an entry of that name is anything but a regular file; it may be missing."""
        found = self.status(name)
        if found is not None:
            self._check(name, found)

    def sync(self) -> None:
        """Make the names in it durable."""
        _sync(self.fd)

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to this very directory, without a link at its end."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self.fd))
        except OSError:
            return False

    @property
    def exists(self) -> bool:
        """True until it is removed."""
        return os.fstat(self.fd).st_nlink > 0

    def _check(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise TableFormatError(
                f"the table in {self.path} is damaged: {name} is {kind}, which is neither followed nor opened; remove "
                "it, and copy the file itself there if it is missing then"
            )


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Return what distinguishes a file from any other one, and from itself before a change."""
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def sync_names(directory: Path) -> None:
    """Make the names in a directory durable, if it may be read."""
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
        outcome: what is left, and the remedy.
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
