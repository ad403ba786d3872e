"""A rank's own rows of a table that ranks own together: what it does with them without asking anybody."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import RankGroup
from speedswap.tables.files.manifest import MANIFEST, shard_name
from speedswap.tables.init import CHUNK_ROWS, CopyOf
from speedswap.tables.record import Block, Column
from speedswap.tables.shards.owners import Owners, owned_column, whole_columns
from speedswap.tables.store import Files, RowStore, WrappedStore
from speedswap.tables.table import Table

if TYPE_CHECKING:
    from speedswap.kernels import Transfers
    from speedswap.ranks.ahead import RowsAhead
    from speedswap.tables.store import Checked

__all__ = ["OwnedStore"]


class OwnedStore(RowStore, Files):
    """The part of a table's rows that a rank owns, described as the whole table.

    Args:
        own: the rows of this rank, at the places that ``owners`` gives them.
        owners: which rank owns a row.
        group: the ranks.
        name: for messages.
        weight: the column of the whole table's weights.

    Attributes:
        own: the table of this rank's rows.
    """

    group: RankGroup

    def __init__(self, own: RowStore, owners: Owners, group: RankGroup, *, name: str, weight: Column) -> None:
        self._watched = _OwnRows(own, owners, group.rank)
        self.own = Table(self._watched)
        self.owners = owners
        self.group = group
        self.num_embeddings = owners.num_embeddings
        self.storage, self.engine, self.seed = own.storage, own.engine, own.seed
        self.name = name
        self.notes = own.notes  # the maps' part that this rank owns is kept with its rows
        self._weight = weight

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        own = self.own.columns
        return {**whole_columns(own), "weight": replace(self._weight, rounding=own["weight"].rounding)}

    @property
    def files(self) -> Files | None:
        return None if self.own.store.files is None else self

    @property
    def closed(self) -> bool:
        return self.own.closed

    @property
    def pinned(self) -> bool:
        return self.own.pinned

    def note_change(self, rows: Tensor | range | None) -> None:
        """Leave it to the owner's table, which notes a change where it is made."""

    def check(self, *, writing: bool = False) -> bool:
        return self.own.store.check(writing=writing)

    def watch(self, ahead: RowsAhead) -> None:
        """Let rows ahead of their step note from now on which of the own rows change; the own table's lock is held."""
        self._watched.ahead.add(ahead)

    def unwatch(self, ahead: RowsAhead) -> None:
        """Let rows ahead of their step note no more changes; the own table's lock is held."""
        self._watched.ahead.discard(ahead)

    # ------------------------------------------------------------------ whole columns

    def write(self, column: str, start: int, values: Tensor) -> None:
        """Overwrite rows; every rank calls this with the same values, and writes its own."""
        for first in range(0, len(values), CHUNK_ROWS):
            some = values[first : first + CHUNK_ROWS]
            ids = torch.arange(start + first, start + first + len(some))
            mine = self.owners.of(ids) == self.group.rank
            if mine.any():
                self._put(column, self.owners.places(ids[mine], self.group.rank), some[mine.to(some.device)])

    def _put(self, column: str, places: Tensor, values: Tensor) -> None:
        """Overwrite own rows of a column: rounded to nearest, and not counted among the scatters."""
        held = self.own.columns[column]
        if held.compact and held.rounding == "stochastic":
            values = values.to(held.stored_dtype).to(held.dtype)  # which no rounding changes
        order, writes = places.argsort(), self.notes.writes
        if len(places):
            self.own.give_back(Block(places[order], {}), {column: values[order.to(values.device)]})
            self.notes.writes = writes

    def reserve(self, columns: Collection[str]) -> None:
        self.own.reserve(columns)

    def add_columns(self, columns: Sequence[Column]) -> None:
        self.own.add_columns(self._owned_alike(columns))

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.own.reset_columns(self._owned_alike(columns))

    def _owned_alike(self, columns: Sequence[Column]) -> list[Column]:
        """Return this rank's part of columns, which are the same on all ranks; none has changed one until all come."""
        described = {
            f"column {each.name!r}": (each.row_shape, each.dtype, each.init.to_json(), each.zero_row, each.stored)
            for each in columns
        }
        self.group.require_same_settings(f"table {self.name!r}", described)
        return [self._owned(column) for column in columns]

    def _owned(self, column: Column) -> Column:
        if isinstance(column.init, CopyOf) and column.zero_row is not None:
            raise ValueError(
                f"zero_row of column {column.name!r} is {column.zero_row}, but it begins as a copy of "
                f"{column.init.column!r}, and ranks own table {self.name!r}; scatter zeros to that row instead"
            )
        return owned_column(column, self.owners, self.group.rank)

    # ------------------------------------------------------------------ steps and lifetime

    def drain(self) -> None:
        self.own.drain()

    def commit(self) -> None:
        self.own.commit()

    def flush(self) -> None:
        self.own.flush()

    def close(self) -> None:
        self.own.close()

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this rank's own files are part of a table there."""
        own = self.own.store.files
        return own is not None and own.lives_at(Path(path) / shard_name(self.group.rank, len(self.group)))

    def verify(self, advance: Callable[[float], object]) -> Checked:
        assert self.own.store.files is not None
        return self.own.store.files.verify(advance)

    def remove(self) -> None:
        place = self.own.path
        if place is not None:  # first what makes shards a table; of ranks that share the directory, one finds it
            place.with_name(MANIFEST).unlink(missing_ok=True)
        self.own.remove()
        if place is not None:
            with suppress(OSError):  # another rank's rows are there
                place.parent.rmdir()


class _OwnRows(WrappedStore):
    """A rank's rows, rounded in a scatter as one process would round them: by their ids, not by their places.

    Args:
        inner: the rows.
        owners: of the table.
        rank: this one.

    Attributes:
        ahead: rows that were lent ahead of their step, and note which of them change.
    """

    def __init__(self, inner: RowStore, owners: Owners, rank: int) -> None:
        super().__init__(inner)
        self._owners = owners
        self._rank = rank
        self.ahead: weakref.WeakSet[RowsAhead] = weakref.WeakSet()

    def note_change(self, rows: Tensor | range | None) -> None:
        super().note_change(rows)
        for each in self.ahead:
            each.note_change(rows)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        rounded: dict[str, Tensor] = {}
        for name, tensor in values.items():
            column = self.columns[name]
            if column.compact and column.rounding == "stochastic":
                tensor = tensor.clone()
                key = kernels.rounding_key(self.seed, column.key, self.notes.writes)
                ids = self._owners.ids(block.rows.cpu(), self._rank).to(tensor.device)
                kernels.round_rows(tensor, ids, kernels.Stored(column.stored_dtype, key))
            rounded[name] = tensor
        self.inner.scatter(block, rounded, transfers)
