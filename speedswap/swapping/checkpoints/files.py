"""The files of one checkpoint: written, or linked from the previous checkpoint, and read back."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.format import (
    Manifest,
    SavedTensor,
    damaged,
    decode,
    says_malformed,
)
from speedswap.tables import Table
from speedswap.tables.files.damage import require
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, sync_names
from speedswap.tables.files.tensor_file import TensorReader, TensorWriter

_PIECE_BYTES = 8 << 20
_NOT_LINKED = ("LOCK", "OWNER")  # of the process that wrote a table
_log = logging.getLogger("speedswap")


def new_digest(dtype: torch.dtype, shape: Sequence[int]) -> hashlib.blake2b:
    """Return the hash of a tensor, to which its bytes are still to be added."""
    return hashlib.blake2b(f"{dtype} {tuple(shape)}".encode(), digest_size=16)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in ordinary memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def digest_of(tensor: Tensor) -> str:
    """Return a hash of a contiguous tensor in ordinary memory: of its dtype, shape and bytes."""
    digest = new_digest(tensor.dtype, tensor.shape)
    digest.update(raw(tensor))
    return digest.hexdigest()


def _packed(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of its shape; torch considers one item contiguous with any strides."""
    return tensor.contiguous() if tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)


class NewFiles:
    """A checkpoint's folder while it is being filled.

    Args:
        folder: an empty folder.

    Attributes:
        bytes_written: bytes written so far, without linked files.
        new: the files and tables' copies that were written, which are still to be verified.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = OpenDirectory(folder)
        self.bytes_written = 0
        self.new: set[str] = set()

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to a new file, durably."""
        shapes = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        with self.new_tensors(name, shapes) as writer:
            for key, tensor in tensors.items():
                writer.write(key, tensor)

    def write_changed(
        self, name: str, tensors: Mapping[str, Tensor], previous: tuple[Manifest, Path] | None
    ) -> dict[str, SavedTensor]:
        """Write tensors that the previous checkpoint lacks to a new file, durably, and link the others' files.

        Args:
            name: name of the new file.
            tensors: tensors by name, on any device.
            previous: the previous checkpoint, and its folder.

        Returns:
            The location of every tensor.
        """
        host = {key: _packed(tensor.cpu()) for key, tensor in tensors.items()}
        digests = {key: digest_of(tensor) for key, tensor in host.items()}
        there = {each.digest: each for each in previous[0].tensors.values()} if previous is not None else {}
        used: Counter[str] = Counter()
        for key, tensor in host.items():
            if digests[key] in there:
                used[there[digests[key]].file] += tensor.nbytes
        if previous is not None:
            # A file of mostly outdated values is dropped; the contents of a lost file are written again.
            sizes = {file: path.stat().st_size for file in used if (path := previous[1] / file).is_file()}
            there = {key: each for key, each in there.items() if 2 * used[each.file] >= sizes.get(each.file, math.inf)}
            used_in = {there[digest] for digest in digests.values() if digest in there}
            for file in {each.file for each in used_in}:
                same = [each for each in used_in if each.file == file]
                if not self.link(previous[1], [file], partial(TensorsOf.check, tensors=same)):
                    there = {key: each for key, each in there.items() if each.file != file}
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
        self.new.add(name)

    def link(self, other: Path, names: Sequence[str], verify: Callable[[TensorsOf], None]) -> bool:
        """Hard-link files, or folders of files, of another checkpoint into this one, or copy them, and read them back.

        Args:
            other: the other checkpoint.
            names: the names of the files and folders.
            verify: raises if what was read back is damaged.

        Returns:
            False if they cannot be read as they were written, so that they must be written again.
        """
        try:
            for name in names:
                self._link_all(other / name, self.folder / name)
            verify(TensorsOf(self.directory))
            return True
        except (CheckpointError, OSError) as error:
            _log.warning("%s is written again, not taken from the last checkpoint: %s", ", ".join(names), error)
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)  # if it is a folder
                self.directory.remove(name)
            return False

    def _link_all(self, source: Path, target: Path) -> None:
        if not source.is_dir():
            self._link(source, target)
            return
        target.parent.mkdir(exist_ok=True)  # of all ranks' rows
        os.mkdir(target)
        for path in source.iterdir():
            if path.name not in _NOT_LINKED:
                self._link(path, target / path.name)
        sync_names(target)
        sync_names(target.parent)

    def _link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:  # another rank also refers to it
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
        self.new.add(name)


class TensorsOf:
    """The tensors in the files of a checkpoint, each checked against its hash.

    Args:
        directory: the checkpoint's directory.

    Attributes:
        folder: its path.
    """

    def __init__(self, directory: OpenDirectory) -> None:
        self._directory = directory
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
        """Yield some rows after the other of tensors that have equally many.

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
        for saved in tensors:
            reader = self._reader_of(saved)
            reader.file.forget_cached()
            digest = new_digest(reader.places[saved.key].dtype, reader.places[saved.key].shape)
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
            raise damaged(self.folder, f"the bytes of {saved.key!r} in {saved.file} are not those that were written")


def decoded(manifest: Manifest, files: TensorsOf, parts: Sequence[str]) -> dict[str, Any]:
    """Return parts of the checkpoint's data.

    Raises:
        CheckpointError: it is damaged.
    """
    with says_malformed(files.folder, "its content"):
        content = {
            part: decode(manifest.content[part], lambda name: files.read(manifest.tensors[name])) for part in parts
        }
        for each in content.get("optimizers", []):
            is_whole = isinstance(each["class"], str) and {"state", "param_groups"} <= each["state"].keys()
            require(is_whole, "an optimizer's state is missing")
        require(isinstance(content.get("model", {}), dict), "the model's state is missing")
    return content
