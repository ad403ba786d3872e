"""Averages of a table's rows over the updates of a training, and a table that reads them.

A row that no step touches has one weight for many updates, so that its average takes them all at once, when a step is
about to change the row, or when the average is read: avg ← weight + (avg - weight) · factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from speedswap.tables.idle import IdleStore
from speedswap.tables.init import zeros
from speedswap.tables.record import Block, Column
from speedswap.tables.store import Files, RowStore, WrappedStore
from speedswap.tables.table import Table

AVERAGE, UPDATES = "average", "average_updates"
"""The columns of a row's average, and of how many updates it has taken; the second also names the table's count."""


class TableAverages:
    """The averages of a table's rows, in columns of the table.

    Args:
        table: its columns are added, unless it has them.
        decay: the averages' share that an update keeps; None to give all updates the same weight.

    Raises:
        ValueError: ranks own the rows, or rows outside the batch take steps too.
    """

    def __init__(self, table: Table, decay: float | None) -> None:
        if table.ranks is not None or isinstance(table.store, IdleStore):
            why = "idle_rows is 'dense'" if table.ranks is None else "ranks own the rows"
            raise ValueError(
                f"table {table.name!r} cannot have averages: {why}, and a row's average is known only while its weight "
                "stays as this process's steps leave it; leave one of the two out"
            )
        weight = table.columns["weight"]
        columns = [
            Column(AVERAGE, weight.row_shape, weight.dtype, zeros()),
            Column(UPDATES, (), torch.int32, zeros()),
        ]
        table.add_columns([each for each in columns if each.name not in table.columns])
        self.columns = [table.columns[each.name] for each in columns]
        self.decay = decay
        self._attributes = table.attributes  # saved with the rows; the table itself would be kept alive

    @property
    def count(self) -> int:
        """The number of updates so far."""
        return int(self._attributes.get(UPDATES, 0))

    @count.setter
    def count(self, count: int) -> None:
        self._attributes[UPDATES] = count

    def take(self, columns: Mapping[str, Tensor]) -> None:
        """Let rows take the updates that they have missed, in place.

        Args:
            columns: weight and the averages' columns, by name, shape (n, ...), on one device.
        """
        weight, average, taken = columns["weight"].detach(), columns[AVERAGE], columns[UPDATES]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if self.decay is None:
            factor = taken.to(dtype) / max(1, self.count)
        else:  # the first update copies
            factor = (self.decay ** (self.count - taken).to(dtype)).masked_fill_(taken == 0, 0)
        average.copy_(torch.lerp(weight.to(dtype), average.to(dtype), factor.unsqueeze(1)))
        taken.fill_(self.count)


class AveragesStore(WrappedStore):
    """The averages of another store's rows, as weights.

    Writing an average counts as its last update.

    Args:
        inner: the store that holds rows and averages.
        averages: what rows take when they are read.
    """

    prefetch = RowStore.prefetch
    written_rows = RowStore.written_rows
    read, view = RowStore.read, RowStore.view

    def __init__(self, inner: RowStore, averages: TableAverages) -> None:
        super().__init__(inner)
        self.averages = averages
        name = f"average of {inner.facts.name}"
        self.facts = replace(inner.facts, name=name, nbytes=None, is_borrowed=True, reads_copies=True)

    @property
    def files(self) -> Files | None:
        return None

    @property
    def columns(self) -> dict[str, Column]:
        weight = self.inner.columns["weight"]
        return {"weight": Column("weight", weight.row_shape, weight.dtype, zeros())}

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        found = self.inner.gather(rows, ("weight", AVERAGE, UPDATES), device).columns
        self.averages.take(found)
        into = (out or {}).get("weight")
        return Block(rows, {"weight": found[AVERAGE] if into is None else into.copy_(found[AVERAGE])})

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: object = None) -> None:
        weight = values["weight"]
        updates = torch.full((len(weight),), self.averages.count, dtype=torch.int32, device=weight.device)
        self.inner.scatter(Block(block.rows, {}), {AVERAGE: weight, UPDATES: updates})

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.scatter(Block(torch.arange(start, start + len(values)), {}), {column: values})

    def add_columns(self, columns: Sequence[Column]) -> None:
        raise TypeError(f"{self.facts.name} is of one column, and is not trained; train the embedding it was made of")

    reset_columns = add_columns

    def close(self) -> None:
        return None
