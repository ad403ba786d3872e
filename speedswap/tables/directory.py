"""The directory of a memmap table: ``LOCK``, ``OWNER``, ``MANIFEST`` and ``data-*.bin``, and who may write them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from speedswap.errors import TableBusyError
from speedswap.tables.file_memory import FileMemory, says_if_full, write_file
from speedswap.tables.manifest import Manifest, encode, fsync_directory, read_manifest, write_manifest
from speedswap.tables.record import RecordLayout
from speedswap.tables.storage import Memory

__all__ = ["TableDirectory"]


class TableDirectory:
    """A table's files. A writable one holds the directory's lock until released."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self._manifest = b""  # as last written by this object
        self._lock = filelock.FileLock(path / "LOCK", timeout=0, thread_local=False)
        if writable:
            self._acquire()

    @classmethod
    def create(cls, path: Path) -> TableDirectory:
        """Make the directory, locked for writing.

        Raises:
            FileExistsError: something is there already.
        """
        try:
            with says_if_full(path):
                path.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(
                f"path is {str(path)!r}, which exists; open it with Table.open, or remove it first"
            ) from None
        try:
            return cls(path, writable=True)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> tuple[TableDirectory, Manifest]:
        """Check the manifest and take the lock if the table is to be written."""
        manifest = read_manifest(path)
        directory = cls(path, writable=writable)
        if writable:
            try:
                manifest = read_manifest(path)  # again: another writer may have finished in between
            except BaseException:
                directory.release()
                raise
        return directory, manifest

    @classmethod
    @contextmanager
    def replacing(cls, path: Path, *, overwrite: bool) -> Iterator[TableDirectory]:
        """A directory beside ``path`` that takes its place, durable, when the block ends without an error."""
        if path.exists() and not overwrite:
            raise FileExistsError(f"path is {str(path)!r}, which exists; give overwrite=True to replace it")
        with says_if_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        previous: TableDirectory | None = None
        if path.exists():
            previous, _ = cls.open(path, writable=True)  # only a table is replaced, and only one that nobody writes
        try:
            with says_if_full(path):
                temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        except BaseException:
            if previous is not None:
                previous.release()
            raise
        temporary.chmod(0o755)
        directory = cls(temporary, writable=True)
        try:
            yield directory
            directory.release()
            if previous is None:
                os.rename(temporary, path)
            else:
                previous.release()
                _exchange(temporary, path)
            fsync_directory(path.parent)
            if previous is not None:
                shutil.rmtree(temporary)
        except BaseException:
            directory.remove()
            raise
        finally:
            if previous is not None:
                previous.release()

    def create_data(self, nbytes: int) -> tuple[str, FileMemory]:
        """A new sparse data file of zeros, with its name."""
        name = self._new_data_name()
        return name, FileMemory(self.path / name, nbytes, create=True, writable=True)

    def save_data(self, memory: Memory) -> str:
        """A new data file with the bytes of a memory; its name."""
        name = self._new_data_name()
        write_file(self.path / name, memory)
        return name

    def _new_data_name(self) -> str:
        number = 1 + max((int(path.stem[5:]) for path in self.path.glob("data-*.bin")), default=-1)
        return f"data-{number}.bin"

    def open_data(self, name: str, layout: RecordLayout, num_embeddings: int) -> FileMemory:
        return FileMemory(self.path / name, num_embeddings * layout.stride, create=False, writable=self.writable)

    def discard_data(self, *, keep: list[str | None]) -> None:
        """Remove the data files that the table does not use (any more)."""
        for path in self.path.glob("data-*.bin"):
            if path.name not in keep:
                path.unlink()

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, unless it says the same already."""
        body = encode(manifest)
        if body != self._manifest:
            with says_if_full(self.path / "MANIFEST"):
                write_manifest(self.path, body)
            self._manifest = body

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._lock.is_locked:
            (self.path / "OWNER").unlink(missing_ok=True)
            self._lock.release()

    def remove(self) -> None:
        """Remove the directory with all that is in it."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _acquire(self) -> None:
        owner = self.path / "OWNER"
        try:
            self._lock.acquire()
        except filelock.Timeout:
            try:
                pid = owner.read_text(errors="replace")[:200].strip()
            except OSError:
                pid = "of unknown number"
            raise TableBusyError(
                errno.EBUSY,
                f"table {str(self.path)!r} is open for writing in process {pid}; close it there, or open it here with "
                "mode='r'",
            ) from None
        owner.write_text(f"{os.getpid()} on {socket.gethostname()}\n")


def _exchange(first: Path, second: Path) -> None:
    """Let two directories change names at one instant: at no time is there none under either name."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    if libc.renameat2(at_cwd, os.fsencode(first.absolute()), at_cwd, os.fsencode(second.absolute()), exchange):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(second))
        # This file system cannot: one after the other.
        aside = second.with_name(f".{second.name}.before")
        os.rename(second, aside)
        os.rename(first, second)
        os.rename(aside, first)
