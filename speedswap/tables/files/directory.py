"""The directory of a table in files: ``LOCK``, ``OWNER``, ``MANIFEST`` and the rows; and the right to write them."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap._process import Locked
from speedswap.errors import TableBusyError, TableClosedError, TableFormatError, TableFullError
from speedswap.tables.files.locks import WriterLock
from speedswap.tables.files.manifest import MANIFEST, AnyManifest, LogManifest, ManifestFile, ShardsManifest
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, identity, says_if_full
from speedswap.tables.files.place import Place, is_ours
from speedswap.tables.init import Bases

_KEYS = re.compile(r"keys-([0-9]{1,9})\.bin")
_NUMBERS = 10**9
_TRIES = 100
_MOST_OPEN = 64
_LOG_FILES = re.compile(r"rows(-[0-9]{1,10})?\.log|HEAD(-[0-9]{1,10})?")
_log = logging.getLogger("speedswap")


class LogFiles(NamedTuple):
    """The open files of a table in a log: its rows, and the heads of its commits."""

    rows: OpenFile
    head: OpenFile


class TableDirectory(Locked):
    """A table's files. A writable one holds the directory's lock until released.

    Attributes:
        path: where the table is opened, absolute.
        files: the open directory.
        writable: True if this object may write the files.
        base: where its bases are now, if they were moved.
    """

    def __init__(self, place: Place, files: OpenDirectory, lock: WriterLock | None, base: Bases | None = None) -> None:
        super().__init__()
        self.base = base
        self.path = place.shown
        self.files = files
        self.writable = lock is not None
        self._place = place
        self._writer_lock = lock
        self._owner_pid = os.getpid()
        self._manifest: ManifestFile | None = None  # as last read or written by this object
        self._manifest_path = str(place.path / MANIFEST)
        self._next_keys: int | None = None  # the first number to try for a new file of keys

    # ------------------------------------------------------------------ creating and replacing

    @classmethod
    def create(cls, path: Path) -> TableDirectory:
        """Create a directory, locked for writing, that stays hidden until :meth:`publish`.

        A scratch table at ``path`` that has outlived its process is removed.

        Raises:
            FileExistsError: ``path`` exists.
            TableBusyError: another process is making a table there.
        """
        place = Place(path)
        place.recover()
        cls.discard_scratch(path)
        place.refuse_existing()
        return cls(place, *place.begin())

    @classmethod
    def discard_scratch(cls, path: Path) -> None:
        """Remove a scratch table that has outlived its process, if one is at a path; links are not followed.

        Raises:
            FileExistsError: its process is still running, or the directory holds foreign files.
        """
        place = Place(path)
        try:
            files = OpenDirectory(place.shown, follow=False)
            if not _is_scratch(ManifestFile.load(files)[1]):
                return
            left, manifest = cls._take(place, say=False)
        except TableBusyError:
            raise FileExistsError(
                f"path is {str(place.shown)!r}, a scratch table that is open in process {WriterLock.holder(files)}; "
                "close it there, or give another path"
            ) from None
        except (OSError, TableFormatError):
            return  # another kind of thing, or nothing
        try:
            if _is_scratch(manifest):
                left._refuse_foreign()
                place.discard(left.files)
                _log.warning("removed %s, a scratch table that a killed process has left behind", place.shown)
        finally:
            left.release()

    def publish(self) -> None:
        """Make the table appear at its path, complete and durable.

        Raises:
            FileExistsError: the path has been taken in the meantime.
        """
        self._place.publish()

    @classmethod
    @contextmanager
    def replacing(cls, path: Path, *, overwrite: bool) -> Iterator[TableDirectory]:
        """Yield a hidden directory that durably moves to ``path`` if the block ends without an error.

        Where ``path`` is a link to a table, that table is replaced and the link stays: overwriting a name overwrites
        the table that opens under it.
        """
        place = Place(path)
        place.recover()
        if os.path.lexists(place.shown) and not overwrite:
            raise FileExistsError(f"path is {str(place.shown)!r}, which exists; give overwrite=True to replace it")
        if place.shown.is_symlink() and not place.path.exists():
            raise FileExistsError(
                f"path is {str(place.shown)!r}, a symbolic link to {place.path}, where nothing is; remove it"
            )
        with ExitStack() as held:
            # Only a table is replaced, and only one that no process writes.
            # It is not noted as open: until it is replaced, OWNER says whether the last writer closed it.
            previous = cls._take(place, say=False)[0] if os.path.lexists(place.path) else None
            if previous is not None:
                held.callback(previous.release)
                previous._refuse_foreign()
            directory = cls(place, *place.begin())
            held.callback(directory.release)
            try:
                if previous is not None:
                    directory._restrict_as(previous)
                yield directory
                if previous is None:
                    directory.publish()
                else:
                    place.replace()
                    previous.remove()
            except BaseException:
                if previous is None or not directory.files.is_at(place.path):
                    directory.remove()
                raise

    def _refuse_foreign(self) -> None:
        """Raise FileExistsError if a foreign file would be removed with the table."""
        foreign = [name for name in self.files.names() if not is_ours(self.files, name)]
        if foreign:
            raise FileExistsError(
                f"path is {str(self.path)!r}, where {min(foreign)!r} is among the table's files and would be "
                "lost; move it away"
            )

    def _restrict_as(self, other: TableDirectory) -> None:
        """Deny the permissions that another directory denies."""
        denied = ~stat.S_IMODE(os.fstat(other.files.fd).st_mode) & 0o777
        os.fchmod(self.files.fd, stat.S_IMODE(os.fstat(self.files.fd).st_mode) & ~denied)

    # ------------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, path: Path, *, writable: bool, base: Bases | None = None
    ) -> tuple[TableDirectory, LogManifest, LogFiles]:
        """Check the files, open the rows, and take the lock if the table will be written.

        Args:
            path: the directory.
            writable: True to write the table.
            base: where its bases are now, if they were moved; the manifest is not changed.

        Returns:
            The directory, its manifest, and its rows.

        Raises:
            FileNotFoundError: there is no directory.
            TableFormatError: it is not a table, or it is damaged.
            TableBusyError: it was opened for writing, and another writer holds it.
        """
        place = Place(path)
        if not writable:
            directory = cls(place, place.open(), None, base)
            return directory, *directory._read()
        directory, manifest = cls._take(place, base=base)
        try:
            place.clear()
            directory._discard_strays(manifest)
            return directory, *directory._log_of(manifest)
        except BaseException:
            directory.release()
            raise

    @classmethod
    def _take(cls, place: Place, *, say: bool = True, base: Bases | None = None) -> tuple[TableDirectory, AnyManifest]:
        """Lock the table at a place, and read its manifest; note this process as its writer if ``say``."""
        for _ in range(_TRIES):
            files = place.open()
            try:
                ManifestFile.load(files)  # before a LOCK is created in a directory that is not a table
                lock = WriterLock(files, say=say)
            except (FileNotFoundError, TableFormatError):
                if files.is_at(place.path):
                    raise
                continue  # replaced at this moment
            directory = cls(place, files, lock, base)
            try:
                if files.is_at(place.path):
                    return directory, directory._load()
            except BaseException:
                directory.release()
                raise
            directory.release()
        raise TableFormatError(f"{place.shown} is replaced all the time; open the table when that is done")

    def _read(self) -> tuple[LogManifest, LogFiles]:
        """Read the manifest and open the rows of a table that another process may be writing."""
        tries = 0
        while True:
            before = self._current()
            try:
                return self._log_of(self._load())
            except (FileNotFoundError, TableFormatError):
                tries += 1
                if tries == _TRIES or (self._current() == before and self.files.is_at(self._place.path)):
                    raise
            self.files = self._place.open()

    def _load(self) -> AnyManifest:
        self._manifest, manifest = ManifestFile.load(self.files, self.base)
        return manifest

    def _log_of(self, manifest: AnyManifest) -> tuple[LogManifest, LogFiles]:
        if isinstance(manifest, ShardsManifest):
            raise TableFormatError(f"{self.path} is a table of {manifest.world_size} ranks now; open it again")
        if manifest.scratch:
            raise TableFormatError(
                f"{self.path} is a scratch table, whose rows go with the process that made it; make a new one with "
                "Table.create, or remove the directory"
            )
        names = log_names(manifest.log)
        return manifest, LogFiles(*(OpenFile(self._open_own(name, writing=self.writable)) for name in names))

    def _open_named(self, file: str, flags: int) -> int:
        """Open a file that the manifest names."""
        try:
            return self.files.open(file, flags)
        except FileNotFoundError:
            raise TableFormatError(f"the {MANIFEST} of {self.files.path} is damaged: {file} is missing") from None

    def _open_own(self, file: str, *, writing: bool) -> int:
        """Open a file of the table; one opened for writing must have no other hard links."""
        fd = self._open_named(file, os.O_RDWR if writing else os.O_RDONLY)
        names = os.fstat(fd).st_nlink
        if writing and names > 1:
            os.close(fd)
            raise TableFormatError(
                f"{self.files.path / file} has {names} names (hard links), so writing it would change another "
                f"file as well; separate it first: cp {file} copy && mv copy {file}"
            )
        return fd

    def _discard_strays(self, manifest: AnyManifest) -> None:
        """Remove what a killed process has left in the directory, except id maps, which the store removes."""
        used = log_names(manifest.log) if isinstance(manifest, LogManifest) else ()
        strays = [name for name in self.files.names() if _is_stray(name, used) and is_ours(self.files, name)]
        if strays:
            self.files.sync()  # the manifest's writer may not have got that far
            for name in strays:
                self.files.remove(name)
            _log.warning("removed %s from %s, left behind by a process that was killed", ", ".join(strays), self.path)

    # ------------------------------------------------------------------ following another process

    def follow(self, accept: Callable[[LogManifest], None]) -> tuple[LogManifest, LogFiles] | None:
        """Return the current manifest and rows if another process has replaced them; otherwise None.

        Args:
            accept: raises if the manifest describes another table.

        Raises:
            TableClosedError: the table was removed or moved.
            TableFormatError: it is damaged.
        """
        if self._manifest is not None and not self.has_changed:
            return None
        with self.lock:
            self.writable = False
            try:
                self.files = self._place.open()
                manifest, contents = self._read()
                accept(manifest)
            except BaseException as error:
                self._manifest = None  # so that the next call checks again
                if not isinstance(error, FileNotFoundError):
                    raise
                raise TableClosedError(
                    f"the table at {str(self.path)!r} was removed, or moved away; open it where it is now"
                ) from None
            return manifest, contents

    @property
    def has_changed(self) -> bool:
        """True if the manifest at the table's path is not the one read last."""
        return self._manifest is not None and self._current() != self._manifest.seen

    def _current(self) -> tuple[int, ...]:
        """Return the identity of the manifest at the table's path; empty if it does not exist."""
        try:
            return identity(os.stat(self._manifest_path))
        except OSError:
            return ()

    # ------------------------------------------------------------------ writing

    def create_log(self, number: int, *, named: bool = True) -> LogFiles:
        """Create the empty files of a table in a log.

        Args:
            number: the log's number.
            named: False for unnamed files, which vanish with this process.
        """
        names = log_names(number)
        try:
            with says_if_full(self.files.path):
                files = LogFiles(*(OpenFile(self.files.create(name)) for name in names))
        except BaseException:
            self._remove_all(names)
            raise
        self._remove_all(() if named else names)
        return files

    def discard_logs(self, *, keep: int) -> None:
        """Remove the files of every log but one."""
        self._remove_all(
            name for name in self.files.names() if _LOG_FILES.fullmatch(name) and name not in log_names(keep)
        )

    def _remove_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.files.remove(name)

    def create_keys(self) -> tuple[str, OpenFile]:
        """Create an empty file for id maps; return its name and the file."""
        if self._next_keys is None:
            taken = [int(match[1]) for name in self.files.names() if (match := _KEYS.fullmatch(name))]
            self._next_keys = max(taken, default=-1) + 1
        while self.files.status(name := f"keys-{self._next_keys % _NUMBERS}.bin") is not None:
            self._next_keys += 1
        self._next_keys += 1
        with says_if_full(self.files.path):
            return name, OpenFile(self.files.create(name))

    def open_keys(self, name: str) -> OpenFile:
        """Open a file of id maps to append to it."""
        return OpenFile(self._open_own(name, writing=True))

    def read_keys(self, name: str) -> Tensor:
        """Return the bytes of an id map that the manifest names, uint8: a read-only mapping of its file."""
        file = OpenFile(self._open_named(name, os.O_RDONLY))
        nbytes = os.fstat(file.fd).st_size
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors
            return torch.frombuffer(mmap.mmap(file.fd, nbytes, access=mmap.ACCESS_READ), dtype=torch.uint8)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a small file that a commit names."""
        return self.read_keys(name).numpy().tobytes()

    def discard_keys(self, *, keep: Collection[str]) -> list[OpenFile]:
        """Remove id maps that the table does not use; return some open, since closing a large file last takes long."""
        removed = list[OpenFile]()
        for name in self.files.names():
            if _KEYS.fullmatch(name) and name not in keep and self.files.is_regular(name):
                with suppress(OSError):  # e.g. out of descriptors
                    if len(removed) < _MOST_OPEN:
                        removed.append(OpenFile(self.files.open(name)))
                self.files.remove(name)
        return removed

    def write_manifest(self, manifest: AnyManifest) -> None:
        """Replace the manifest, durably, unless it is the same already."""
        body = manifest.encode(self.path)
        if self._manifest is not None and body == self._manifest.body:
            return
        before, self._manifest = self._manifest, None  # if this fails, either of the two may be in place
        try:
            with says_if_full(self.files.path):
                self._manifest = ManifestFile.write(self.files, body)
        except TableFullError:
            self._manifest = before  # the previous one is still in place
            raise

    # ------------------------------------------------------------------ the end

    def lives_at(self, path: Path) -> bool:
        """Return whether a path leads to this directory now."""
        return self.files.is_at(Path(os.path.realpath(path)))

    def release(self) -> None:
        """Release the lock; harmless if it is not held."""
        if self._writer_lock is not None:
            self._writer_lock.release()

    def remove(self) -> None:
        """Remove the directory with the table in it, and the directories made above it; harmless if it is gone."""
        try:
            if not self.files.exists:
                return
            if self._writer_lock is None or not self._writer_lock.is_held:
                self._writer_lock = WriterLock(self.files, say=False)
            self._place.discard(self.files)
        except OSError as error:
            _log.warning("%s could not be removed: %s", self.path, error)
        finally:
            self.release()
        self._place.remove_parents()


def _is_scratch(manifest: AnyManifest) -> bool:
    return isinstance(manifest, LogManifest) and manifest.scratch


def log_names(number: int) -> tuple[str, str]:
    """Return the names of a log's files: the rows, and the heads of its commits."""
    return (f"rows-{number}.log", f"HEAD-{number}") if number else ("rows.log", "HEAD")


def _is_stray(name: str, used: Collection[str]) -> bool:
    is_unfinished = name.startswith(MANIFEST) and name.endswith(".tmp")
    return is_unfinished or (name not in used and _LOG_FILES.fullmatch(name) is not None)


def facts_of(path: Path) -> dict[str, Any]:
    """Return facts read from a table's directory alone, for ``speedswap info``; nothing in it is changed.

    Raises:
        FileNotFoundError: the directory does not exist.
        TableFormatError: it is not a table, or its manifest is damaged.
    """
    files = Place(path).open()
    file, _ = ManifestFile.load(files)
    holder = WriterLock.holder(files)
    found = [files.status(name) for name in files.names()]
    return {
        "format": json.loads(file.body)["version"],
        "bytes_on_disk": sum(one.st_blocks * 512 for one in found if one is not None and stat.S_ISREG(one.st_mode)),
        "last_commit_at": at_time(os.fstat(file.file.fd).st_mtime),
        "open_for_writing_in": holder,
        "left_open": holder is None and WriterLock.is_noted(files),
    }


def at_time(seconds: float) -> str:
    """Return a time in ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
