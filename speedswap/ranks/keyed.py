"""Rows of keys, in tables whose rows and keys are owned by ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speedswap.ranks.keys import ShardedIdMap
from speedswap.swapping.keyed import KeyedLookup, KeyedRows
from speedswap.swapping.row_step import RowStep
from speedswap.tables import IdMap, Table


class ShardedKeys(KeyedRows):
    """The id map of a table whose keys and rows are owned by ranks.

    Args:
        id_map, table, step, first_row: as for :class:`KeyedRows`.
        reset_rows: resets rows in the table and the step; every rank must call it.
    """

    is_over_ranks = True
    id_map: ShardedIdMap

    def __init__(
        self, id_map: IdMap, table: Table, step: RowStep, first_row: int, reset_rows: Callable[[Tensor], None]
    ) -> None:
        super().__init__(id_map, table, step, first_row)
        self.reset_rows = reset_rows
        renew = weakref.WeakMethod(self._renew)
        self.id_map.renew = lambda rows: (found := renew()) and found(rows)

    def _renew(self, rows: Tensor) -> None:
        """Reset rows that no training lookup of this rank requested; every rank must call this."""
        try:
            self.reset_rows(rows + self.first_row)
        except BaseException:
            self.id_map.renew_later(rows)
            raise

    @staticmethod
    def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        found = ShardedIdMap.look_up_all([_map_of(each) for each in lookups], [each.given for each in lookups])
        return [rows.to(each.device) for rows, each in zip(found, lookups, strict=True)]

    @staticmethod
    def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        maps = [_map_of(each) for each in lookups]
        added = ShardedIdMap.add_all(maps, [each.given for each in lookups], [each.parts for each in lookups])
        if any(each.is_any_renewed for each in added):
            renewed: dict[Callable[[Tensor], None], list[Tensor]] = {}  # by the step's reset_rows
            for each, own in zip(lookups, added, strict=True):
                assert isinstance(each.table, ShardedKeys)
                renewed.setdefault(each.table.reset_rows, []).append(own.renewed + each.table.first_row)
            try:
                for reset_rows, rows in renewed.items():
                    reset_rows(torch.cat(rows))
            except BaseException:
                for id_map, own in zip(maps, added, strict=True):
                    id_map.renew_later(own.renewed)
                raise
        return [own.rows.to(each.device) for each, own in zip(lookups, added, strict=True)]


def _map_of(lookup: KeyedLookup) -> ShardedIdMap:
    """Return the map of a lookup, in a collection whose keys are all owned by ranks."""
    assert isinstance(lookup.table, ShardedKeys)
    return lookup.table.id_map
