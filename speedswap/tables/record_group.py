"""Records of one layout in one piece of memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.init import CHUNK_ROWS, ColumnMemory, CopyOf
from speedswap.tables.memory.host import Memory
from speedswap.tables.record import Column, RecordLayout

__all__ = ["RecordGroup"]

# Whole-table work (initial values, copies) goes in chunks of about this many bytes.
_CHUNK_BYTES = 64 * 2**20


@dataclass(eq=False)
class RecordGroup:
    """The records of some of a table's columns: most tables have one group, which holds every column."""

    layout: RecordLayout
    memory: Memory
    num_embeddings: int
    engine: str = "auto"
    _records: kernels.Records | None = field(default=None, init=False)

    @property
    def nbytes(self) -> int:
        return self.num_embeddings * self.layout.stride

    def records(self) -> kernels.Records:
        """Return the memory as the kernels take it."""
        if self._records is None:
            memory = self.memory
            self._records = kernels.Records(
                memory.bytes.data_ptr(),
                self.layout.stride,
                self.num_embeddings,
                memory.device,
                memory.pinned,
                memory.bytes,
                self.engine,
                memory.fence,
            )
        return self._records

    def close(self) -> None:
        """Release the memory."""
        self._records = None
        self.memory.close()

    def fields(self, names: Collection[str] | None = None) -> dict[str, kernels.WantedColumn]:
        """Return columns as the kernels gather them, by name: all of the group, or those of some names that it has."""
        return {
            c.name: kernels.WantedColumn(self.layout.offset(c.name), c.row_shape, c.dtype, c.form())
            for c in self.layout.columns
            if names is None or c.name in names
        }

    def view(self, name: str) -> Tensor:
        """Return all rows of a column as stored: a strided tensor (num_embeddings, *row_shape) over the memory itself.

        Raises:
            TypeError: the column is int8 with scales.
        """
        column = self.layout.columns[self.layout.index(name)]
        if column.compact and column.stored == torch.int8:
            raise TypeError(f"column {name!r} is stored as int8 with a scale per row and has no view; read it instead")
        return self.bytes_of(name).view(column.stored_dtype).view(self.num_embeddings, *column.row_shape)

    def bytes_of(self, name: str) -> Tensor:
        """Return a column as stored, uint8, shape (num_embeddings, row_bytes): a view of the memory."""
        i = self.layout.index(name)
        shape = (self.num_embeddings, self.layout.columns[i].row_bytes)
        return self.memory.bytes.as_strided(shape, (self.layout.stride, 1), self.layout.offsets[i])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a column as blocks have them, on the memory's device: a view, or a copy of compact ones."""
        column = self.layout.columns[self.layout.index(name)]
        if not column.compact:
            return self.view(name)[start:stop]
        ids = torch.arange(start, stop, device=self.memory.device)
        block = torch.empty(len(ids), *column.row_shape, dtype=column.dtype, device=ids.device)
        kernels.gather_records(self.records(), ids, [kernels.Part(self.layout.offset(name), block, column.form())])
        return block

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite rows of a column from ``start`` on, rounded to nearest where it is compact."""
        column = self.layout.columns[self.layout.index(name)]
        values = values.to(self.memory.device)
        if not column.compact:
            self.view(name)[start : start + len(values)] = values
            return
        ids = torch.arange(start, start + len(values), device=values.device)
        part = kernels.Part(self.layout.offset(name), kernels.as_read(values.detach()), column.form())
        kernels.scatter_records(self.records(), ids, [part])

    def chunks(self, start: int, stop: int) -> Iterator[slice]:
        """Yield rows ``start`` to ``stop`` in pieces of about 64 MiB, multiples of the initializers' own chunks."""
        rows = max(1, _CHUNK_BYTES // self.layout.stride)
        rows = -(-rows // CHUNK_ROWS) * CHUNK_ROWS
        for first in range(start, stop, rows):
            yield slice(first, min(first + rows, stop))

    def fill(self, columns: Sequence[Column], seed: int, holders: Mapping[str, RecordGroup]) -> None:
        """Write the initial values of some of the columns.

        Args:
            columns: columns of this group.
            seed: the table's.
            holders: the group of every column of the table, for columns that start as a copy of another one.
        """
        if not columns:
            return
        for rows in self.chunks(0, self.num_embeddings):
            for column in columns:
                self._fill(column, seed, holders, rows)
                is_here = column.zero_row is not None and rows.start <= column.zero_row < rows.stop
                if is_here and not column.init.is_given:  # before another column copies it
                    self.bytes_of(column.name)[column.zero_row] = 0

    def _fill(self, column: Column, seed: int, holders: Mapping[str, RecordGroup], rows: slice) -> None:
        if isinstance(column.init, CopyOf):
            source = column.init.column
            self.write(column.name, rows.start, holders[source].read(source, rows.start, rows.stop))
            return
        num_rows = rows.stop - rows.start
        own = self.layout.columns[self.layout.index(column.name)]
        if own.compact:
            device = self.memory.device
            target = ColumnMemory.chunk(rows.start, num_rows, own.row_shape, self.num_embeddings, seed, own.key, device)
        else:
            offset, view = self.layout.offset(own.name), self.view(own.name)
            target = ColumnMemory(self.records(), offset, view, self.num_embeddings, seed, own.key)
        column.init.fill(target, rows.start, num_rows)
        if own.compact:
            self.write(own.name, rows.start, target.view)
