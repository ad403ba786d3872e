"""Features of tables with id maps: keys become rows before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.swapping.collections.given import Given, given, given_by_slot, require_features
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedJaggedTensor
from speedswap.swapping.collections.pieces import has_methods
from speedswap.swapping.collections.slots import Slots
from speedswap.swapping.keyed import AskedLookup, KeyedLookup, KeyedRows, ask_all, find_all, take_all
from speedswap.tables import is_single_key

__all__ = ["AskedOfTable", "read"]


class AskedOfTable(NamedTuple):
    """The keys of one table that its map was asked for ahead of their turn."""

    keyed: KeyedRows
    asked: AskedLookup


def read(
    features: Any, slots: Slots, groups: Sequence[TableGroup], is_weighted: bool, *, ahead: bool
) -> tuple[Given, list[list[AskedOfTable]]]:
    """Read features, whose keys become rows where a table has an id map.

    Args:
        features: as a collection is called with them.
        slots, groups: the collection's.
        is_weighted: True if every id has a weight.
        ahead: True before the batch's turn, inside a lookahead.

    Returns:
        The batch, and the questions to each group's maps that were asked ahead. Keys that ranks own are not asked for
        ahead, and have row 0 then.
    """
    if not any(group.keyed for group in groups):
        return given(features, slots, is_weighted), [[] for _ in groups]
    asked: list[list[AskedOfTable]] = [[] for _ in groups]
    named = _by_key(require_features(features))
    slots.require_features(list(named))
    values = [named[name] for name in slots.features]
    device = _device_among(values)
    tables = [table for index, group in enumerate(groups) for table in _keys_of(index, group, slots, values, device)]
    if ahead and any(group.has_keys_of_ranks for group in groups):
        for table in tables:  # their groups are looked up when the turn comes
            table.put(torch.zeros(1, dtype=torch.int64, device=table.device).expand(_shape(table.keys)), values)
        return given_by_slot(values, slots, is_weighted), asked
    known = [table for table in tables if not table.adds]
    for table, rows in zip(known, find_all([table.lookup() for table in known]), strict=True):
        table.put(rows, values)
    trained = [table for table in tables if table.adds]
    if ahead:
        lookups = ask_all([table.lookup(table.target_ahead) for table in trained])
        for table, lookup in zip(trained, lookups, strict=True):
            asked[table.group].append(AskedOfTable(table.keyed, lookup))
            table.put(lookup.asked.rows.to(table.device), values)
    elif trained:
        return _taken(trained, slots, values, is_weighted), asked
    return given_by_slot(values, slots, is_weighted), asked


def _taken(tables: Sequence[_KeysOfTable], slots: Slots, values: list[Any], is_weighted: bool) -> Given:
    """Read a training lookup, with rows in place of the keys of some tables: of all of them, or of none.

    Raises:
        IdMapFullError, IdError, TypeError, ValueError: the batch cannot be looked up. No map has changed.
    """
    lookups = [table.keyed.lookup(table.keys, table.device)._replace(parts=table.counts) for table in tables]
    known = [lookup.rows for lookup in lookups]
    zeros: dict[Any, Tensor] = {}
    for table, rows in zip(tables, known, strict=True):
        if rows is None:
            alike = shape, device = _shape(table.keys), table.device
            if alike not in zeros:
                zeros[alike] = torch.zeros(1, dtype=torch.int64, device=device).expand(shape)
            rows = zeros[alike]
        table.put(rows, values)
    found = given_by_slot(values, slots, is_weighted)
    if sum(len(table.places) for table in tables) < len(slots):
        found.require_inside()
    taken = take_all(lookups)
    if all(now is before for now, before in zip(taken, known, strict=True)):
        return found
    for table, rows in zip(tables, taken, strict=True):
        table.put(rows, values)
    return given_by_slot(values, slots, is_weighted)


def _by_key(features: Any) -> Mapping[str, Any]:
    """Return features as a mapping; those of a keyed jagged tensor as jagged tensors."""
    if isinstance(features, Mapping):
        return features
    offsets = features.offsets() if has_methods(features, ["offsets"]) else None
    lengths = features.lengths() if offsets is None else None
    weights = features.weights_or_none() if has_methods(features, ["weights_or_none"]) else None
    keyed = KeyedJaggedTensor(features.keys(), features.values(), weights, lengths, offsets, features.stride())
    return keyed.to_dict()


@dataclass
class _KeysOfTable:
    """The keys of one table's features: asked for together, so that none takes the rows of another of the batch.

    Attributes:
        group: the index of the table's group.
        keyed: its id map.
        adds: True if keys get rows; False if they are only looked up.
        places: the slots of its features.
        parts: what each of these was given.
        keys: all keys.
        device: where rows are needed.
        target_ahead: the same, before the batch's turn.
    """

    group: int
    keyed: KeyedRows
    adds: bool
    places: range
    parts: list[_Parted]
    keys: Any
    device: torch.device
    target_ahead: torch.device

    @property
    def counts(self) -> list[int]:
        """The number of keys of each feature."""
        return [_count(part.keys) for part in self.parts]

    def lookup(self, device: torch.device | None = None) -> KeyedLookup:
        """Return the lookup of all keys, on a device; by default the one where rows are needed."""
        return KeyedLookup(self.keyed, self.keys, device or self.device)

    def put(self, rows: Tensor, values: list[Any]) -> None:
        """Put rows in place of the keys."""
        if len(self.parts) == 1:
            values[self.places[0]] = self.parts[0].around(rows)
            return
        pieces = torch.split(rows.reshape(-1), self.counts)
        for place, part, piece in zip(self.places, self.parts, pieces, strict=True):
            values[place] = part.around(piece.view(_shape(part.keys)))


def _keys_of(
    index: int, group: TableGroup, slots: Slots, values: Sequence[Any], device: torch.device | None
) -> Iterator[_KeysOfTable]:
    """Yield the keys of a group's tables, of what each slot was given; device is None for strings alone."""
    adds = group._adds()
    target = device or group.weight.device
    ahead = group.weight.device if target.type == "cpu" else target
    for name, keyed in group.keyed.items():
        places = slots.of_table[name]
        parts = [_parted(values[place]) for place in places]
        yield _KeysOfTable(index, keyed, adds, places, parts, _joined([part.keys for part in parts]), target, ahead)


