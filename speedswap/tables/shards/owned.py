"""The initial values of the rows that a rank owns: those that the rows of the whole table have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedswap.tables.init import ColumnMemory, CopyOf, Initializer, from_json
from speedswap.tables.record import Column
from speedswap.tables.shards.owners import Owners

__all__ = ["OwnedRows", "owned_column", "whole_column", "whole_columns"]


@dataclass(frozen=True)
class OwnedRows(Initializer):
    """Initial values by the ids of rows, for the store of the rank that owns them.

    Args:
        init: of the whole table.
        owners: where its rows are.
        rank: the one whose rows these are.
        zero_row: an id that starts as zeros whatever ``init`` says.
    """

    init: Initializer
    owners: Owners
    rank: int
    zero_row: int | None = None
    kind: ClassVar[str] = "owned"

    @property
    def is_zero(self) -> bool:
        return self.init.is_zero

    @property
    def is_given(self) -> bool:
        return self.init.is_given

    @property
    def is_function_of_row(self) -> bool:
        return self.init.is_function_of_row

    def fill(self, target: ColumnMemory, first_row: int, num_rows: int) -> None:
        self._fill(target.rows(first_row, num_rows), target, torch.arange(first_row, first_row + num_rows))

    def fill_rows(self, target: ColumnMemory, rows: Tensor) -> None:
        self._fill(target.view, target, rows)

    def _fill(self, into: Tensor, of: ColumnMemory, places: Tensor) -> None:
        ids, order = self.owners.ids(places, self.rank).sort()
        used = ids < self.owners.num_embeddings
        ids, order = ids[used], order[used]
        shape, dtype = tuple(of.view.shape[1:]), of.view.dtype
        # In host memory, where rows can be filled by their ids.
        whole = of.chunk(0, len(ids), shape, self.owners.num_embeddings, of.seed, of.key, torch.device("cpu"), dtype)
        self.init.fill_rows(whole, ids)
        if self.zero_row is not None and not self.is_given:
            whole.view[ids == self.zero_row] = 0
        if not used.all():
            into.zero_()
        into[order.to(into.device)] = whole.view.to(into.device)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "init": self.init.to_json(),
            "num_embeddings": self.owners.num_embeddings,
            "world_size": self.owners.world_size,
            "rank": self.rank,
            "zero_row": self.zero_row,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OwnedRows | None:
        """Return what :meth:`to_json` described; None if the values cannot be computed again.

        Raises:
            TypeError, ValueError, KeyError: the data describe no rows of a rank.
        """
        counts = [data[name] for name in ("num_embeddings", "world_size", "rank")]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in counts):
            raise TypeError(f"init has {counts!r}; numbers of rows, of ranks and of a rank were expected")
        num_embeddings, world_size, rank = counts
        zero_row, init = data["zero_row"], from_json(data["init"])
        is_row = zero_row is None or (isinstance(zero_row, int) and 0 <= zero_row < num_embeddings)
        if not (1 <= num_embeddings < 2**62 and 1 <= world_size <= 2**20 and 0 <= rank < world_size and is_row):
            raise ValueError(f"init is of rank {rank} of {world_size}, with {num_embeddings} rows, row {zero_row} zero")
        return None if init is None else cls(init, Owners(num_embeddings, world_size), rank, zero_row)


def whole_column(column: Column) -> Column:
    """Return a column of the whole table, given that of the rows that a rank owns."""
    if not isinstance(column.init, OwnedRows):
        return column
    return replace(column, init=column.init.init, zero_row=column.init.zero_row)


def whole_columns(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of the whole table, given those of the rows that a rank owns."""
    return {name: whole_column(column) for name, column in columns.items()}


def owned_column(column: Column, owners: Owners, rank: int) -> Column:
    """Return a column of the whole table as the rank has it that owns some of the rows."""
    if isinstance(column.init, CopyOf):
        return column
    return replace(column, init=OwnedRows(column.init, owners, rank, column.zero_row), zero_row=None)
