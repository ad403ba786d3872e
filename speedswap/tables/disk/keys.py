"""The id maps of a table in a log: files of pieces, to which each commit appends the changes."""

from __future__ import annotations

import json
import os
import resource
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.files.damage import ints, is_int, require, says_damaged
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.keys_file import PIECE_BYTES, SavedMap, Sweep, assembled, encode, pieces
from speedswap.tables.files.manifest import MAX_BYTES, is_keys_name
from speedswap.tables.files.open_directory import OpenFile, says_if_full, write_all
from speedswap.tables.id_map import IdMap

HEAD_BYTES = 65_000  # a longer commit head goes to a file that it names


KeyFiles = tuple[tuple[str, int], ...]
"""The files of an id map, and the bytes of each that count."""


def names_of(id_maps: dict[str, KeyFiles]) -> set[str]:
    """Return the names of the files of some id maps."""
    return {file for files in id_maps.values() for file, _ in files}


def _id_maps(found: Any) -> dict[str, KeyFiles]:
    """Check the files of id maps."""
    problem = f"its id maps are {found!r}"
    require(isinstance(found, dict) and all(isinstance(files, list) and files for files in found.values()), problem)
    pairs = [pair for files in found.values() for pair in files]
    require(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs), problem)
    require(all(is_keys_name(file) and is_int(nbytes, 1, 2**62) for file, nbytes in pairs), problem)
    require(len({file for file, _ in pairs}) == len(pairs), problem)
    return {name: tuple((file, nbytes) for file, nbytes in files) for name, files in found.items()}


@dataclass(frozen=True)
class LogHead:
    """The part of a table, other than its rows, that changes with every commit.

    Attributes:
        layout: the number of the newest layout.
        writes: the number of scatters so far.
        attributes: plain data kept with the rows.
        id_maps: files of the id maps, by name.
    """

    layout: int
    writes: int
    attributes: dict[str, Any]
    id_maps: dict[str, KeyFiles]

    def encode(self, table: str) -> bytes:
        """Return the head as JSON.

        Raises:
            TypeError, ValueError: the attributes are not plain data, or too long.
        """
        body = json.dumps(vars(self)).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(
                f"the attributes and id maps of table {table!r} take {len(body)} bytes as JSON, but a commit holds "
                f"{MAX_BYTES}; keep large attributes elsewhere"
            )
        return body

    @staticmethod
    def elsewhere(file: str, body: bytes) -> bytes:
        """Return the log's reference to a head that is in a file."""
        return json.dumps({"file": file, "crc32": zlib.crc32(body)}).encode()


def read_head(body: bytes, table: str, read: Callable[[str], bytes]) -> tuple[LogHead, set[str]]:
    """Return a commit's head, and the names of all files that the commit needs in addition to the log.

    Args:
        body: the head as stored in the log.
        table: the table's name, for messages.
        read: returns the content of a file of the table.

    Raises:
        TableFormatError: it is damaged.
    """
    names = set[str]()
    if body.startswith(b'{"file": '):
        with says_damaged(f"the HEAD of table {table!r}"):
            entry = json.loads(body)
            require(is_keys_name(entry["file"]) and is_int(entry["crc32"], 0, 2**32 - 1), f"it is in {entry!r}")
        body = read(entry["file"])
        with says_damaged(f"the HEAD of table {table!r}, {entry['file']},", "; restore it from a copy"):
            require(entry["crc32"] == zlib.crc32(body), "its checksum is wrong")
        names.add(entry["file"])
    with says_damaged(f"the HEAD of table {table!r}"):
        require(len(body) <= MAX_BYTES, f"it has {len(body)} bytes")
        data = json.loads(body)
        require(isinstance(data["attributes"], dict), "it has no attributes")
        layout, writes = ints(data, layout=(0, 2**31), writes=(0, 2**62))
        head = LogHead(layout, writes, data["attributes"], _id_maps(data["id_maps"]))
    return head, names | names_of(head.id_maps)


_MOST_FILES = 16
_LEAST_OPEN, _OPEN_SHARE = 64, 8  # files that a commit leaves open for the background thread; of the process's limit
_MOST_AHEAD = 2**20  # bytes allocated beyond a file's end, so that not every step has to allocate

NOTHING = torch.empty(0, dtype=torch.uint8)
"""The bytes of a write that only syncs."""


class _KeysInFiles(NamedTuple):
    """A map as stored in its files.

    Attributes:
        version: the map's version.
        sweep: its state.
        file: the name of the last file, if this process appends to it.
        room: bytes allocated for that file.
        first: the index, among the map's files, of the one in which the sweep began.
    """

    version: int
    sweep: Sweep
    file: str | None = None
    room: int = 0
    first: int = 0


class KeysToSave(NamedTuple):
    """The part of the maps that a commit saves.

    Attributes:
        files: the files of all maps.
        writes: for each file, the offset and the bytes, uint8; no bytes for a file (or the directory) that is only
            synced.
    """

    files: dict[str, KeyFiles]
    writes: list[tuple[OpenFile, int, Tensor]]
    saved: dict[str, _KeysInFiles]


