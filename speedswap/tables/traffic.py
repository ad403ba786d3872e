"""Batches of rows between a table's memory and the compute device: now, ahead of their time, or behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.block import Block
from speedswap.tables.in_flight import Ahead, EngineGathering, InFlight, SideGathering, Write
from speedswap.tables.record import Column
from speedswap.tables.segment import Segment
from speedswap.tables.segments import Segments

__all__ = ["Traffic"]


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

    def fetch(
        self,
        rows: Tensor,
        columns: Sequence[str] | None,
        device: torch.device | str | None,
        into: Mapping[str, Tensor] | None = None,
    ) -> Block:
        """Gather without waiting for writes that are on their way.

        Args:
            columns: all by default.
            device: of the block; by default that of ``rows``, or of the memory if that is a GPU's.
            into: contiguous tensors for some of the columns.
        """
        names = list(self._segments.columns) if columns is None else columns
        if device is None:
            home = self._segments.of("weight").memory.device
            device = home if home.type != "cpu" else rows.device
        blocks: dict[str, Tensor] = {}
        for segment, found in self._segments.grouped(names):
            if torch.device(device).type == "cpu":
                segment.memory.settle()
            parts = []
            for column in found:
                block = into.get(column.name) if into is not None else None
                if block is None:
                    block = kernels.empty((len(rows), *column.row_shape), column.dtype, device)
                blocks[column.name] = block
                parts.append(kernels.Part(segment.layout.offset(column.name), block, column.form()))
            kernels.gather_records(segment.records(), rows, parts)
        return Block(rows, {name: blocks[name] for name in names})

    def write(
        self, rows: Tensor, values: Mapping[str, Tensor], *, begins: Callable[[], int], behind: bool = False
    ) -> None:
        """Scatter.

        Args:
            begins: called once nothing can fail any more, before the first byte is written; returns the version that
                the table will then have.
            behind: return before the rows are written. They are ascending, and nobody changes ``values`` any more.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        by_segment = self._segments.grouped(values)
        through = [segment.memory.reserve(rows, segment.layout.stride) for segment, _ in by_segment]
        blocks = {name: value.detach().contiguous() for name, value in values.items()}
        forms = {column.name: self._form(column) for _, columns in by_segment for column in columns}
        moves = [
            (segment, [kernels.Part(segment.layout.offset(c.name), blocks[c.name], forms[c.name]) for c in columns])
            for segment, columns in by_segment
        ]
        at_once = not behind or any(mask is not None for mask in through)
        if at_once:
            self.land()
        version = begins()
        if at_once:
            for (segment, parts), mask in zip(moves, through, strict=True):
                if parts[0].block.device.type == "cpu":
                    segment.memory.settle()
                segment.scatter(rows, parts, through=mask)
        self._segments.writes += 1
        if behind:
            job = None if at_once else self._write_behind(rows, moves)
            self._flight.wrote(Write(rows, blocks, forms, job), version)

    def _write_behind(
        self, rows: Tensor, moves: Sequence[tuple[Segment, Sequence[kernels.Part]]]
    ) -> kernels.Job | kernels.Aside[None]:
        """Begin to write; the engine's thread where all is host memory, else a stream and thread beside the GPU's."""
        blocks = [part.block for _, parts in moves for part in parts]
        if self._in_host_memory(blocks[0].device):
            for segment, _ in moves:
                segment.memory.settle()
            return kernels.scatter_behind(rows, [(segment.records(), parts) for segment, parts in moves])

        def write() -> None:
            for segment, parts in moves:
                kernels.scatter_records(segment.records(), rows, parts)

        return kernels.Aside(write, blocks[0].device, "out", [rows, *blocks])

    def gather_ahead(self, ids: Tensor, device: torch.device, version: int) -> Ahead:
        """Begin to look up a later batch: check the ids, make them unique, gather their rows.

        Args:
            ids: int64 or int32, any shape, at least one; nobody changes them any more.
            device: where the block goes.
            version: the table's.
        """
        gathering: EngineGathering | SideGathering
        writes: list[Write] = []
        if ids.device.type == "cpu" and self._in_host_memory(device):
            # In the same thread as the writes, and so after those that were given to it.
            names, moves = [], []
            for segment in self._segments:
                segment.memory.settle()
                names += [column.name for column in segment.layout.columns]
                moves.append((segment.records(), segment.wanted()))
            gathering = EngineGathering(kernels.AheadJob(ids, self._segments.num_embeddings, moves), names)
        else:
            writes = self._flight.unwritten()

            def look_up() -> tuple[Block, Tensor]:
                kernels.check_ids(ids, self._segments.num_embeddings, f"table {self._segments.name!r}")
                rows, local = kernels.unique(ids)
                block = self.fetch(rows, None, device)
                return Block(rows.to(device, non_blocking=True), block.columns), local.to(device, non_blocking=True)

            gathering = SideGathering(kernels.Aside(look_up, device, "in", [ids]))
        ahead = Ahead(gathering, version, writes)
        self._flight.asked(ahead)
        return ahead

    def _in_host_memory(self, device: torch.device) -> bool:
        return device.type == "cpu" and all(segment.memory.device.type == "cpu" for segment in self._segments)

    def _form(self, column: Column) -> kernels.Stored | None:
        """How the kernels convert a column in the next scatter: its number decides what stochastic rounding draws."""
        if column.rounding == "nearest" or not column.compact:
            return column.form()
        return column.form(kernels.rounding_key(self._segments.seed, column.key, self._segments.writes))
