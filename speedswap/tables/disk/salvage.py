"""Salvage of a damaged table on disk: intact rows are saved to a new table, and losses are listed.

The log's chunks are found by a scan that trusts nothing and never stops early.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from speedswap import kernels
from speedswap.errors import TableBusyError, TableFormatError
from speedswap.tables.disk.cache import FreshRows
from speedswap.tables.disk.keys import LogHead, read_head
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.damage import bytes_left, mended_block, mended_text, require, says_damaged
from speedswap.tables.files.directory import TableDirectory, log_names
from speedswap.tables.files.keys_file import assembled, pieces_left
from speedswap.tables.files.locks import WriterLock
from speedswap.tables.files.manifest import (
    MANIFEST,
    AnyManifest,
    LogManifest,
    ShardsManifest,
    collapsed,
    moves,
    parse,
    shard_name,
)
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile
from speedswap.tables.files.place import Place, open_regular
from speedswap.tables.id_map import IdMap
from speedswap.tables.init import chunks_of
from speedswap.tables.owners import Owners
from speedswap.tables.record import is_lazy

_BLOCK, _MOST, _MOST_SEQ, _ADDRESSES = 4096, 1008, 2**62, 2**31
_HEADER = struct.Struct("<4sIQQIIIIQ")  # magic, checksum, salt, seq, layout, count, first place, segment, stamp
_COUNT_AT, _GROUPS_AT, _GROUP_BYTES = 28, 64, 4
_UNKNOWN = 2**32 - 1  # in place of a group
_PIECE = 2**20
_SAME_LIFE = 2**31  # less than a writer adds to the sequence numbers that it finds


class Chunk(NamedTuple):
    """Records that were written together.

    Attributes:
        segment, at: its segment, and its byte offset there.
        seq, layout, first, stamp: from its header, or inferred from its neighbours.
        groups: its records' groups, uint32; some may be unknown.
        committed: False if it may never have been committed.
        after: if its header is damaged, a seq that certainly precedes it; its groups may then be wrong.
    """

    segment: int
    at: int
    seq: int
    layout: int
    first: int
    stamp: int
    groups: NDArray[np.uint32]
    committed: bool = True
    after: int | None = None


class DamagedLog:
    """A log that may be damaged, open for reading.

    Args:
        manifest: the table's, up to the layout of the commit.
        fd: the file.
        last: the sequence number of the commit's last chunk; None if no commit is known.
        index: the checksum and the number of its groups.

    Attributes:
        chunks: the commit's, oldest first.
        newest: the address of each group's record; 0 for none.
        is_whole: True if these are all of the commit's records, so that only their bytes can be damaged.
    """

    def __init__(self, manifest: LogManifest, fd: int, last: int | None, index: tuple[int, int] | None) -> None:
        self.manifest = manifest
        self._fd, self._last, self._index = fd, _MOST_SEQ if last is None else last, index
        self._bytes = manifest.segment_bytes
        self.strides = [layout.stride * manifest.group_rows + 4 for layout in manifest.layouts]
        self._places = self._bytes // min(self.strides) + 1
        self._segments = min(-(-os.fstat(fd).st_size // self._bytes), _ADDRESSES // self._places)
        self.newest = np.empty(0, np.uint32)
        self.chunks, self.is_whole = self._found()

    def _found(self) -> tuple[list[Chunk], bool]:
        """Return the chunks that add up to the commit and True, or else those surely committed and False."""
        reached = [chunk for segment in range(self._segments) for chunk in self._walk(segment)[0]]
        reached.sort(key=_in_order)
        if self._adds_up(reached):
            return reached, True
        anchors = [chunk.seq for chunk in reached] + ([self._last] if self._index is not None else [])
        beyond = [self._judged(chunk, anchors) for segment in range(self._segments) for chunk in self._beyond(segment)]
        committed = [chunk for chunk in beyond if chunk.committed]
        for some in (reached + beyond, reached + committed):
            if self._adds_up(some := sorted(some, key=_in_order)):
                return some, True
        proven = [chunk if chunk.after is None else self._proven(chunk, chunk.after) for chunk in committed]
        self._adds_up(some := sorted(reached + proven, key=_in_order))
        return some, False

    # ------------------------------------------------------------------ chunks

    def _walk(self, segment: int, *, on: bool = False) -> tuple[list[Chunk], int]:
        """Return a segment's chunks up to the first damaged one (all of them with ``on``), and where they end."""
        chunks: list[Chunk] = []
        at = 0
        while at + _BLOCK < self._bytes:
            chunk = self._chunk_at(segment, at)
            if chunk is not None and (not chunks or _follows(chunk, chunks[-1])):
                if chunk.seq > self._last:
                    return chunks, at
                chunks.append(chunk)
                at = self._end(chunk)
            elif on:
                at += _BLOCK
            else:
                break
        return chunks, self._bytes

    def _beyond(self, segment: int) -> list[Chunk]:
        """Return the chunks that the walk of a segment does not reach."""
        chunks, end = self._walk(segment, on=True)
        found = chunks[len(self._walk(segment)[0]) :]
        ends: list[Chunk | None] = [None, *chunks, None]
        for before, after in pairwise(ends):
            at, until = 0 if before is None else self._end(before), end if after is None else after.at
            if at + _BLOCK < until:
                found += self._rest(segment, at, until, before, after)
        return found

    def _chunk_at(self, segment: int, at: int) -> Chunk | None:
        """Return the chunk whose header starts here, if at most one bit of the header has flipped."""
        block = self._read(segment * self._bytes + at, _BLOCK)
        salt = self.manifest.salt.to_bytes(8, "little")
        if block[:4] != b"SSWL" and block[8:16] != salt:
            return None
        mended = mended_block(block, _COUNT_AT, _GROUP_BYTES)
        if mended is None:
            return None
        magic, _, found_salt, seq, layout, count, first, number, stamp = _HEADER.unpack_from(mended)
        if (magic, found_salt, number) != (b"SSWL", self.manifest.salt, segment) or not 0 < seq <= _MOST_SEQ:
            return None
        if layout >= len(self.strides) or not 0 < count <= self._most(at, layout) or first != self._first(at, layout):
            return None
        groups = np.frombuffer(mended, "<u4", count, _GROUPS_AT).copy()
        return (
            Chunk(segment, at, seq, layout, first, stamp, groups) if groups.max() < self.manifest.num_groups else None
        )

    def _rest(self, segment: int, at: int, until: int, before: Chunk | None, after: Chunk | None) -> list[Chunk]:
        """Return what is left of a chunk whose header is damaged: records identified by their checksums.

        Args:
            segment, at: its segment, and its byte offset there.
            until: the latest byte of the segment at which it can end.
            before, after: its neighbours.
        """
        block = self._read(segment * self._bytes + at, _BLOCK)
        _, _, _, seq, layout, count, _, _, stamp = _HEADER.unpack_from(block)
        near = before or after
        if near is not None:
            layout, stamp = near.layout, near.stamp
        if layout >= len(self.strides) or self._chunk_at(segment, at) is not None:
            return []  # any layout is possible, or it is from an earlier use of the segment
        first = self._first(at, layout)
        most = min(self._most(at, layout), until // self.strides[layout] - first)
        groups = np.frombuffer(block, "<u4", max(most, 0), _GROUPS_AT).copy()
        chunk = Chunk(segment, at, seq, layout, first, stamp, groups)
        records = self.records(chunk)
        intact = self.are_intact(chunk, records)
        for bit in range(32):
            other = chunk._replace(groups=groups ^ np.uint32(1 << bit))
            fits = self.are_intact(other, records) & ~intact
            groups[fits] = other.groups[fits]
            intact |= fits
        known = groups < self.manifest.num_groups
        if not (intact & known).any():
            return []
        groups[~known] = _UNKNOWN
        end = count if 0 < count <= most else int(np.flatnonzero(intact)[-1]) + 1
        low = before.seq if before is not None else stamp - 1
        high = min(after.seq if after is not None else _MOST_SEQ, self._last + 1)
        in_order = low < seq < high
        return [chunk._replace(groups=groups[:end], seq=seq if in_order else low, committed=in_order, after=low)]

    def _proven(self, chunk: Chunk, after: int) -> Chunk:
        """Return a chunk without the groups that its records do not confirm, ordered before all that may be newer."""
        intact = self.are_intact(chunk, self.records(chunk))
        return chunk._replace(seq=after, groups=np.where(intact, chunk.groups, np.uint32(_UNKNOWN)))

    def _judged(self, chunk: Chunk, anchors: Sequence[int]) -> Chunk:
        """Return a chunk marked as committed if a later one of the same life was.

        Reachable chunks were committed, since each life makes the uncommitted rest of the previous one unreachable.
        """
        place = bisect_left(anchors, chunk.seq)
        is_sure = place < len(anchors) and anchors[place] < chunk.seq + _SAME_LIFE
        return chunk._replace(committed=chunk.committed and is_sure)

    # ------------------------------------------------------------------ geometry and bytes

    def _first(self, at: int, layout: int) -> int:
        return -(-(at + _BLOCK) // self.strides[layout])

    def _most(self, at: int, layout: int) -> int:
        places = self._bytes // self.strides[layout]
        left = places - self._first(at, layout)
        return min(left, _MOST) if left >= min(max(places // 64, 1), 16) else 0

    def _end(self, chunk: Chunk) -> int:
        return -(-(chunk.first + len(chunk.groups)) * self.strides[chunk.layout] // _BLOCK) * _BLOCK

    def records(self, chunk: Chunk) -> NDArray[np.uint8]:
        """Return a chunk's records with their checksums, shape (n, stride)."""
        stride, count = self.strides[chunk.layout], len(chunk.groups)
        data = self._read(chunk.segment * self._bytes + chunk.first * stride, count * stride)
        return np.frombuffer(data, np.uint8).reshape(count, stride)

    def are_intact(self, chunk: Chunk, records: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Compare a chunk's records with their checksums."""
        return kernels.are_intact(records, chunk.groups, self.manifest.salt, chunk.stamp)

    def _read(self, at: int, nbytes: int) -> bytes:
        return bytes_left(self._fd, at, nbytes)

    # ------------------------------------------------------------------ the index

    def addresses(self, chunk: Chunk) -> NDArray[np.uint32]:
        """Return the addresses of a chunk's records."""
        return np.arange(len(chunk.groups), dtype=np.uint32) + np.uint32(chunk.segment * self._places + chunk.first)

    def are_live(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Return which of a chunk's records are those of the index."""
        known = np.minimum(chunk.groups, self.manifest.num_groups - 1)
        return np.asarray((self.newest[known] == self.addresses(chunk)) & (chunk.groups == known))

    def _adds_up(self, chunks: Sequence[Chunk]) -> bool:
        """Build the index of some chunks; return whether it is the commit's."""
        nbytes = self.manifest.num_groups * 4
        # Unlike a NumPy array, it takes no memory for pages that are never written.
        self.newest = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint32)
        stamps = np.zeros(self._segments, np.uint64)
        total = touched = 0
        for chunk in chunks:
            stamps[chunk.segment] = chunk.stamp
            groups, last = np.unique(chunk.groups[::-1], return_index=True)
            addresses = self.addresses(chunk)[::-1][last]
            if groups[-1] == _UNKNOWN:
                groups, addresses = groups[:-1], addresses[:-1]
            former = self.newest[groups]
            known = former != 0
            total += self._sum(groups, addresses, stamps) - self._sum(groups[known], former[known], stamps)
            touched += len(groups) - int(known.sum())
            self.newest[groups] = addresses
        return (total % 2**64, touched) == self._index

    def _sum(self, groups: NDArray[np.uint32], addresses: NDArray[np.uint32], stamps: NDArray[np.uint64]) -> int:
        x = groups.astype(np.uint64) << np.uint64(32) | addresses
        x += stamps[addresses // np.uint32(self._places)] * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return int(np.add.reduce(x ^ x >> np.uint64(31)))


def _follows(chunk: Chunk, before: Chunk) -> bool:
    return (chunk.layout, chunk.stamp) == (before.layout, before.stamp) and chunk.seq > before.seq


def _in_order(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.seq, chunk.segment, chunk.at


_SLOT, _MOST_MANIFEST = 65536, 1 << 20
_SLOT_HEADER = struct.Struct("<4sIQQQQQII")  # magic, checksum, salt, commit, last, sum, touched, held, length
_PUT_BYTES = 2**24  # rows without values, per pass


@dataclass
class Salvaged:
    """The outcome of salvaging a table.

    Attributes:
        path, out: directories of the damaged and of the new table.
        rows: number of rows, the same in both.
        commit: the commit that was salvaged; None if unknown.
        older: rows saved in an older version, since the commit's is damaged.
        initial: rows reset to initial values, since no intact version is left; zeros where those cannot be computed.
        complete: True if every other row is known to be as in the commit; else chunks are lost, and any row may be
            older or have initial values.
        problems: a sentence for each other loss.
        mended: files in which a flipped bit was corrected.
    """

    path: Path
    out: Path
    rows: int = 0
    commit: int | None = None
    older: list[range] = field(default_factory=list)
    initial: list[range] = field(default_factory=list)
    complete: bool = True
    problems: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """True if nothing is lost."""
        return self.complete and not (self.older or self.initial or self.problems)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data for JSON, with ranges of rows as pairs (first, last + 1)."""
        pairs = {name: [[rows.start, rows.stop] for rows in getattr(self, name)] for name in ("older", "initial")}
        return {**vars(self), "path": str(self.path), "out": str(self.out), "whole": self.whole, **pairs}

    def lines(self) -> list[str]:
        """Return the outcome as lines of text."""
        commit = "no known commit" if self.commit is None else f"commit {self.commit}"
        others = "every row" if not (self.older or self.initial) else "every other row"
        return [
            f"saved {self.out}: {self.rows:,} rows of {commit}",
            *(f"{name}: a flipped bit was put back" for name in self.mended),
            *(f"{_shown(rows)}: an older version, since the newest is damaged" for rows in self.older),
            *(f"{_shown(rows)}: initial values, since no version is intact" for rows in self.initial),
            *self.problems,
            f"{others} is as of that commit"
            if self.complete
            else f"records are lost, and whose they were is not known: {others} may be older than that commit, or have "
            "initial values",
        ]


def _shown(rows: range) -> str:
    return f"row {rows.start}" if len(rows) == 1 else f"rows {rows.start} to {rows.stop - 1}"


def salvage(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, manifest: str | os.PathLike[str] | None = None
) -> Salvaged:
    """Save every intact row of a damaged table to a new table, and list what cannot be saved.

    Args:
        path: the damaged table's directory, which is only read.
        out: the new table's directory; it appears complete or not at all.
        manifest: if the table's MANIFEST is lost, that of a copy, or of a table created with the same arguments.

    Returns:
        The rows that differ from the commit, and everything else that is lost.

    Raises:
        FileNotFoundError: the table or its file of rows does not exist.
        FileExistsError: ``out`` exists.
        TableBusyError: a process has the table open for writing.
        TableFormatError: its MANIFEST is lost and no other was given.
        TableFullError: the disk has no room for the new table.

    Example:
        >>> import pathlib, tempfile, torch, speedswap
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with speedswap.Table.create(5, 100, path=folder / "items") as table:
        ...     table.write(0, torch.ones(5, 100))
        >>> log = bytearray((folder / "items" / "rows.log").read_bytes())
        >>> log[4096 + 1000] ^= 8
        >>> _ = (folder / "items" / "rows.log").write_bytes(log)
        >>> saved = speedswap.Table.salvage(folder / "items", folder / "saved")
        >>> saved.complete, sum(map(len, saved.initial))  # rows that have initial values again
        (True, 1)
    """
    path, out = Path(path), Path(out)
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(path)):
        raise ValueError(f"out is {str(out)!r}, inside the damaged table, which is not changed; give another place")
    found = Salvaged(path, out)
    try:
        files = OpenDirectory(Path(os.path.realpath(path)), shown=path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"path is {str(path)!r}, where there is no table") from None
    described = _manifest_of(files, manifest, found)
    found.rows = described.num_embeddings
    with TableDirectory.replacing(out, overwrite=False) as directory:
        if isinstance(described, LogManifest):
            _Damaged(files, described, found, is_given=manifest is not None).save(directory)
        else:
            _save_shards(files, described, found, directory)
    return found


def _save_shards(files: OpenDirectory, manifest: ShardsManifest, found: Salvaged, directory: TableDirectory) -> None:
    """Save the rows of every rank."""
    owners, shards, salts = Owners(manifest.num_embeddings, manifest.world_size), [], []
    for rank in range(manifest.world_size):
        name = shard_name(rank, manifest.world_size)
        own = Salvaged(found.path / name, found.out / name)
        try:
            place = OpenDirectory(Path(name), follow=False, shown=own.path, within=files)
        except OSError as error:
            raise TableFormatError(
                f"{own.path} cannot be opened ({error.strerror}), and the rows of that rank are nowhere else; salvage "
                "the other shards one by one, each to a table"
            ) from error
        described = _manifest_of(place, None, own)
        if not isinstance(described, LogManifest) or described.salt != manifest.salts[rank]:
            raise TableFormatError(f"{own.path} is another table; salvage the shards one by one, each to a table")
        shards.append(_Damaged(place, described, own))
    writes = max(shard.head.writes for shard in shards)
    for rank, shard in enumerate(shards):
        if shard.head.writes != writes:
            shard.found.problems.append(f"its rows are of {shard.head.writes} writes, others of {writes}")
        shard.head = replace(shard.head, writes=writes)
        with TableDirectory.replacing(Place(found.out).hidden / shard.found.out.name, overwrite=False) as own_directory:
            salts.append(shard.save(own_directory))
        found.complete &= shard.found.complete
        found.problems += [f"{shard.found.out.name}: {problem}" for problem in shard.found.problems]
        found.mended += [f"{shard.found.out.name}/{name}" for name in shard.found.mended]
        found.older += [row for places in shard.found.older for row in owners.rows_at(places, rank)]
        found.initial += [row for places in shard.found.initial for row in owners.rows_at(places, rank)]
    commits = {shard.found.commit for shard in shards}
    found.commit = commits.pop() if len(commits) == 1 else None
    directory.write_manifest(replace(manifest, salts=tuple(salts)))


def _manifest_of(files: OpenDirectory, given: str | os.PathLike[str] | None, found: Salvaged) -> Any:
    """Return the manifest of a table that no process is writing.

    Raises:
        TableBusyError, TableFormatError: as :func:`salvage` does.
    """
    if (holder := WriterLock.holder(files)) is not None:
        raise TableBusyError(errno.EBUSY, f"table {str(files.path)!r} is open in process {holder}; close it there")
    if given is None:
        raw = _content(files, MANIFEST, _MOST_MANIFEST, found)
    else:
        with open_regular(Path(given)) as file:
            raw = file.read(_MOST_MANIFEST)
    mended = mended_text(raw)
    remedy = "; give a copy's, or that of a table made with the same arguments, as manifest= (--manifest)"
    if mended is None:
        raise TableFormatError(f"the {MANIFEST} of {files.path} is lost, which says what its bytes are{remedy}")
    described: AnyManifest = parse(files.path, mended)
    if isinstance(described, LogManifest) and described.scratch:
        raise TableFormatError(f"{files.path} is a scratch table, whose rows go with the process that made it")
    _note_mended(found, MANIFEST, raw, mended)
    return described


def _content(files: OpenDirectory, name: str, most: int, found: Salvaged) -> bytes:
    """Return a file's content; if it cannot be read, return nothing and record a problem."""
    try:
        file = OpenFile(files.open(name))
        return bytes_left(file.fd, 0, min(os.fstat(file.fd).st_size, most))
    except (OSError, TableFormatError) as error:
        found.problems.append(f"{name} cannot be read: {error}")
        return b""


def _note_mended(found: Salvaged, name: str, raw: bytes, mended: bytes) -> None:
    if raw != mended and name not in found.mended:
        found.mended.append(name)


class _Slot(NamedTuple):
    """A slot of HEAD."""

    number: int
    salt: int
    commit: int
    last: int
    sums: tuple[int, int]
    contents: bytes


class _Damaged:
    """A table in a log whose files may be damaged.

    Args:
        files: the table's directory.
        manifest: its manifest.
        found: the outcome, to be filled in.
        is_given: True if the manifest is another table's.

    Attributes:
        head: the head of the commit to be saved.
    """

    def __init__(self, files: OpenDirectory, manifest: LogManifest, found: Salvaged, *, is_given: bool = False) -> None:
        self.found = found
        self._files = files
        names = log_names(manifest.log)
        try:
            self._rows = OpenFile(files.open(names[0]))
        except FileNotFoundError:
            raise TableFormatError(f"{files.path / names[0]} is missing, in which the rows were") from None
        found.rows = manifest.num_embeddings
        slots = [slot for slot in self._slots(names[1]) if is_given or slot.salt == manifest.salt]
        slot = max(slots, key=lambda each: each.commit, default=None)
        if is_given:
            salt = os.pread(self._rows.fd, 8, 8) if slot is None else slot.salt.to_bytes(8, "little")
            manifest = replace(manifest, salt=int.from_bytes(salt, "little"))
        self.head = LogHead(manifest.layouts[-1].number, 0, {}, {})
        if slot is None:
            found.problems.append(
                f"{names[1]} has no commit left: rows are as written last, perhaps of several steps, and attributes "
                "and id maps are lost"
            )
        else:
            found.commit = slot.commit
            if slot.number > 1:
                found.problems.append(f"the last commit in {names[1]} is damaged; commit {slot.commit} was held")
            try:
                self.head = read_head(slot.contents, manifest.name, partial(self._contents, slot))[0]
                manifest = manifest.as_of(self.head.layout)
            except TableFormatError as error:
                found.problems.append(f"attributes and id maps are lost: {error}")
        self._manifest = manifest
        self._slot = slot

    def _contents(self, slot: _Slot, name: str) -> bytes:
        """Return the file that holds a commit's contents."""
        raw = _content(self._files, name, _MOST_MANIFEST, self.found)
        stored = json.loads(slot.contents)["crc32"]
        text = mended_text(b"%08x\n" % stored + raw)
        body = raw if text is None else text[9:]
        _note_mended(self.found, name, raw, body)
        return body

    def _slots(self, name: str) -> Iterator[_Slot]:
        data = _content(self._files, name, 4 * _SLOT, self.found)
        for begin in range(0, len(data), _SLOT):
            block = data[begin : begin + _SLOT].ljust(_SLOT, b"\0")
            mended = mended_block(block, 52, 1) if any(block[:64]) else None
            if mended is not None and mended[:4] == b"SSWH":
                _, _, salt, commit, last, total, touched, _, length = _SLOT_HEADER.unpack_from(mended)
                _note_mended(self.found, name, block, mended)
                yield _Slot(begin // _SLOT, salt, commit, last, (total, touched), mended[64 : 64 + length])

    def save(self, directory: TableDirectory) -> int:
        """Write what is left to a new directory; return the salt of the table there."""
        manifest, slot, found = self._manifest, self._slot, self.found
        last, index = (None, None) if slot is None else (slot.last, slot.sums)
        log = DamagedLog(manifest, self._rows.fd, last, index)
        saved = LogManifest.of(manifest.name, manifest.num_embeddings, manifest.seed, collapsed(manifest.layouts[-1]))
        with LogStore.filled(directory, saved) as target:
            _save_rows(log, target, found)
            target.notes.attributes.update(self.head.attributes)
            target.notes.id_maps.update(self._id_maps())
            target.notes.writes = self.head.writes
        return saved.salt

    def _id_maps(self) -> Iterator[tuple[str, IdMap]]:
        for name, files in self.head.id_maps.items():
            parts = []
            for file, nbytes in files:
                raw = _content(self._files, file, nbytes, self.found)
                parts += pieces_left(raw, nbytes, file, self.found.problems)
            what = f"id map {name!r}"
            try:
                id_map = IdMap.of_saved(assembled(parts, what))
                with says_damaged(what):
                    has_rows = id_map.part is not None or id_map.num_rows <= self._manifest.num_embeddings
                    require(has_rows, f"it has rows 0 to {id_map.capacity}")
                yield name, id_map
            except TableFormatError as error:
                self.found.problems.append(f"id map {name!r} is lost; rows keep their numbers: {error}")


def _save_rows(log: DamagedLog, target: LogStore, found: Salvaged) -> None:
    """Copy the newest intact version of every row."""
    manifest, size = log.manifest, log.manifest.group_rows
    newest = manifest.layouts[-1]
    unknown = frozenset(name for name, column in newest.columns.items() if not is_lazy(column))
    fresh = FreshRows(newest, size, manifest.num_embeddings, manifest.seed, unknown)

    def put(groups: NDArray[Any], held: NDArray[np.uint8], layout: int) -> None:
        if len(groups):
            target.put(*fresh.columns_of(torch.from_numpy(groups.astype(np.int64)), torch.from_numpy(held), layout))

    def put_intact(chunk: Chunk, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Copy a chunk's wanted records; return the intact groups, and the damaged ones."""
        records = log.records(chunk)
        intact = log.are_intact(chunk, records)
        places = np.flatnonzero(wanted & intact)
        places = places[len(places) - 1 - np.unique(chunk.groups[places][::-1], return_index=True)[1]]
        held = np.zeros((len(places), size * newest.stride), np.uint8)
        for begin, to, nbytes in moves(manifest.layouts[chunk.layout], newest, size):
            held[:, to : to + nbytes] = records[places, begin : begin + nbytes]
        put(chunk.groups[places], held, chunk.layout)
        return chunk.groups[places], chunk.groups[wanted & ~intact]

    def all_of(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
        return np.unique(np.concatenate([np.empty(0, np.uint32), *parts]))

    damaged = all_of([put_intact(chunk, log.are_live(chunk))[1] for chunk in log.chunks])
    older, initial = [np.empty(0, np.uint32)], [damaged]
    if len(damaged):
        for chunk in log.chunks:  # in order: the last one wins
            wanted = np.isin(chunk.groups, damaged) & ~log.are_live(chunk)
            if wanted.any():
                older.append(put_intact(chunk, wanted)[0])
        initial = [np.setdiff1d(damaged, all_of(older))]
    if unknown:  # all rows were written
        pieces = chunks_of(len(log.newest), _PIECE)
        found_none = (np.flatnonzero(log.newest[some.start : some.stop] == 0) + some.start for some in pieces)
        initial += [groups.astype(np.uint32) for groups in found_none]
        for groups in initial:
            for some in chunks_of(len(groups), max(1, _PUT_BYTES // (size * newest.stride))):
                put(groups[some.start : some.stop], np.zeros((len(some), size * newest.stride), np.uint8), -1)
    found.complete = log.is_whole
    found.older = manifest.rows_of(all_of(older))
    found.initial = manifest.rows_of(all_of(initial))
