"""Features of tables with id maps: keys become rows before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.swapping.collections.given import Given, given, given_by_slot, require_features
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedJaggedTensor
from speedswap.swapping.collections.pieces import has_methods
from speedswap.swapping.collections.slots import Slots
from speedswap.swapping.keyed import AskedLookup, KeyedRows

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
    for group, questions in zip(groups, asked, strict=True):
        questions += _rows_of_keys(group, slots, values, device, ahead=ahead)
    return given_by_slot(values, slots, is_weighted), asked


def _by_key(features: Any) -> Mapping[str, Any]:
    """Return features as a mapping; those of a keyed jagged tensor as jagged tensors."""
    if isinstance(features, Mapping):
        return features
    offsets = features.offsets() if has_methods(features, ["offsets"]) else None
    lengths = features.lengths() if offsets is None else None
    weights = features.weights_or_none() if has_methods(features, ["weights_or_none"]) else None
    keyed = KeyedJaggedTensor(features.keys(), features.values(), weights, lengths, offsets, features.stride())
    return keyed.to_dict()


def _rows_of_keys(
    group: TableGroup, slots: Slots, values: list[Any], device: torch.device | None, *, ahead: bool
) -> Iterator[AskedOfTable]:
    """Replace the keys of a group's tables that have an id map by their rows.

    All keys of a table are asked for together, so that no feature takes the rows of another one of the same batch.

    Args:
        group: the tables.
        slots: the collection's.
        values: what each slot was given; changed in place.
        device: of the batch; where rows are needed by default.
        ahead: True before the batch's turn, inside a lookahead.

    Yields:
        The questions to maps that were asked ahead.
    """
    for name, keyed in group.keyed.items():
        places = slots.of_table[name]
        parts = [_parted(values[place]) for place in places]
        keys = _joined([part.keys for part in parts])
        target = device or group.weight.device
        adds = group._adds()
        if ahead and adds:
            asked = keyed.ask(keys, group.weight.device if target.type == "cpu" else target)
            yield AskedOfTable(keyed, asked)
            rows = asked.asked.rows.to(target)
        else:
            rows = keyed.rows(keys, target, adds=adds)
        if len(parts) == 1:
            values[places[0]] = parts[0].around(rows)
            continue
        pieces = torch.split(rows.reshape(-1), [_count(part.keys) for part in parts])
        for place, part, piece in zip(places, parts, pieces, strict=True):
            shape = part.keys.shape if hasattr(part.keys, "shape") else (len(part.keys),)
            values[place] = part.around(piece.view(tuple(shape)))


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
