"""The folders of a run's checkpoints: filled, numbered, locked, and verified before anything is released.

A checkpoint is good if each of its bytes was just read from the disk and matches its checksum, and damaged if one does
not match. Otherwise its state is unknown: a disk or network that fails now, missing permissions, a different version, a
folder or table that was moved. A folder or commit is released only on proof; if the state is unknown it stays, and the
log says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speedswap.collectives import Task
from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.checkpoints.format import (
    MANIFEST,
    MISSING,
    Manifest,
    SavedTable,
    SavedTensor,
    UnknownCheckpoint,
    damaged,
    says_malformed,
)
from speedswap.tables import Table
from speedswap.tables.files.damage import require
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, identity, says_if_full, sync_names
from speedswap.tables.files.place import refuse_within_table
from speedswap.tables.files.tensor_files import TensorReader, TensorWriter
from speedswap.tables.store import CHECKPOINT, CHECKPOINT_FOLDER

_log = logging.getLogger("speedswap")
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 8
_NOT_LINKED = ("LOCK", "OWNER")  # these belong to the process that wrote a table
_NAME = re.compile(r"([0-9]{6,18})-step-([0-9]{1,20})")
# After a kill, the token shows which commits were held for a checkpoint that was never completed, or was removed.
_LEFT = re.compile(r"\.(?:unfinished|removed)(?:-([0-9a-f]{32}))?")


# ---- the files of one checkpoint


def new_digest(dtype: torch.dtype, shape: Sequence[int]) -> hashlib.blake2b:
    """Return a tensor's hash before its bytes are added."""
    return hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=16)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in ordinary memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def digest_of(tensor: Tensor) -> str:
    """Return a hash of the dtype, shape and bytes of a contiguous tensor in ordinary memory."""
    digest = new_digest(tensor.dtype, tensor.shape)
    digest.update(raw(tensor))
    return digest.hexdigest()


def _in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return a function's results for all items; reading and hashing leave the interpreter to other threads."""
    threads = min(_MOST_THREADS, torch.get_num_threads())
    if threads == 1 or not threading.main_thread().is_alive():  # no thread can start while Python exits
        return [*map(function, items)]
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(function, items)]


