"""A range of a store's rows as the store of a separate table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap.tables.init import CopyOf, chunks_of
from speedswap.tables.initial import InRanges
from speedswap.tables.record import Block, Column
from speedswap.tables.store import RowStore, WrappedStore

if TYPE_CHECKING:
    from speedswap.kernels import Transfers


class PartStore(WrappedStore):
    """Rows ``first_row`` to ``first_row + num_rows - 1`` of another store, numbered from 0.

    This lets several tables share one store, which a training step treats as one table. Writes go to the other store,
    whose lock and version this one shares. A copy, in memory or in files, is a table of these rows alone. Closing this
    store leaves the other one open.

    Args:
        inner: the store that holds the rows.
        first_row: the row that is number 0 here.
        num_rows: number of rows, at least 1.
        name: for messages.
    """

    # Rows that another table trains are looked up when needed.
    prefetch = RowStore.prefetch
    written_rows = RowStore.written_rows

    def __init__(self, inner: RowStore, first_row: int, num_rows: int, name: str) -> None:
        super().__init__(inner)
        inner.notes.parts.add(self)
        self.first_row, self.num_rows = first_row, num_rows
        self._columns: tuple[dict[str, Column], dict[str, Column]] = {}, {}
        weight = inner.columns["weight"].init
        own = weight.at(first_row) if isinstance(weight, InRanges) else None
        self.facts = replace(
            inner.facts,
            num_embeddings=num_rows,
            seed=inner.facts.seed if own is None else own.seed,
            name=name,
            nbytes=None,
            part_name=name,
            first_row=inner.facts.first_row + first_row,
            is_borrowed=True,
        )

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        whole, columns = self._columns
        if whole is not self.inner.columns:
            whole = self.inner.columns
            columns = {name: self._own(column) for name, column in whole.items()}
            self._columns = whole, columns
        return columns

    def _own(self, column: Column) -> Column:
        """Return a column with the initial values of these rows."""
        init, zero_row = column.init, column.zero_row
        if isinstance(init, InRanges):
            own = init.at(self.first_row)
            return column if own is None else replace(column, init=own.init, zero_row=own.zero_row)
        if zero_row is not None:
            zero_row -= self.first_row
        return replace(column, zero_row=zero_row if zero_row in range(self.num_rows) else None)

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        block = self.inner.gather(self._there(rows), columns, device, out)
        return Block(rows, block.columns)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        self.inner.scatter(Block(self._there(block.rows), {}), values, transfers)

    def _there(self, rows: Tensor) -> Tensor:
        """Translate row numbers to the other store's."""
        return rows.long() + self.first_row

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        return self.inner.read(column, self.first_row + start, self.first_row + stop, device)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.inner.write(column, self.first_row + start, values)

    def view(self, column: str) -> Tensor:
        return self.inner.view(column)[self.first_row : self.first_row + self.num_rows]

    def add_columns(self, columns: Sequence[Column]) -> None:
        names = ", ".join(column.name for column in columns)
        raise TypeError(
            f"table {self.facts.name!r} lies in a store with others and cannot have columns of its own ({names}); "
            "train it through the collection that it belongs to, or copy it with Table.save(path)"
        )

    def reset_columns(self, columns: Sequence[Column]) -> None:
        if self.files is not None:
            self.files.reserve(*[range(self.num_rows)] * len(columns))
        for column in columns:
            for rows in chunks_of(self.num_rows):
                if isinstance(column.init, CopyOf):
                    values = self.read(column.init.column, rows.start, rows.stop)
                else:
                    values = column.initial(rows, self.num_rows, self.facts.seed)
                self.write(column.name, rows.start, values)

    # ------------------------------------------------------------------ lifetime

    def close(self) -> None:
        if not self.notes.closed:
            self.inner.flush()
