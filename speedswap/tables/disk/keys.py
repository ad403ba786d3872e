"""The id maps of a table in a log: files of pieces, to which each commit adds what has changed."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.keys_file import PIECE_BYTES, SavedMap, decode, encode, pieces
from speedswap.tables.files.log_manifest import KeyFiles, names_of
from speedswap.tables.files.open_directory import OpenFile, says_if_full
from speedswap.tables.id_map import IdMap
from speedswap.tables.key_parts import Sweep, assembled

__all__ = ["NOTHING", "LogKeys", "Saving"]

_MOST_FILES = 16
_LEAST_OPEN, _OPEN_SHARE = 64, 8  # files that a commit leaves to the background: it holds them open
_MOST_AHEAD = 2**20  # bytes of room that a file gets beyond its present end, so that not every step asks for some

NOTHING = torch.empty(0, dtype=torch.uint8)
"""The bytes of a write that only syncs."""


class _Saved(NamedTuple):
    """A map as its files have it.

    Attributes:
        version: of the map.
        sweep: its state.
        file: the name of the last file, if this process appends to it.
        room: the bytes that are allocated for it.
        first: the place of the file in which the sweep began, among the map's files.
    """

    version: int
    sweep: Sweep
    file: str | None = None
    room: int = 0
    first: int = 0


class Saving(NamedTuple):
    """The part of the maps that a commit saves.

    Attributes:
        files: of all maps.
        writes: to files: the first byte, and the bytes, uint8; none to sync a file alone, as the directory.
    """

    files: dict[str, KeyFiles]
    writes: list[tuple[OpenFile, int, Tensor]]
    saved: dict[str, _Saved]


class LogKeys:
    """The id maps of one store in their files.

    A piece is never written over while a commit may name it: a file that was found is not appended to.

    Args:
        directory: the table's.
        id_maps: by name.

    Attributes:
        files: of each map, with the bytes of each file that count, as the last commit names them.
    """

    def __init__(self, directory: TableDirectory, id_maps: dict[str, IdMap]) -> None:
        self._directory = directory
        self._id_maps = id_maps
        self.files: dict[str, KeyFiles] = {}
        self._read: dict[str, KeyFiles] = {}
        self._saved: dict[str, _Saved] = {}

    @property
    def names(self) -> set[str]:
        """The names of all files."""
        return names_of(self.files)

    # ------------------------------------------------------------------ reading

    def read(self, num_embeddings: int, *, frozen: bool) -> None:
        """Read the id maps from their files, unless that was done.

        Raises:
            TableFormatError: one is missing or damaged, or of another number of rows.
        """
        for name, files in self.files.items():
            if self._read.get(name) == files:
                continue
            what = f"{self._directory.path / files[-1][0]}"
            found = IdMap.of_saved(self._read_files(files), frozen=frozen, what=what)
            if found.part is None and found.num_rows > num_embeddings:
                raise TableFormatError(
                    f"{what} is damaged: it has rows 0 to {found.capacity}, but the table {num_embeddings} rows"
                )
            if name in self._id_maps:  # modules have this one
                self._id_maps[name].become(found)
            else:
                self._id_maps[name] = found
            self._read[name] = files
            self._saved[name] = _Saved(self._id_maps[name].version, self._id_maps[name].state)

    def forget_files(self) -> None:
        """Note that other files may have the names of those that were read."""
        self._read.clear()

    def keep_own(self) -> None:
        """Note that the maps are as their files have them, where they have not changed since the last commit."""
        own = {name for name, id_map in self._id_maps.items() if self._is_saved(name, id_map)}
        self._read = {name: files for name, files in self.files.items() if name in own}

    def _read_files(self, files: KeyFiles) -> SavedMap:
        found, what = [], ""
        for file, nbytes in files:
            what, raw = f"{self._directory.path / file}", self._directory.read_keys(file)
            if nbytes is None:  # of earlier versions: a map as a whole
                found.append(decode(raw, what))
            elif nbytes <= len(raw):
                found += pieces(raw[:nbytes], what)
            else:
                raise TableFormatError(
                    f"{what} is damaged: it has {len(raw)} bytes, not the {nbytes} that count; restore it from a copy"
                )
        return assembled(found, what)

    # ------------------------------------------------------------------ saving

    def differ(self) -> None:
        """Note that the maps are not those of the files, and are saved as a whole with the next commit."""
        self._saved.clear()

    @property
    def have_changed(self) -> bool:
        """True if a map is not as its files have it."""
        return any(not self._is_saved(name, id_map) for name, id_map in self._id_maps.items())

    def _is_saved(self, name: str, id_map: IdMap) -> bool:
        return name in self._saved and self._saved[name].version == id_map.version

    def begin(self, *, nothing: bool = False) -> Saving:
        """Return what the next commit has to write; :meth:`accept` says that it has begun.

        Args:
            nothing: True for a table without commits.

        Raises:
            TableFullError: the disk has no room for it.
        """
        saving = Saving(dict(self.files), [], dict(self._saved))
        for name, id_map in self._id_maps.items():
            if not nothing and not self._is_saved(name, id_map):
                self._add(saving, name, id_map)
        return saving

    def accept(self, saving: Saving) -> None:
        """Note that a commit has begun, which writes this."""
        self.files, self._saved = saving.files, saving.saved

    def _add(self, saving: Saving, name: str, id_map: IdMap) -> None:
        before, files, version = self._saved.get(name), self.files.get(name, ()), id_map.version
        piece, sweep = id_map.changes(None if before is None or len(files) >= _MOST_FILES else before.sweep)
        raw = encode(piece, PIECE_BYTES)
        if piece.cells is None:
            before, files = None, ()
        if before is None or before.file is None:
            (new, file), begin, room, first = self.new_file(saving), 0, 0, len(files)
            files = (*files, (new, 0))
        else:
            file, begin = self._directory.open_keys(before.file), files[-1][1] or 0
            room, first = before.room, before.first
        end = begin + len(raw)
        with says_if_full(self._directory.files.path / files[-1][0]):
            if end > room:
                room = end + min(begin, _MOST_AHEAD)
                os.posix_fallocate(file.fd, begin, room - begin)
            if len(saving.writes) < _most_open():
                saving.writes.append((file, begin, raw))
            else:
                _write(file, begin, raw)
        files = (*files[:-1], (files[-1][0], end))
        if sweep.is_complete:
            saving.files[name] = files[first:]
            saving.saved[name] = _Saved(version, sweep)
        else:
            saving.files[name] = files
            saving.saved[name] = _Saved(version, sweep, files[-1][0], room, first)

    def new_file(self, saving: Saving) -> tuple[str, OpenFile]:
        """Make a file whose name is durable before the commit; return the name and the file."""
        if all(file is not self._directory.files for file, _, _ in saving.writes):
            saving.writes.append((self._directory.files, 0, NOTHING))
        return self._directory.create_keys()


def _most_open() -> int:
    """Return the files that the background may hold open: a share of what the process may."""
    return max(_LEAST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)


def _write(file: OpenFile, begin: int, raw: Tensor) -> None:
    """Write bytes to a file, durably, and close it."""
    rest = raw.numpy().data
    while rest:
        written = os.pwrite(file.fd, rest, begin)
        rest, begin = rest[written:], begin + written
    os.fsync(file.fd)
    file.close()