def _packed(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of its shape; torch considers single items contiguous with any strides."""
    return tensor.contiguous() if tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)


class NewFiles:
    """A checkpoint's folder while it is being filled.

    Args:
        folder: an empty folder.
        sound: what this save has verified.

    Attributes:
        bytes_written: bytes written so far, excluding linked files.
    """

    def __init__(self, folder: Path, sound: set[object]) -> None:
        self.folder = folder
        self.directory = OpenDirectory(folder)
        self.bytes_written = 0
        self._sound = sound

    @property
    def written(self) -> TensorsOf:
        """The written tensors, to be read back."""
        return TensorsOf(self.directory, self._sound)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to a new file, durably."""
        shapes = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        with self.new_tensors(name, shapes) as writer:
            for key, tensor in tensors.items():
                writer.write(key, tensor)

    def write_changed(
        self, name: str, tensors: Mapping[str, Tensor], previous: tuple[Manifest, Path] | None
    ) -> dict[str, SavedTensor]:
        """Write tensors that the previous checkpoint lacks to a new file, durably, and link the files of the rest.

        Args:
            name: name of the new file.
            tensors: tensors by name, on any device.
            previous: the previous checkpoint, and its folder.

        Returns:
            The location of every tensor.
        """
        host = {key: _packed(tensor.cpu()) for key, tensor in tensors.items()}
        digests = dict(zip(host, _in_threads(digest_of, host.values()), strict=True))
        there: dict[str, SavedTensor] = {}
        if previous is not None:
            there = {each.digest: each for each in previous[0].tensors.values()}
            for file in {there[digest].file for digest in digests.values() if digest in there}:
                path = previous[1] / file
                same = [key for key, digest in digests.items() if digest in there and there[digest].file == file]
                verify = partial(TensorsOf.check, tensors=[there[digests[key]] for key in same])
                # A file of mostly outdated values is dropped; the contents of a lost file are written again.
                is_worth = path.is_file() and 2 * sum(host[key].nbytes for key in same) >= path.stat().st_size
                if not (is_worth and self.link(previous[1], [file], verify)):
                    there = {digest: each for digest, each in there.items() if each.file != file}
        new: dict[str, Tensor] = {}
        for key, digest in digests.items():
            if digest not in there:
                new[key] = host[key]
                there[digest] = SavedTensor(name, key, digest)
        if new:
            self.write_tensors(name, new)
        return {key: there[digest] for key, digest in digests.items()}

    @contextmanager
    def new_tensors(self, name: str, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Iterator[TensorWriter]:
        """Yield a new file of tensors to be written piece by piece; it is durable at the end of the block."""
        file = OpenFile(self.directory.create(name))
        writer = TensorWriter(file, shapes)
        yield writer
        os.fsync(file.fd)
        self.bytes_written += writer.nbytes

    def link(self, other: Path, names: Sequence[str], verify: Callable[[TensorsOf], None]) -> bool:
        """Hard-link, or else copy, another checkpoint's files or folders into this one, and read them back.

        Args:
            other: the other checkpoint.
            names: the names of the files and folders.
            verify: raises if what was read back is damaged.

        Returns:
            False if they do not read back as written, so they must be written again.
        """
        try:
            for name in names:
                self._link_all(other / name, self.folder / name)
            verify(self.written)
            return True
        except (CheckpointError, OSError) as error:
            _log.warning("%s is written again instead of linked from the last checkpoint: %s", ", ".join(names), error)
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)  # if it is a folder
                self.directory.remove(name)
            return False

    def _link_all(self, source: Path, target: Path) -> None:
        if not source.is_dir():
            self._link(source, target)
            return
        target.parent.mkdir(exist_ok=True)  # the folder of all ranks' rows
        os.mkdir(target)
        for path in source.iterdir():
            if path.name not in _NOT_LINKED:
                self._link(path, target / path.name)
        sync_names(target)
        sync_names(target.parent)

    def _link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:  # linked by another rank, too
            return
        except OSError:  # no hard links here, or too many
            shutil.copyfile(source, target, follow_symlinks=False)
            with open(target, "rb") as file:
                os.fsync(file.fileno())
            self.bytes_written += target.stat().st_size

    def add_copy(self, table: Table, name: str) -> None:
        """Write a copy of a table to a new folder, durably."""
        table.save(self.folder / name)
        self.bytes_written += sum(path.stat().st_blocks * 512 for path in (self.folder / name).iterdir())


class TensorsOf:
    """The tensors in the files of a checkpoint, each checked against its hash.

    Args:
        directory: the checkpoint's directory.
        sound: what need not be verified again: tensors and tables' copies, by the device and inode numbers of their
            files. Verified ones are added.

    Attributes:
        folder: its path.
    """

    def __init__(self, directory: OpenDirectory, sound: set[object] | None = None) -> None:
        self._directory = directory
        self.sound = set[object]() if sound is None else sound
        self.folder = directory.path
        self._readers: dict[str, TensorReader] = {}

    def file(self, name: str) -> TensorReader:
        """Open a file of tensors.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if name not in self._readers:
            what = str(self.folder / name)
            with says_malformed(self.folder, "its header", name):
                self._readers[name] = TensorReader(OpenFile(self._directory.open(name)), what)
        return self._readers[name]

    def pieces(self, file: str, *names: str) -> Iterator[list[Tensor]]:
        """Yield rows, piece by piece, of tensors with the same number of rows.

        Raises:
            CheckpointError: the file cannot be read.
        """
        reader = self.file(file)
        places = [reader.places[name] for name in names]
        rows = places[0].shape[0] if places[0].shape else 1
        step = max(1, _PIECE_BYTES * rows // max(1, sum(place.nbytes for place in places)))
        for start in range(0, rows, step):
            with says_malformed(self.folder, "its tensors", file):
                some = [reader.read_rows(name, start, min(start + step, rows)) for name in names]
            yield some

    def read(self, saved: SavedTensor) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        reader = self._reader_of(saved)
        with says_malformed(self.folder, "its tensors", saved.file):
            tensor = reader.read(saved.key)
        self._compare(digest_of(tensor), saved)
        return tensor

    def check(self, tensors: Iterable[SavedTensor]) -> None:
        """Read tensors from the disk, a piece at a time, and compare them with their hashes.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        unread: dict[object, SavedTensor] = {}
        for saved in tensors:
            which = identity(os.fstat(self._reader_of(saved).file.fd)), saved.key, saved.digest
            if which not in self.sound:
                unread[which] = saved
        for file in {saved.file for saved in unread.values()}:
            self.file(file).file.forget_cached()
        _in_threads(self._verify, unread.values())
        self.sound.update(unread)

    def _verify(self, saved: SavedTensor) -> None:
        place = self.file(saved.file).places[saved.key]
        digest = new_digest(place.dtype, place.shape)
        for (piece,) in self.pieces(saved.file, saved.key):
            digest.update(raw(piece))
        self._compare(digest.hexdigest(), saved)

    def _reader_of(self, saved: SavedTensor) -> TensorReader:
        reader = self.file(saved.file)
        if saved.key not in reader.places:
            raise damaged(self.folder, f"{saved.file} lacks {saved.key!r}")
        return reader

    def _compare(self, digest: str, saved: SavedTensor) -> None:
        if digest != saved.digest:
            raise damaged(self.folder, f"the bytes of {saved.key!r} in {saved.file} differ from those written")


# ---- the folders of a run


class Folder(NamedTuple):
    """The folder of a checkpoint; the highest number is the newest."""

    number: int
    step: int
    path: Path

    @property
    def is_complete(self) -> bool:
        """False if the folder has no manifest, e.g. while it is being copied there."""
        try:
            return bool(os.lstat(self.path / MANIFEST))
        except OSError as error:
            return error.errno not in MISSING


def open_folder(path: Path) -> OpenDirectory:
    """Open a checkpoint's folder.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """
    with says_malformed(path, "its folder", ""):
        return OpenDirectory(path)


class Found(NamedTuple):
    """The checkpoints in a directory.

    Attributes:
        manifests: readable manifests by folder, oldest first.
        unknown: why others are unknown; empty if there can be none.
        gone: the tokens of checkpoints proven not to exist.
        leftovers: unfinished and half-removed checkpoints.
    """

    manifests: dict[Path, Manifest]
    unknown: list[str]
    gone: set[str]
    leftovers: list[Path]

    @property
    def newest(self) -> tuple[Manifest, Path] | None:
        """The newest checkpoint's manifest and folder."""
        return next(((manifest, path) for path, manifest in reversed(self.manifests.items())), None)

    def folder_of(self, token: object) -> Path | None:
        """Return the folder of a checkpoint; None if it is not among these."""
        return next((path for path, manifest in self.manifests.items() if manifest.token == token), None)


class Folders:
    """The checkpoints in a directory, each a folder named like ``000007-step-500``.

    Args:
        path: the directory; it need not exist.

    Attributes:
        sound: what was verified, as in :class:`TensorsOf`, since checkpoints share files.
    """

    known_sound: ClassVar[str] = ""
    """The token of the last checkpoint that this process has loaded or saved, and so checked in full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sound: set[object] = set()
        self._manifests: dict[Path, Manifest] = {}

    @staticmethod
    def name(number: int, step: int) -> str:
        """Return the name of a checkpoint's folder."""
        return f"{number:06}-step-{step}"

    def entries(self) -> list[Folder]:
        """Return all folders with a checkpoint's name, oldest first."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted(Folder(int(match[1]), int(match[2]), self.path / match[0]) for match in matches)

    def found(self) -> list[Folder]:
        """Return the complete checkpoints, oldest first."""
        return [folder for folder in self.entries() if folder.is_complete]

    def read(self) -> Found:
        """Read the descriptions of all checkpoints."""
        found = Found({}, [], set(), [])
        try:
            left = [match for name in os.listdir(self.path) if (match := _LEFT.fullmatch(name))]
        except OSError as error:
            return found._replace(unknown=[f"{self.path} cannot be read ({error.strerror})"])
        found.leftovers.extend(self.path / match[0] for match in left)
        for folder in self.entries():
            path = folder.path
            try:
                if not folder.is_complete:
                    raise UnknownCheckpoint(f"{path} has no {MANIFEST}: copy all of it there, or remove it")
                if path not in self._manifests:
                    self._manifests[path] = Manifest.read(open_folder(path))
                found.manifests[path] = self._manifests[path]
            except (UnknownCheckpoint, MemoryError) as error:
                found.unknown.append(str(error) or f"{path} does not fit in memory")
            except CheckpointError as error:
                _log.warning("%s", error)
        found.gone.update({match[1] for match in left if match[1]} - {each.token for each in found.manifests.values()})
        return found

    def choose(self, step: int | None) -> Folder:
        """Return the newest checkpoint, or the newest of a step.

        Raises:
            CheckpointError: it does not exist.
        """
        while True:
            entries = self.entries()
            found = [folder for folder in entries if folder.is_complete]
            chosen = [folder for folder in found if step in (None, folder.step)]
            if chosen or all(os.path.lexists(folder.path) for folder in entries):  # none was removed meanwhile
                break
        if not chosen:
            steps = ", ".join(str(folder.step) for folder in found)
            there = f"where there are checkpoints of steps {steps}" if steps else "where there is no checkpoint"
            which = "" if step is None else f" and step is {step}"
            raise CheckpointError(
                f"path is {str(self.path)!r}{which}, {there}; give the path that save_checkpoint was given"
            )
        return chosen[-1]

    @contextmanager
    def writing(self, number: int, step: int, token: str) -> Iterator[Path]:
        """Yield an empty folder that becomes a checkpoint, complete and durable, if the block ends without an error.

        The lock of :meth:`locked` is held.

        Raises:
            TableFullError: the disk has no room. The existing checkpoints stay.
        """
        with self.joining(token) as unfinished:
            try:
                os.mkdir(unfinished)
                sync_names(self.path)
                yield unfinished
                sync_names(unfinished)
                os.rename(unfinished, self.path / self.name(number, step))
                sync_names(self.path)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise

    @contextmanager
    def joining(self, token: str) -> Iterator[Path]:
        """Yield the folder that the first rank fills in :meth:`writing`, for another rank to add files to.

        Raises:
            TableFullError: the disk has no room.
        """
        unfinished = self.path / f".unfinished-{token}"
        outcome = "earlier checkpoints are intact: free space there, or give another path"
        with says_if_full(unfinished.parent, outcome):
            yield unfinished

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; create the directory if needed.

        Raises:
            CheckpointError: another process holds it.
            FileExistsError: it is a table's directory, or inside one.
        """
        refuse_within_table(self.path / MANIFEST)
        missing = [each for each in (self.path, *self.path.parents) if not each.is_dir()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_names(each.parent)
        busy = f"path is {str(self.path)!r}, where another process or thread is saving a checkpoint"
        error = CheckpointError(f"{busy}; give each a separate path")
        # Closed and unlocked wherever Ctrl-C strikes.
        with closing(OpenDirectory(self.path)) as directory, locked(directory, error):
            yield

    def remove(self) -> None:
        """Remove all checkpoints, the leftovers of killed processes, and the directory if it has no other files.

        Raises:
            CheckpointError: another process is saving there.
        """
        if not self.path.is_dir():
            return
        with self.locked():
            for folder in self.found():
                self._set_aside(folder.path)
            _clear(self.read().leftovers)
        with suppress(OSError):  # it has other files
            self.path.rmdir()

    def tidy(self, task: Task, tables: Sequence[Table], keep: int | Collection[int] | None, saved: str = "") -> Found:
        """Remove leftovers and checkpoints outside ``keep``, and release their commits; return the other checkpoints.

        Args:
            task: the ranks' common task; all of them call this, and the first holds the directory's lock.
            tables: this rank's tables.
            keep: as for :func:`save_checkpoint`.
            saved: the token of the newest checkpoint, if all of it has just been read. Before a save, checkpoints left
                by a killed process are removed only if this process has loaded or saved the newest.
        """
        found = self.read()
        if task.lane.rank == 0:
            for leftover in () if saved else self._unneeded(found.leftovers, tables):
                _log.warning("%s was left behind by a process that was killed, or by another, and is removed", leftover)
            for path in self._beyond(found, keep, saved):
                # A folder with links was set aside and may need its commits: without its token it is not known to be
                # gone.
                has_links = path.is_symlink() or os.lstat(path / MANIFEST).st_nlink > 1
                is_known = path in found.manifests and not has_links
                self._set_aside(path, found.manifests[path].token if is_known else "")
        task.round()
        found = self.read()
        for table in tables:
            release(table, found, warns=bool(saved))
        task.round()
        if task.lane.rank == 0:
            unneeded = self._unneeded(found.leftovers, tables)
            _clear(unneeded)
            for path in {*found.leftovers} & self._manifests.keys() - {*unneeded}:  # only its description is needed
                _clear(each for each in path.iterdir() if each.name != MANIFEST)
        return found

    def _beyond(self, found: Found, keep: int | Collection[int] | None, saved: str) -> list[Path]:
        """Return the folders to remove; none unless all that stay are proven good."""
        newest_first = self.entries()[::-1]
        is_due = saved or (newest_first and newest_first[0].path == found.folder_of(Folders.known_sound))
        if keep is None or not is_due or len(newest_first) <= (keep if isinstance(keep, int) else 1):
            return []
        kept, beyond = list[int](), list[Path]()
        try:
            if found.unknown:
                raise UnknownCheckpoint("; ".join(found.unknown))
            for folder in newest_first:
                if isinstance(keep, int):
                    is_kept = len(kept) < keep
                else:
                    is_kept = not kept or (folder.step in keep and folder.step not in kept)
                if not is_kept:
                    beyond.append(folder.path)
                elif folder.path == found.folder_of(saved) or self._is_good(folder.path, found):
                    kept.append(folder.step)
        except (UnknownCheckpoint, MemoryError) as error:
            _log.warning("no checkpoint in %s is removed: %s", self.path, error or "they do not fit in memory")
            return []
        return beyond

    def _is_good(self, path: Path, found: Found) -> bool:
        """Return whether all of a checkpoint reads back well; log why if not.

        Rows that it references in a table on disk are not read: they belong to the table.

        Raises:
            UnknownCheckpoint, MemoryError: it cannot be read now.
        """
        if path not in found.manifests:
            return False
        try:
            manifest, files = found.manifests[path], TensorsOf(open_folder(path), self.sound)
            files.check(manifest.tensors.values())
            for part in (part for table in manifest.tables for part in table.parts):
                verify_part(part, files, manifest.token)
        except UnknownCheckpoint:
            raise
        except CheckpointError as error:
            _log.warning("%s is not one of the checkpoints to keep: %s", path, error)
            return False
        return True

    def _set_aside(self, folder: Path, token: str = "") -> None:
        """Rename a checkpoint away durably, so a half-removed folder never has a checkpoint's name."""
        aside = self.path / f".removed-{token or secrets.token_hex(16)}"
        os.rename(folder, aside)
        if folder in self._manifests:
            self._manifests[aside] = self._manifests.pop(folder)
        sync_names(self.path)

    def _unneeded(self, leftovers: Iterable[Path], tables: Iterable[Table]) -> list[Path]:
        """Return those without references to other tables, which will look here for proof that a checkpoint is gone."""
        own = {Path(os.path.realpath(up)) for each in tables if each.path for up in (each.path, each.path.parent)}
        unneeded = []
        for folder in leftovers:
            others = set[Path]()
            try:
                with says_malformed(folder, "its description"):
                    if folder not in self._manifests:
                        self._manifests[folder] = Manifest.read(OpenDirectory(folder, follow=False))
                    for table in self._manifests[folder].tables:
                        paths = (path_in(folder, part.path) for part in table.parts if part.path)
                        others.update(Path(os.path.realpath(path.parent if table.shards else path)) for path in paths)
            except UnknownCheckpoint:
                continue  # perhaps it can be read later
            except CheckpointError:
                pass  # what was read until then still counts
            if not any(path.exists() for path in others - own):
                unneeded.append(folder)
        return unneeded


def _clear(leftovers: Iterable[Path]) -> None:
    for path in leftovers:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:  # the link itself, not its target
                path.unlink()
        except OSError as error:  # the next save tries again
            _log.warning("%s cannot be removed (%s), and stays; remove it by hand", path, error)


def release(table: Table, here: Found, after: int = 0, *, warns: bool = False) -> bool:
    """Release commits of a table on disk whose checkpoints are proven not to exist.

    Args:
        table: the table.
        here: the checkpoints in this directory; others are looked up where they were saved.
        after: keep this commit and earlier ones.
        warns: True to log why commits stay.

    Returns:
        True if later commits stay.
    """
    commits = table.commits
    if commits is None or not any(commit > after for commit in commits.held):
        return False
    table.flush()
    for commit in commits.held:
        attributes = commits.attributes_of(commit)
        token, keeper = attributes.get(CHECKPOINT), attributes.get(CHECKPOINT_FOLDER)
        if commit <= after or not (table.path and isinstance(token, str) and isinstance(keeper, str)):
            continue
        directory, name = os.path.split(table.path / keeper)
        where = Path(os.path.realpath(directory), name)
        there = here if token in here.gone or here.folder_of(token) else Folders(where.parent).read()
        if token in there.gone:
            commits.let_go(commit)
        elif warns and there.folder_of(token) is None:
            _log.warning(
                "commit %d of table %r stays, for a checkpoint that may exist: %s. Correct that, or release the "
                "commit with table.commits.let_go(%d); until then, some checkpoints copy the table. To move or copy "
                "folders away, save them with tables='copy'",
                *(commit, table.name, "; ".join(there.unknown) or f"{where} was moved or removed by hand", commit),
            )
    return any(commit > after for commit in commits.held)


def verify_part(part: SavedTable, files: TensorsOf, token: str) -> None:
    """Read a table's copy and changed rows, or open it at the commit that a checkpoint references.

    Args:
        part: the table's description.
        files, token: the checkpoint's.

    Raises:
        CheckpointError: it is damaged or unknown.
    """
    which: object = None
    if part.copy:
        path = _copy_of(part, files.folder)
        with says_malformed(files.folder, "its rows", part.copy):
            copy = OpenDirectory(path, follow=False)
            names = {*copy.names()}.difference(_NOT_LINKED)
            which = tuple(sorted(identity(os.stat(each, dir_fd=copy.fd, follow_symlinks=False)) for each in names))
    if which not in files.sound:
        table = open_part(part, files.folder, token)
        if part.copy:
            verify_rows(table, files.folder)
            files.sound.add(which)
        table.close()
    for delta in part.deltas:
        files.check(delta.tensors)


def _copy_of(part: SavedTable, folder: Path) -> Path:
    """Return the path of a table's copy in a checkpoint's folder.

    Raises:
        UnknownCheckpoint: it is behind a link.
    """
    path = folder / part.copy
    if path.is_symlink() or (path.parent.is_symlink() and path.parent != folder):
        raise UnknownCheckpoint(
            f"checkpoint {folder} cannot be read, but may be good: {path} is a symbolic link, which is not "
            "followed; put the folder itself there"
        )
    return path


def open_part(part: SavedTable, folder: Path, token: str) -> Table:
    """Open the table with the rows of a checkpoint's table or of one rank's part; a copy bypasses the page cache.

    Args:
        part: its description.
        folder, token: the checkpoint's.

    Raises:
        CheckpointError: it is damaged or unknown.
    """
    path = _copy_of(part, folder) if part.copy else path_in(folder, part.path)
    if not part.copy and not os.path.exists(path):
        which = f"table {part.name!r}" if part.name else "the table"
        raise UnknownCheckpoint(
            f"checkpoint {folder} refers to {which} at {os.path.normpath(path)}, which is not there; put the table's "
            "directory back there"
        )
    with says_malformed(folder, "its rows", part.copy or str(path)):
        if part.copy:
            files = OpenDirectory(path)
            for name in filter(files.is_regular, files.names()):
                OpenFile(files.open(name)).forget_cached()
        try:
            table = Table.open(path, mode="r", commit=None if part.copy else part.commit)
        except ValueError as error:
            require(
                isinstance(error, TableFormatError),
                f"the table at {path} no longer keeps commit {part.commit}, as if its checkpoint was removed; this may "
                "be a copy of that one: save checkpoints to be copied with tables='copy'",
            )
            raise
        is_same = part.copy or table.attributes.get(CHECKPOINT) == token
        require(bool(is_same), f"commit {part.commit} of the table at {path} is not that of this checkpoint")
    return table


def verify_rows(table: Table, folder: Path) -> None:
    """Read every row of a checkpoint's table.

    Raises:
        CheckpointError: one is damaged or unknown.
    """
    assert table.store.files is not None
    with says_malformed(folder, "its rows", str(table.path)):
        table.store.files.verify(lambda rows: None, strict=True)


def path_from(here: Path, there: Path, above: Path) -> str:
    """Return a path, relative if both are in the common directory without links in between, so both move together.

    Args:
        here: the path to be relative to.
        there: the target.
        above: the common directory.
    """
    near = os.path.relpath(there, here)
    moves = here.is_relative_to(above) and there.is_relative_to(above)
    return near if moves and os.path.realpath(here / near) == os.path.realpath(there) else str(there)


def path_in(folder: Path, path: str) -> Path:
    """Return the path of a table that a checkpoint references.

    Args:
        folder: the checkpoint's, or a link to it.
        path: the path stored in the checkpoint.
    """
    near = folder.parent / path
    return near if near.exists() else Path(os.path.realpath(folder)).parent / path
