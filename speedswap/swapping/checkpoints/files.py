"""The files of one checkpoint: tensors, each with its hash, and copies of tables; written, linked, and read back.

Everything that is read is compared with its hash or checksums: what differs is damaged. What cannot be read now is
unknown (:class:`UnknownCheckpoint`): a disk or network that fails, missing permissions, something that was moved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.checkpoints.format import (
    Manifest,
    SavedTable,
    SavedTensor,
    UnknownCheckpoint,
    damaged,
    says_malformed,
)
from speedswap.tables import Disk, Table
from speedswap.tables.files.damage import require
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, identity, sync_names
from speedswap.tables.files.tensor_files import TensorReader, TensorWriter
from speedswap.tables.init import OfTensors
from speedswap.tables.store import CHECKPOINT

_log = logging.getLogger("speedswap")
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 8
_NOT_LINKED = ("LOCK", "OWNER")  # these belong to the process that wrote a table


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


def open_folder(path: Path) -> OpenDirectory:
    """Open a checkpoint's folder.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """
    with says_malformed(path, "its folder", ""):
        return OpenDirectory(path)


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
        table = open_part(part, files.folder, token, {})
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


def open_part(part: SavedTable, folder: Path, token: str, bases: Mapping[str, OfTensors]) -> Table:
    """Open the table with the rows of a checkpoint's table or of one rank's part; a copy bypasses the page cache.

    Args:
        part: its description.
        folder, token: the checkpoint's.
        bases: those that may have been moved since, by fingerprint.

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
            table = Table(Disk(path).open("r", None if part.copy else part.commit, bases))
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
