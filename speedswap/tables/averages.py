"""Averages of a table's rows over the updates of a training, and a table that reads them.

A row that no step touches has one weight for many updates, so that its average takes them all at once, when the row is
about to change, or when the average is read: avg ← weight + (avg - weight) · factor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speedswap.tables.files.damage import is_int
from speedswap.tables.init import chunks_of, ids_of, zeros
from speedswap.tables.record import Block, Column
from speedswap.tables.store import AVERAGES, RowStore, WrappedStore
from speedswap.tables.table import Table


class _Kept:
    """The averages of a table as kept with its commits: those read here, and those not taken up yet.

    Args:
        store: the rows'; only its attributes are kept alive.
    """

    def __init__(self, store: RowStore) -> None:
        self.owned: dict[str, weakref.ref[TableAverages]] = {}
        self._attributes = store.notes.attributes
        self._store = weakref.ref(store)

    def __call__(self) -> dict[str, Any]:
        """Return the averages as plain data."""
        return self.unowned() | {each.average.name: [each.count, each.decay] for each in self.living()}

    def unowned(self) -> dict[str, Any]:
        """Return those that were saved with the table and not taken up yet."""
        noted = self._attributes.get(AVERAGES)
        return {name: noted[name] for name in noted if name not in self.owned} if isinstance(noted, dict) else {}

    def living(self) -> list[TableAverages]:
        """Return those that are still read."""
        return [found for reference in self.owned.values() if (found := reference()) is not None]

    def take_before(self, rows: Tensor | range | None, columns: Collection[str]) -> None:
        """Let rows take the updates that they have missed, before their weight is written without their averages."""
        if (store := self._store()) is None or "weight" not in columns:
            return
        every, writes = range(store.facts.num_embeddings) if rows is None else rows, store.notes.writes
        for each in self.living():
            if each.average.name not in columns:
                for piece in chunks_of(len(every)):
                    some = every[piece.start : piece.stop]
                    ids = some if isinstance(some, Tensor) else ids_of(some)
                    each.put(store, ids, each.of_rows(store, ids), each.count)
        store.notes.writes = writes  # the seed of stochastic rounding


def averages_of(table: Table) -> list[TableAverages]:
    """Return the averages of a table's rows that steps have to keep."""
    return _kept_of(table).living() if AVERAGES in table.live_attributes else []


def recall_averages(table: Table) -> None:
    """Let averages go on with those of their decay that the table has got from a checkpoint, whatever their names."""
    if found := averages_of(table):
        _kept_of(table).owned.clear()
    for each in found:
        each.take_up(table)


