"""Batches of rows between a table's memory and the compute device: now, ahead of their time, or behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.block import Block
from speedswap.tables.in_flight import Ahead, EngineGathering, Found, InFlight, SideGathering, Write
from speedswap.tables.record import Column
from speedswap.tables.segment import Segment
from speedswap.tables.segments import Segments

__all__ = ["Later", "Traffic", "gather_later"]

_CPU = torch.device("cpu")


class Traffic:
    """Moves rows that are known to be in range, unique and fitting, and keeps the moves out of each other's way.

    Args:
        segments: the table's memory.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._flight = InFlight()

    def land(self) -> None:
        """Return when every write that is on its way has arrived."""
        self._flight.land()

    def is_at_rest(self) -> bool:
        """Whether every write has arrived already. In a forked child those that had not at the fork never do."""
        return not self._flight.unwritten()

    def fetch(
        self,
        rows: Tensor,
        columns: Sequence[str] | None,
        device: torch.device | str | None,
        into: Mapping[str, Tensor] | None = None,
        overtaking: Tensor | None = None,
    ) -> Block:
        """Gather without waiting for writes that are on their way.

        Args:
            columns: all by default.
            device: of the block; by default that of ``rows``, or of the memory if that is a GPU's.
            into: contiguous tensors for some of the columns.
            overtaking: the rows, with -1 for those that a write will hand over; it will do so with all that it has, so
                the memory is not waited for.
        """
        names = self._segments.columns if columns is None else columns
        if device is None:
            home = self._segments.of("weight").memory.device
            device = home if home.type != "cpu" else rows.device
        device = torch.device(device)
        blocks: dict[str, Tensor] = {}
        for segment, found in self._segments.grouped(names):
            if device.type == "cpu":
                segment.memory.settle()
            parts = []
            for column in found:
                block = into.get(column.name) if into is not None else None
                if block is None:
                    block = kernels.empty((len(rows), *column.row_shape), column.dtype, device)
                blocks[column.name] = block
                parts.append(kernels.Part(segment.layout.offset(column.name), block, column.form()))
            if overtaking is None:
                kernels.gather_records(segment.records(), rows, parts)
            else:
                kernels.gather_records(segment.records()._replace(fence=None), overtaking, parts)
        return Block(rows, {name: blocks[name] for name in names})

    def write(
        self,
        rows: Tensor,
        values: Mapping[str, Tensor],
        *,
        begins: Callable[[], int],
        behind: kernels.Bundle | None = None,
    ) -> None:
        """Scatter.

        Args:
            begins: called once nothing can fail any more, before the first byte is written; returns the version that
                the table will then have.
            behind: leave the writing to a bundle, or to the engine's thread, and return before it is done. The rows are
                ascending, and nobody changes ``values`` any more.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        by_segment = self._segments.grouped(values)
        through = [segment.memory.reserve(rows, segment.layout.stride) for segment, _ in by_segment]
        blocks = {name: kernels.as_read(value.detach()) for name, value in values.items()}
        forms = {column.name: self._form(column) for _, columns in by_segment for column in columns}
        moves = [
            (segment, [kernels.Part(segment.layout.offset(c.name), blocks[c.name], forms[c.name]) for c in columns])
            for segment, columns in by_segment
        ]
        at_once = behind is None or any(mask is not None for mask in through)
        if at_once:
            self.land()
            self._flight.let_gathers_end()
        version = begins()
        if at_once:
            for (segment, parts), mask in zip(moves, through, strict=True):
                if parts[0].block.device.type == "cpu":
                    segment.memory.settle()
                segment.scatter(rows, parts, through=mask)
        self._segments.writes += 1
        if behind is not None:
            job = None if at_once else self._write_behind(rows, moves, behind)
            self._flight.wrote(Write(rows, blocks, forms, job), version)

    def _write_behind(
        self, rows: Tensor, moves: Sequence[tuple[Segment, Sequence[kernels.Part]]], bundle: kernels.Bundle
    ) -> kernels.Job | kernels.Bundled:
        """Begin to write; the engine's thread where all is host memory, else a stream and thread beside the GPU's."""
        blocks = [part.block for _, parts in moves for part in parts]
        if self._in_host_memory(blocks[0].device):
            for segment, _ in moves:
                segment.memory.settle()
            return kernels.scatter_behind(rows, [(segment.records(), parts) for segment, parts in moves])

        def write() -> None:
            for segment, parts in moves:
                kernels.scatter_records(segment.records(), rows, parts)

        return bundle.add(write, blocks[0].device, [rows, *blocks])

    def _gather_by_engine(self, ids: Tensor) -> EngineGathering:
        """In the same thread as the writes, and so after those that were given to it."""
        names, moves = [], []
        for segment in self._segments:
            segment.memory.settle()
            names += [column.name for column in segment.layout.columns]
            moves.append((segment.records(), segment.wanted()))
        return EngineGathering(kernels.AheadJob(ids, self._segments.num_embeddings, moves), names)

    def _before(self) -> SideGathering | None:
        """The lookup before, if its step can be expected to write its rows."""
        last = self._flight.before()
        return last.gathering if last is not None and isinstance(last.gathering, SideGathering) else None

    def _asked(self, ids: Tensor) -> kernels.Asked:
        return kernels.Asked(ids, self._segments.num_embeddings, f"table {self._segments.name!r}")

    def _in_host_memory(self, device: torch.device) -> bool:
        return device.type == "cpu" and all(segment.memory.device.type == "cpu" for segment in self._segments)

    def _form(self, column: Column) -> kernels.Stored | None:
        """How the kernels convert a column in the next scatter: its number decides what stochastic rounding draws."""
        if column.rounding == "nearest" or not column.compact:
            return column.form()
        return column.form(kernels.rounding_key(self._segments.seed, column.key, self._segments.writes))


class Later(NamedTuple):
    """A lookup of a later batch.

    Attributes:
        traffic: of the table.
        ids: int64 or int32, any shape, at least one; nobody changes them any more.
        device: where the block goes.
        version: the table's.
    """

    traffic: Traffic
    ids: Tensor
    device: torch.device
    version: int


def gather_later(lookups: Sequence[Later]) -> list[Ahead]:
    """Begin to look up what a later batch needs of any number of tables: check ids, find their rows, gather those.

    Returns:
        For each lookup its rows on their way.
    """
    found: dict[int, Ahead] = {}
    aside: dict[torch.device, list[int]] = {}
    for i, (traffic, ids, device, version) in enumerate(lookups):
        if ids.device.type == "cpu" and traffic._in_host_memory(device):
            found[i] = Ahead(traffic._gather_by_engine(ids), version, [], traffic._flight)
        else:
            aside.setdefault(device, []).append(i)
    for device, places in aside.items():
        # Writes that are on their way now may be overtaken.
        flights = [lookups[i].traffic._flight for i in places]
        writes = [list(flight.unwritten()) for flight in flights]
        jobs = _gather_beside([lookups[i] for i in places], device, writes)
        for i, job, unwritten, flight in zip(places, jobs, writes, flights, strict=True):
            found[i] = Ahead(SideGathering(job), lookups[i].version, unwritten, flight)
    for i, lookup in enumerate(lookups):
        lookup.traffic._flight.asked(found[i])
    return [found[i] for i in range(len(lookups))]


def _gather_beside(
    lookups: Sequence[Later], device: torch.device, writes: Sequence[Sequence[Write]]
) -> list[kernels.Aside[tuple[Found, Tensor | None] | None]]:
    """The rows of all are known before the first are gathered: that takes one answer of the GPU's.

    Rows that writes on their way have, and those of the lookup before, whose step will write them, do not cross the
    bus: they are handed over when the lookup is taken.

    Args:
        writes: for each lookup: those that it may overtake.
    """
    before = [lookup.traffic._before() for lookup in lookups]

    def find() -> list[_Wanted | None]:
        near = [lookup.ids.to(device, non_blocking=True) for lookup in lookups]
        found = kernels.find_all([lookup.traffic._asked(ids) for lookup, ids in zip(lookups, near, strict=True)])
        return [
            None if rows_and_local is None else _wanted(*rows_and_local, lookup.traffic, overtaken, last)
            for rows_and_local, lookup, overtaken, last in zip(found, lookups, writes, before, strict=True)
        ]

    def gather(found: list[_Wanted | None]) -> Iterator[tuple[Found, Tensor | None] | None]:
        for lookup, wanted in zip(lookups, found, strict=True):
            if wanted is None:
                yield None
                continue
            kernels.used_here([wanted.rows, wanted.to_gather])
            block = lookup.traffic.fetch(wanted.rows, None, device, overtaking=wanted.to_gather)
            yield (block, wanted.local), wanted.awaited

    ids = [lookup.ids for lookup in lookups]
    return kernels.beside(gather, len(lookups), device, "in", first=find, inputs=ids)


class _Wanted(NamedTuple):
    """A lookup's rows, each id's place among them, the rows with -1 where others bring them, and whose are awaited."""

    rows: Tensor
    local: Tensor
    to_gather: Tensor
    awaited: Tensor | None


def _wanted(
    rows: Tensor, local: Tensor, traffic: Traffic, writes: Sequence[Write], before: SideGathering | None
) -> _Wanted:
    awaited = before.rows() if before is not None else None
    others = [write.rows for write in writes if write.has(traffic._segments.columns)]
    to_gather = rows
    for other in [*others, awaited] if traffic._in_host_memory(_CPU) and rows.is_cuda else []:
        if other is not None and len(other) and len(rows):
            kernels.used_here([other])  # a lookup that was not announced has made its rows on another stream
            places = kernels.places_among(other.to(rows.device), rows)
            to_gather = torch.where(places < 0, to_gather, -1)
    return _Wanted(rows, local, to_gather, None if to_gather is rows else awaited)