def _device_among(values: Sequence[Any]) -> torch.device | None:
    """Return the device of the first tensor among features; None for strings alone."""
    for value in values:
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, Tensor):
                return each.device
            if has_methods(each, ["values", "offsets"]):
                device: torch.device = each.offsets().device
                return device
    return None


class _Parted(NamedTuple):
    """The keys of a feature, and a function that puts rows in their place."""

    keys: Any
    around: Callable[[Tensor], Any]


def _parted(value: Any) -> _Parted:
    if isinstance(value, Tensor) and not value.is_nested:
        return _Parted(value, lambda rows: rows)
    if isinstance(value, tuple | list) and value and not is_single_key(value[0]):
        keys, *rest = value
        return _Parted(keys, lambda rows: (rows, *rest))
    if has_methods(value, ["values", "offsets"]):
        jagged: Any = value.contiguous() if isinstance(value, Tensor) else value
        weights = jagged.weights_or_none() if has_methods(jagged, ["weights_or_none"]) else None
        offsets = jagged.offsets()
        return _Parted(jagged.values(), lambda rows: JaggedTensor(rows, weights, offsets=offsets.to(rows.device)))
    return _Parted(value, lambda rows: rows)


def _joined(keys: Sequence[Any]) -> Any:
    """Return the keys of several features as one batch of them."""
    if len(keys) == 1:
        return keys[0]
    if all(isinstance(each, Tensor) for each in keys):
        return torch.cat([each.reshape(-1) for each in keys])
    return [key for each in keys for key in _listed(each)]


def _listed(keys: Any) -> list[Any]:
    """Return strings of NumPy, pyarrow or Python as a list."""
    if hasattr(keys, "reshape"):
        keys = keys.reshape(-1)
    return keys.tolist() if hasattr(keys, "tolist") else list(keys)


def _count(keys: Any) -> int:
    return keys.numel() if isinstance(keys, Tensor) else int(getattr(keys, "size", len(keys)))


def _shape(keys: Any) -> tuple[int, ...]:
    return tuple(keys.shape) if hasattr(keys, "shape") else (len(keys),)
