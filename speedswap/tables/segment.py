"""Records with one layout in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from speedswap import kernels
from speedswap.tables.file_memory import FileMemory
from speedswap.tables.init import CHUNK_ROWS, ColumnMemory, CopyOf
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.storage import Memory

__all__ = ["Segment"]

# Whole-table work (initial values, copies) goes in chunks of about this many bytes.
_CHUNK_BYTES = 64 * 2**20


@dataclass(eq=False)
class Segment:
    """The records of some of a table's columns: most tables have one segment, and it holds every column."""

    layout: RecordLayout
    memory: Memory
    num_embeddings: int
    file: str | None = None  # in a memmap table's directory

    @property
    def nbytes(self) -> int:
        return self.num_embeddings * self.layout.stride

    def records(self) -> kernels.Records:
        """The memory as the kernels take it."""
        memory = self.memory
        return kernels.Records(
            memory.bytes.data_ptr(), self.layout.stride, self.num_embeddings, memory.device, memory.pinned, memory.bytes
        )

    def wanted(self) -> list[kernels.WantedColumn]:
        """Every column, for a gather by the engine's thread."""
        return [
            kernels.WantedColumn(self.layout.offset(c.name), c.row_bytes, c.row_shape, c.dtype)
            for c in self.layout.columns
        ]

    def view(self, name: str) -> Tensor:
        """All rows of one column, (num_embeddings, *row_shape), as a strided tensor over the memory itself."""
        i = self.layout.index(name)
        column, offset = self.layout.columns[i], self.layout.offsets[i]
        flat = self.memory.bytes.as_strided((self.num_embeddings, column.row_bytes), (self.layout.stride, 1), offset)
        return flat.view(column.dtype).view(self.num_embeddings, *column.row_shape)

    def scatter(self, rows: Tensor, parts: Sequence[kernels.Part], *, through: Tensor | None) -> None:
        """Write parts of unique rows, some of them through the file system (see :meth:`FileMemory.reserve`)."""
        if through is None:
            kernels.scatter_records(self.records(), rows, parts)
            return
        assert isinstance(self.memory, FileMemory)
        for mask, scatter in ((through, self.memory.write_through), (~through, kernels.scatter_records)):
            chosen = [kernels.Part(offset, block[mask.to(block.device)]) for offset, block in parts]
            scatter(self.records(), rows[mask.to(rows.device)], chosen)

    def chunks(self, start: int, stop: int) -> Iterator[slice]:
        """Rows ``start`` to ``stop`` in pieces of about 64 MiB, whole multiples of the initializers' own chunks."""
        rows = max(1, _CHUNK_BYTES // self.layout.stride)
        rows = -(-rows // CHUNK_ROWS) * CHUNK_ROWS
        for first in range(start, stop, rows):
            yield slice(first, min(first + rows, stop))

    def fill(
        self, columns: Sequence[Column], seed: int, holders: Mapping[str, Segment], advance: Callable[[int], object]
    ) -> None:
        """Write the initial values of some of the columns.

        Args:
            columns: of this segment.
            seed: the table's.
            holders: the segment of every column of the table, for columns that start as a copy of another one.
            advance: called with the number of rows done.
        """
        if not columns:
            return
        self.memory.reserve(slice(0, self.num_embeddings), self.layout.stride)
        records = self.records()
        targets = [
            ColumnMemory(records, self.layout.offset(c.name), self.view(c.name), self.num_embeddings, seed, c.key)
            for c in columns
        ]
        for rows in self.chunks(0, self.num_embeddings):
            for column, target in zip(columns, targets, strict=True):
                if isinstance(column.init, CopyOf):
                    target.view[rows] = holders[column.init.column].view(column.init.column)[rows]
                else:
                    column.init.fill(target, rows.start, rows.stop - rows.start)
            advance(rows.stop - rows.start)
        for column, target in zip(columns, targets, strict=True):
            if column.zero_row is not None:
                target.view[column.zero_row] = 0
