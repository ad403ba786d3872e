"""The chunks of a log that may be damaged anywhere, found by a scan that trusts nothing and never stops early."""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speedswap import kernels
from speedswap.tables.files.damage import bytes_left, mended_block
from speedswap.tables.files.manifest import LogManifest

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

    def pieces_of_index(self) -> Iterator[tuple[np.uint32, NDArray[np.uint32]]]:
        """Yield the index in pieces: the first group, and the addresses."""
        for begin in range(0, len(self.newest), _PIECE):
            yield np.uint32(begin), self.newest[begin : begin + _PIECE]

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
