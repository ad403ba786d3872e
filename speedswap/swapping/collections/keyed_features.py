"""Features of tables with id maps: keys become rows before they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.swapping.collections.given import Given, given, given_by_slot, require_features
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedJaggedTensor
from speedswap.swapping.collections.pieces import has_methods
from speedswap.swapping.collections.slots import Slots
from speedswap.swapping.keyed import AskedLookup, Claim, KeyedRows

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
        The batch, and the questions to each group's maps that were asked ahead.
    """
    asked: list[list[AskedOfTable]] = [[] for _ in groups]
    if not any(group.keyed for group in groups):
        return given(features, slots, is_weighted), asked
    named = _by_key(require_features(features))
    slots.require_features(list(named))
    values = [named[name] for name in slots.features]
    device = _device_among(values)
    tables = [
        _KeysOfTable.of(index, group, name, slots, values, device)
        for index, group in enumerate(groups)
        for name in group.keyed
    ]
    if ahead:
        for table in tables:
            if table.adds:
                lookup = table.keyed.ask(table.keys, table.target_ahead)
                asked[table.group].append(AskedOfTable(table.keyed, lookup))
                table.put(lookup.asked.rows.to(table.device), values)
            else:
                table.put(table.keyed.rows(table.keys, table.device, adds=False), values)
    elif any(table.adds for table in tables):
        _take_rows(tables, slots, values, is_weighted)
    else:
        for table in tables:
            table.put(table.keyed.rows(table.keys, table.device, adds=False), values)
    return given_by_slot(values, slots, is_weighted), asked


def _take_rows(tables: Sequence[_KeysOfTable], slots: Slots, values: list[Any], is_weighted: bool) -> None:
    """Put the rows of a training lookup in place of the keys of all tables, or of none.

    Raises:
        IdMapFullError, IdError, TypeError, ValueError: the batch cannot be looked up. No map has changed.
    """
    tried = list(values)
    for table in tables:
        table.put(torch.zeros(table.shape, dtype=torch.int64, device=table.device), tried)
    given_by_slot(tried, slots, is_weighted).require_inside()
    claims = []
    try:
        for table in tables:
            claims.append(table.claim())
    except BaseException:
        for claim in claims:
            claim.give_up()
        raise
    for table, claim in zip(tables, claims, strict=True):
        table.put(claim.take(), values)


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

    @classmethod
    def of(
        cls, index: int, group: TableGroup, name: str, slots: Slots, values: Sequence[Any], device: torch.device | None
    ) -> _KeysOfTable:
        """Return the keys of a table among what each slot was given; device is the batch's, None for strings alone."""
        places = slots.of_table[name]
        parts = [_parted(values[place]) for place in places]
        target = device or group.weight.device
        ahead = group.weight.device if target.type == "cpu" else target
        keys = _joined([part.keys for part in parts])
        return cls(index, group.keyed[name], group._adds(), places, parts, keys, target, ahead)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return _shape(self.keys)

    def claim(self) -> Claim:
        """Make sure that the keys can have rows, if they are to get any."""
        if self.adds:
            return self.keyed.claim(self.keys, self.device)
        return Claim(lambda: self.keyed.rows(self.keys, self.device, adds=False), lambda: None)

    def put(self, rows: Tensor, values: list[Any]) -> None:
        """Put rows in place of the keys."""
        if len(self.parts) == 1:
            values[self.places[0]] = self.parts[0].around(rows)
            return
        pieces = torch.split(rows.reshape(-1), [_count(part.keys) for part in self.parts])
        for place, part, piece in zip(self.places, self.parts, pieces, strict=True):
            values[place] = part.around(piece.view(_shape(part.keys)))


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
    if isinstance(value, tuple | list) and value and not isinstance(value[0], str | bytes):
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
