"""Features of tables with id maps: keys are mapped to rows before features are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.swapping.collections.features import FeatureBatch, Slots, read_features, read_slots
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.collections.jagged import GivenFeature, KeyedFeatures, at_door, given_feature
from speedswap.swapping.keyed import AskedLookup, KeyedLookup, KeyedRows, ask_all, find_all, take_all


class AskedOfTable(NamedTuple):
    """The keys of one table that were added to its map ahead of their turn."""

    keyed: KeyedRows
    asked: AskedLookup


def read(
    features: Any, slots: Slots, is_weighted: bool, *, ahead: bool
) -> tuple[FeatureBatch, list[list[AskedOfTable]]]:
    """Read features, mapping keys to rows if a table has an id map.

    Args:
        features: the features, as passed to a collection.
        slots: the collection's.
        is_weighted: True if every id has a weight.
        ahead: True before the batch's turn, inside a lookahead.

    Returns:
        The batch, and each group's keys that were added ahead. Keys owned by ranks are not added ahead, and have row 0
        then.
    """
    groups, asked = slots.groups, [list[AskedOfTable]() for _ in slots.groups]
    if not any(group.keyed for group in groups):
        return read_features(features, slots, is_weighted), asked
    given = at_door(features)
    named = given.by_key() if isinstance(given, KeyedFeatures) else given
    slots.require_features(list(named))
    values = [named[name] for name in slots.features]
    parts = [given_feature(name, named[name], takes_keys=True) for name in slots.features]
    tensors = (each for part in parts for each in (part.offsets, part.ids, part.weights) if isinstance(each, Tensor))
    device = next((each.device for each in tensors), None)  # None for strings alone
    tables = [
        _KeysOfTable(index, group, keyed, values, slots.of_table[name], parts, device or group.weight.device)
        for index, group in enumerate(groups)
        for name, keyed in group.keyed.items()
    ]
    trained = [table for table in tables if table.group._adds()]
    if ahead and any(group.has_keys_of_ranks for group in groups):
        for table in tables:  # their groups are looked up at the batch's turn
            table.put(torch.zeros(1, dtype=torch.int64, device=table.device).expand(_shape(table.keys)))
        return read_slots(values, slots, is_weighted), asked
    known = [table for table in tables if table not in trained]
    for table, rows in zip(known, find_all([table.lookup() for table in known]), strict=True):
        table.put(rows)
    if ahead:
        for table, lookup in zip(trained, ask_all([table.lookup(ahead=True) for table in trained]), strict=True):
            asked[table.index].append(AskedOfTable(table.keyed, lookup))
            table.put(lookup.asked.rows.to(table.device))
    elif trained:
        return _taken(trained, slots, values, is_weighted), asked
    return read_slots(values, slots, is_weighted), asked


def _taken(tables: Sequence[_KeysOfTable], slots: Slots, values: list[Any], is_weighted: bool) -> FeatureBatch:
    """Read a training lookup, mapping keys to rows in all keyed tables or in none.

    Raises:
        IdMapFullError, IdError, TypeError, ValueError: the batch cannot be looked up. No map has changed.
    """
    lookups = [table.keyed.lookup(table.keys, table.device)._replace(parts=table.counts) for table in tables]
    known = [lookup.rows for lookup in lookups]
    zeros: dict[Any, Tensor] = {}  # one map for similar tables, so that their features are read as one tensor
    for table, rows in zip(tables, known, strict=True):
        if rows is None:
            alike = shape, device = _shape(table.keys), table.device
            if alike not in zeros:
                zeros[alike] = torch.zeros(1, dtype=torch.int64, device=device).expand(shape)
            rows = zeros[alike]
        table.put(rows)
    found = read_slots(values, slots, is_weighted)
    if found.require_offsets is not None or sum(len(table.places) for table in tables) < len(slots):
        found.require_inside()
    taken = take_all(lookups)
    if all(now is before for now, before in zip(taken, known, strict=True)):
        return found
    for table, rows in zip(tables, taken, strict=True):
        table.put(rows)
    return read_slots(values, slots, is_weighted)


@dataclass(eq=False)
class _KeysOfTable:
    """The keys of one table's features, added together so that none evicts another of the same batch.

    Attributes:
        index, group: the table's group, and the group's index in the collection.
        keyed: the table's id map.
        values: each slot's value, in which rows replace keys.
        places: the slots of the table's features.
        parts: the features of all slots; then those of the table.
        device: where rows are needed.
        keys: all keys.
    """

    index: int
    group: TableGroup
    keyed: KeyedRows
    values: list[Any]
    places: range
    parts: list[GivenFeature]
    device: torch.device

    def __post_init__(self) -> None:
        self.parts = self.parts[self.places.start : self.places.stop]
        self.keys = _joined([part.ids for part in self.parts])

    @property
    def counts(self) -> list[int]:
        """The number of keys of each feature."""
        return [_count(part.ids) for part in self.parts]

    def lookup(self, *, ahead: bool = False) -> KeyedLookup:
        """Return the lookup of all keys."""
        device = self.group.weight.device if ahead and self.device.type == "cpu" else self.device
        return KeyedLookup(self.keyed, self.keys, device)

    def put(self, rows: Tensor) -> None:
        """Replace the keys with rows."""
        pieces = [rows] if len(self.parts) == 1 else torch.split(rows.reshape(-1), self.counts)
        for place, part, piece in zip(self.places, self.parts, pieces, strict=True):
            self.values[place] = part.with_rows(piece if len(self.parts) == 1 else piece.view(_shape(part.ids)))


def _joined(keys: Sequence[Any]) -> Any:
    """Return the keys of several features as one batch of them."""
    if len(keys) == 1:
        return keys[0]
    if all(isinstance(each, Tensor) for each in keys):
        return torch.cat([each.reshape(-1) for each in keys])
    flat = [each.reshape(-1) if hasattr(each, "reshape") else each for each in keys]
    return [key for each in flat for key in (each.tolist() if hasattr(each, "tolist") else each)]


def _count(keys: Any) -> int:
    return keys.numel() if isinstance(keys, Tensor) else int(getattr(keys, "size", len(keys)))


def _shape(keys: Any) -> tuple[int, ...]:
    return tuple(keys.shape) if hasattr(keys, "shape") else (len(keys),)
