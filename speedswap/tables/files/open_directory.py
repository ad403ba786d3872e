"""An open directory of untrusted files, never opened through links."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speedswap.errors import TableFullError
from speedswap.tables.files.damage import UnknownFile

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
# Errors that say nothing about a file's content.
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)

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


class OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False  # a table may still be flushed then

    def close(self) -> None:
        """Close the file now; harmless if it is closed."""
        self._close()

    def forget_cached(self) -> None:
        """Drop what the page cache has of the file, so that what is read next comes from the disk."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


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
            raise UnknownFile(f"{self.path / name} changed while it was opened") from error
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
        try:
            os.fsync(self.fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync directories
                raise

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
            raise UnknownFile(
                f"{self.path / name} is {kind}, which is neither followed nor opened; remove it, and copy the file "
                "itself there if it is missing then"
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
        opened = OpenDirectory(directory)
    except PermissionError:
        return
    opened.sync()


@contextmanager
def says_if_full(
    folder: Path, outcome: str = "no row was changed: free space there, or keep the table on another disk"
) -> Iterator[None]:
    """Raise TableFullError in place of the system's error for a full disk.

    Args:
        folder: of the file.
        outcome: the resulting state, and the remedy.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, TableFullError) or error.errno not in FULL:
            raise
        raise TableFullError(
            error.errno,
            f"no room on the disk of {folder} ({os.strerror(error.errno or 0)}); {outcome}",
        ) from error
