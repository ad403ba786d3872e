"""Records in memory: those of one layout in one piece, and all of a table's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import WantedColumn
from speedswap.tables import memory as storages
from speedswap.tables.files.manifest import require_size
from speedswap.tables.init import CHUNK_ROWS, ColumnMemory, CopyOf
from speedswap.tables.memory import Memory, MemoryKind
from speedswap.tables.record import Column, RecordLayout

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


Fields = list[tuple[RecordGroup, dict[str, WantedColumn]]]


class RecordGroups:
    """The records of every column. Most tables have one group; columns added after the first write get another.

    Args:
        num_embeddings: rows.
        storage: where they live.
        seed: of the initial values.
        name: the table's, for messages.
        engine: how rows go between host memory and a GPU.
        written: whether rows may differ from their initial values.

    Attributes:
        lost: whether the memory is gone, because columns could neither be added nor the old ones restored.
    """

    lost = False

    def __init__(
        self,
        num_embeddings: int,
        storage: MemoryKind,
        seed: int,
        name: str,
        *,
        engine: str = "auto",
        written: bool = False,
    ) -> None:
        self.num_embeddings = num_embeddings
        self.storage = storage
        self.seed = seed
        self.name = name
        self.engine = engine
        self.written = written
        self._groups: tuple[RecordGroup, ...] = ()
        # Computed once for these groups, since every batch asks.
        self._columns: tuple[tuple[RecordGroup, ...], dict[str, Column]] = (), {}
        self._by_names: dict[tuple[str, ...], Fields] = {}

    def __iter__(self) -> Iterator[RecordGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in creation order."""
        groups, columns = self._columns
        if groups is not self._groups:
            groups = self._groups
            columns = {column.name: column for group in groups for column in group.layout.columns}
            self._by_names = {}
            self._columns = groups, columns  # in one assignment, for other threads
        return columns

    def of(self, column: str) -> RecordGroup:
        """Return the group that holds a column.

        Raises:
            ValueError: none does.
        """
        for group in self:
            if any(c.name == column for c in group.layout.columns):
                return group
        raise ValueError(f"column {column!r} is not in table {self.name!r}; it has {', '.join(self.columns)}")

    def fields(self, names: Iterable[str]) -> Fields:
        """Return the named columns as the kernels gather them, by the group that holds them."""
        wanted = tuple(names)
        columns = self.columns  # before what is known of them
        if wanted not in self._by_names:
            for name in wanted:
                if name not in columns:
                    self.of(name)  # raises
            fields = [(group, group.fields(wanted)) for group in self]
            self._by_names[wanted] = [(group, some) for group, some in fields if some]
        return self._by_names[wanted]

    def add(self, columns: Sequence[Column]) -> None:
        """Give every row more columns; in the same records if that costs no more than initial values.

        Args:
            columns: with names that are new.
        """
        together = [*columns] if self.written else [*self.columns.values(), *columns]
        require_size(self.num_embeddings, together)
        if self.written:
            self.adopt(self._new(together))
        else:
            self._rebuild(together)

    def adopt(self, group: RecordGroup) -> None:
        """Take over the records of further columns."""
        self._groups = (*self._groups, group)

    def add_unfilled(self, columns: Sequence[Column]) -> None:
        """Make a new table's records, of zeros, for rows that the caller is about to write."""
        self._groups = (self._new(columns, filled=False),)
        self.written = True

    def _rebuild(self, columns: Sequence[Column]) -> None:
        """Put all columns in one record; the old memory is released first, so that the peak is the new table alone."""
        layouts = [group.layout for group in self]
        try:
            for group in self:
                group.close()
            self._groups = (self._new(columns),)
        except BaseException:
            self.lost = True  # and stays so if this fails as well
            self._groups = tuple(self._new(layout.columns) for layout in layouts)
            self.lost = False
            raise

    def _new(self, columns: Sequence[Column], *, filled: bool = True) -> RecordGroup:
        """Return memory for these columns, filled with their initial values unless it is to stay zero."""
        layout = RecordLayout.of(columns)
        nbytes = self.num_embeddings * layout.stride
        group = RecordGroup(layout, storages.allocate(self.storage, nbytes), self.num_embeddings, self.engine)
        try:
            # Fresh memory is zero already.
            self.fill(group, [column for column in columns if filled and not column.init.is_zero])
        except BaseException:
            group.close()
            raise
        return group

    def fill(self, group: RecordGroup, columns: Sequence[Column]) -> None:
        """Write the initial values of some of a group's columns."""
        group.memory.settle()
        holders = {column.name: s for s in [*self, group] for column in s.layout.columns}
        group.fill(columns, self.seed, holders)

    def close(self) -> None:
        """Release the memory."""
        for group in self:
            group.close()