def kept_columns(attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of averages that a table's attributes describe."""
    noted = attributes.get(AVERAGES)
    return [column for name in noted for column in (name, f"{name}_updates")] if isinstance(noted, dict) else []


def _kept_of(table: Table) -> _Kept:
    found = table.live_attributes.get(AVERAGES)
    if found is None:
        found = table.live_attributes[AVERAGES] = _Kept(table.store)
        table.store.notes.listeners.append(found.take_before)
    assert isinstance(found, _Kept)
    return found


class TableAverages:
    """Averages of a table's rows, in columns of the table, until nothing refers to this any more.

    The columns are added when rows are first stepped, unless :meth:`join` is called before.

    Args:
        decay: the averages' share that an update keeps; None to give all updates the same weight.
        count: the number of updates so far.

    Attributes:
        average, taken: the columns of a row's average, and of how many updates it has taken, plus one; zero for a row
            that has had one weight since the beginning.
    """

    average: Column
    taken: Column

    def __init__(self, decay: float | None, count: int = 0) -> None:
        self.decay, self.count = decay, count

    def lie_in(self, table: Table, name: str) -> TableAverages:
        """Make this name's columns of a table those of the averages."""
        weight = table.columns["weight"]
        self.average = Column(name, weight.row_shape, weight.dtype, zeros())
        self.taken = Column(f"{name}_updates", (), torch.int32, zeros())
        _kept_of(table).owned[name] = weakref.ref(self)
        return self

    def take_up(self, table: Table) -> TableAverages:
        """Go on with averages of this decay that were saved with a table and not taken up yet; or begin new ones."""
        kept = _kept_of(table)
        found = kept.unowned()
        for name, each in found.items():
            if (count := _count_of(each, self.decay)) is not None:
                self.count = count
                return self.lie_in(table, name)
        taken = {*found, *(each.average.name for each in kept.living())}
        names = (f"average_{i}" if i else "average" for i in itertools.count())
        self.lie_in(table, next(name for name in names if name not in taken))
        table.reset_columns([each for each in self.columns if each.name in table.columns])  # of former ones
        return self

    @property
    def columns(self) -> tuple[Column, Column]:
        """The columns of a row's average, and of the updates it has taken."""
        return self.average, self.taken

    def join(self, table: Table, *, commit: bool = True) -> None:
        """Add the columns to the table, unless it has them."""
        if self.taken.name not in table.columns:
            table.add_columns(self.columns, commit=commit)

    def take(self, columns: dict[str, Tensor]) -> None:
        """Let rows take the updates that they have missed, in place.

        Args:
            columns: weight and the averages' columns, if the table has them, by name, shape (n, ...), on one device.
        """
        weight = columns["weight"].detach()
        average = columns.setdefault(self.average.name, torch.zeros_like(weight))
        taken = columns.setdefault(self.taken.name, torch.zeros_like(weight[:, 0], dtype=torch.int32))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        known = (taken - 1).to(dtype)
        factor = known / max(1, self.count) if self.decay is None else self.decay ** (self.count - known)
        factor.masked_fill_(known <= 0, 0).masked_fill_(known == self.count, 1)  # the first update copies
        average.copy_(torch.lerp(weight.to(dtype), average.to(dtype), factor.unsqueeze(1)))
        taken.fill_(self.count + 1)

    def of_rows(self, store: RowStore, rows: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the averages of a store's rows, with all updates."""
        names = ["weight", *(each.name for each in self.columns if each.name in store.columns)]
        found = store.gather(rows, names, device).columns
        self.take(found)
        return found[self.average.name]

    def put(self, store: RowStore, rows: Tensor, values: Tensor, count: int) -> None:
        """Write the averages of a store's rows as of an update of this number."""
        if self.taken.name not in store.columns:
            store.add_columns(self.columns)
        counts = torch.full((len(values),), count + 1, dtype=torch.int32, device=values.device)
        store.scatter(Block(rows, {}), {self.average.name: values, self.taken.name: counts})


class AveragesStore(WrappedStore):
    """The averages of a table's rows, as weights.

    Writing an average counts as its last update.

    Args:
        table: the rows.
        averages: what rows take when they are read.
    """

    prefetch = RowStore.prefetch
    written_rows = RowStore.written_rows
    read, view = RowStore.read, RowStore.view
    files = None

    def __init__(self, table: Table, averages: TableAverages) -> None:
        super().__init__(table.store)
        self.averages = averages
        self.table = weakref.ref(table)
        name = f"average of {table.name}"
        self.facts = replace(table.store.facts, name=name, nbytes=None, is_borrowed=True, reads_copies=True)

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
        average, into = self.averages.of_rows(self.inner, rows, device), (out or {}).get("weight")
        return Block(rows, {"weight": average if into is None else into.copy_(average)})

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: object = None) -> None:
        self.averages.put(self.inner, block.rows, values["weight"], self.averages.count)

    def update(self, weights: Callable[[int, int], Tensor], share: float) -> None:
        """Let all averages take an update by other weights than those of the table.

        Args:
            weights: returns rows between two numbers.
            share: the update's share of an average.
        """
        with self.facts.locked.lock:
            self.notes.note_change(None)
            for rows in chunks_of(self.facts.num_embeddings):
                average = self.gather(ids_of(rows)).weight
                dtype = torch.promote_types(average.dtype, torch.float32)
                theirs = weights(rows.start, rows.stop).to(average.device, dtype)
                average = average.to(dtype).lerp(theirs, share).to(average.dtype)
                self.averages.put(self.inner, ids_of(rows), average, self.averages.count + 1)
            self.averages.count += 1

    def copied(self, memo: dict[int, Any]) -> Table | None:
        """Return a copy: a copied table's averages, or further averages of the same table; None if the table was
        freed."""
        table, ours = self.table(), self.averages
        if table is None:
            return None
        if (twin := memo.get(id(table))) is not None:
            return Table(AveragesStore(twin, TableAverages(ours.decay, ours.count).lie_in(twin, ours.average.name)))
        found = AveragesStore(table, TableAverages(ours.decay).take_up(table))
        found.averages.count = ours.count - 1
        found.update(partial(self.read, "weight"), 1)
        return Table(found)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.scatter(Block(torch.arange(start, start + len(values)), {}), {column: values})

    def add_columns(self, columns: Sequence[Column]) -> None:
        raise TypeError(f"{self.facts.name} is of one column, and is not trained; train the embedding it was made of")

    reset_columns = add_columns

    def close(self) -> None:
        return None


def _count_of(noted: Any, decay: float | None) -> int | None:
    """Return the number of updates that an attribute has for averages of a decay; None if it has none."""
    if isinstance(noted, list) and noted[1:] == [decay] and is_int(noted[0], 0, 2**31 - 2):
        return int(noted[0])
    return None
