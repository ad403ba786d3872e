"""The rows that keys get which ranks own: for all lookups of a collection by one exchange."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap.ranks.keys import ShardedIdMap
from speedswap.swapping.keyed import KeyedLookup, KeyedRows
from speedswap.tables import IdMap, Table

if TYPE_CHECKING:
    from speedswap.ranks.step import ShardedStep

__all__ = ["ShardedKeys"]


class ShardedKeys(KeyedRows):
    """The id map of a table whose keys and rows ranks own.

    Args:
        id_map, table, step, first_row: as for :class:`KeyedRows`.
    """

    is_over_ranks = True
    id_map: ShardedIdMap
    step: ShardedStep

    def __init__(self, id_map: IdMap, table: Table, step: ShardedStep, first_row: int) -> None:
        super().__init__(id_map, table, step, first_row)
        start_anew = weakref.WeakMethod(self._start_anew)
        self.id_map.renew = lambda rows: (found := start_anew()) and found(rows)

    def _start_anew(self, rows: Tensor) -> None:
        """Let rows start anew that no training lookup of this rank has asked for; every rank calls this."""
        try:
            self.step.start_anew(rows + self.first_row)
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
            renewed: dict[ShardedStep, list[Tensor]] = {}
            for each, own in zip(lookups, added, strict=True):
                assert isinstance(each.table, ShardedKeys)
                renewed.setdefault(each.table.step, []).append(own.renewed + each.table.first_row)
            try:
                for step, rows in renewed.items():
                    step.start_anew(torch.cat(rows))
            except BaseException:
                for id_map, own in zip(maps, added, strict=True):
                    id_map.renew_later(own.renewed)
                raise
        return [own.rows.to(each.device) for each, own in zip(lookups, added, strict=True)]


def _map_of(lookup: KeyedLookup) -> ShardedIdMap:
    """Return the map of a lookup, of a collection whose keys are all owned by ranks."""
    assert isinstance(lookup.table, ShardedKeys)
    return lookup.table.id_map