class LogKeys:
    """The id maps of one store in their files.

    A piece is never overwritten while a commit may name it: files that existed at opening are not appended to.

    Args:
        directory: the table's.
        id_maps: by name.

    Attributes:
        files: each map's files with their valid lengths in bytes, as the last commit names them.
    """

    def __init__(self, directory: TableDirectory, id_maps: dict[str, IdMap]) -> None:
        self._directory = directory
        self._id_maps = id_maps
        self.files: dict[str, KeyFiles] = {}
        self._read: dict[str, KeyFiles] = {}
        self._saved: dict[str, _KeysInFiles] = {}

    @property
    def names(self) -> set[str]:
        """The names of all files."""
        return names_of(self.files)

    # ------------------------------------------------------------------ reading

    def read(self, num_embeddings: int, *, frozen: bool) -> None:
        """Read the id maps from their files, unless they have been read.

        Raises:
            TableFormatError: one is missing or damaged, or has a different number of rows.
        """
        for name, files in self.files.items():
            if self._read.get(name) == files:
                continue
            what = f"{self._directory.path / files[-1][0]}"
            found = IdMap.of_saved(self._read_files(files), frozen=frozen, what=what)
            with says_damaged(what):
                fits = found.part is not None or found.num_rows <= num_embeddings
                require(fits, f"it has rows 0 to {found.capacity}, but the table {num_embeddings} rows")
            if name in self._id_maps:  # modules hold this object
                self._id_maps[name].become(found)
            else:
                self._id_maps[name] = found
            self._read[name] = files
            self._saved[name] = _KeysInFiles(self._id_maps[name].version, self._id_maps[name].state)

    def forget_files(self) -> None:
        """Forget the files that were read: others may have taken their names."""
        self._read.clear()

    def keep_own(self) -> None:
        """Record that maps match their files, if they have not changed since the last commit."""
        own = {name for name, id_map in self._id_maps.items() if self._is_saved(name, id_map)}
        self._read = {name: files for name, files in self.files.items() if name in own}

    def _read_files(self, files: KeyFiles) -> SavedMap:
        found, what = [], ""
        for file, nbytes in files:
            what, raw = f"{self._directory.path / file}", self._directory.read_keys(file)
            with says_damaged(what, "; restore it from a copy"):
                require(nbytes <= len(raw), f"it has {len(raw)} bytes, not the {nbytes} that count")
            found += pieces(raw[:nbytes], what)
        return assembled(found, what)

    # ------------------------------------------------------------------ saving

    def differ(self) -> None:
        """Record that the maps differ from the files, so that the next commit saves them as a whole."""
        self._saved.clear()

    @property
    def have_changed(self) -> bool:
        """True if a map differs from its files."""
        return any(not self._is_saved(name, id_map) for name, id_map in self._id_maps.items())

    def _is_saved(self, name: str, id_map: IdMap) -> bool:
        return name in self._saved and self._saved[name].version == id_map.version

    def begin(self, *, nothing: bool = False) -> KeysToSave:
        """Return what the next commit has to write; :meth:`accept` must be called once it has begun.

        Args:
            nothing: True for a table without commits.

        Raises:
            TableFullError: the disk has no room for it.
        """
        saving = KeysToSave(dict(self.files), [], dict(self._saved))
        for name, id_map in self._id_maps.items():
            if not nothing and not self._is_saved(name, id_map):
                self._add(saving, name, id_map)
        return saving

    def accept(self, saving: KeysToSave) -> None:
        """Record that a commit that writes this has begun."""
        self.files, self._saved = saving.files, saving.saved

    def _add(self, saving: KeysToSave, name: str, id_map: IdMap) -> None:
        before, files, version = self._saved.get(name), self.files.get(name, ()), id_map.version
        piece, sweep = id_map.changes(None if before is None or len(files) >= _MOST_FILES else before.sweep)
        raw = encode(piece, PIECE_BYTES)
        if piece.cells is None:
            before, files = None, ()
        if before is None or before.file is None:
            (new, file), begin, room, first = self.new_file(saving), 0, 0, len(files)
            files = (*files, (new, 0))
        else:
            file, begin = self._directory.open_keys(before.file), files[-1][1]
            room, first = before.room, before.first
        end = begin + len(raw)
        with says_if_full(self._directory.files.path):
            if end > room:
                room = end + min(begin, _MOST_AHEAD)
                kernels.allocate(file.fd, begin, room - begin)
            share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE
            if len(saving.writes) < max(_LEAST_OPEN, share):
                saving.writes.append((file, begin, raw))
            else:
                write_all(file.fd, raw.numpy().data, begin)
                os.fsync(file.fd)
                file.close()
        files = (*files[:-1], (files[-1][0], end))
        saving.files[name] = files[first:] if sweep.is_complete else files
        goes_on = () if sweep.is_complete else (files[-1][0], room, first)
        saving.saved[name] = _KeysInFiles(version, sweep, *goes_on)

    def new_file(self, saving: KeysToSave) -> tuple[str, OpenFile]:
        """Create a file whose name is durable before the commit; return the name and the file."""
        if all(file is not self._directory.files for file, _, _ in saving.writes):
            saving.writes.append((self._directory.files, 0, NOTHING))
        return self._directory.create_keys()
