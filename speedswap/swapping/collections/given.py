"""The lookups of a batch as a collection is given them, read for all tables at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.swapping.collections.jagged import KeyedJaggedTensor, offsets_of
from speedswap.swapping.collections.pieces import Piece, has_methods, piece_of, require_ids, require_weights
from speedswap.swapping.collections.slots import Slots
from speedswap.swapping.collections.small_tensors import near, positions, steps
from speedswap.swapping.graphs import leaving_transforms

__all__ = ["Given", "given", "given_by_slot", "require_features"]

_KEYED = ("keys", "values", "stride")


class Given:
    """The ids of a batch, slot after slot, and in each slot bag after bag.

    Args:
        slots: the collection's.
        asked: the ids, and the tables' ranges of rows.
        counts: the number of each slot's ids, int64, shape (slots,), on the CPU.
        stride: bags in each slot.
        offsets: each bag's first id, and the number of ids, int64, shape (slots · stride + 1,), on the ids' device.
        is_single: True if every bag has one id.
        weights: a factor per id, shape (ids,), or None.
        by_name: each slot's ids, as they were given; empty for a keyed batch.
        announced: for a keyed batch: the tensors that its ids depend on.

    Attributes:
        starts: the place of each slot's first id, and the number of ids.
    """

    def __init__(
        self,
        slots: Slots,
        asked: kernels.FeatureIds,
        counts: Tensor,
        stride: int,
        offsets: Tensor,
        *,
        is_single: bool = False,
        weights: Tensor | None = None,
        by_name: Sequence[Tensor] = (),
        announced: tuple[Tensor, ...] = (),
    ) -> None:
        self.slots = slots
        self.counts = counts
        self.stride = stride
        self.offsets = offsets
        self.is_single = is_single
        self.weights = weights
        self.device = offsets.device
        self._asked = asked
        self._by_name = by_name
        self._announced = announced
        self.starts = [0, *counts.cumsum(0).tolist()]

    @functools.cached_property
    @leaving_transforms
    def _rows(self) -> Tensor:
        return kernels.merge_ids(self._asked)

    @functools.cached_property
    @leaving_transforms
    def _are_inside(self) -> bool:
        """True if no lookup of one group's rows is left to find an id that is outside of another group's table."""
        return not self._rows.shape[0] or int(self._rows.min()) >= 0

    def rows(self, group: int, *, checked: bool = False) -> Tensor:
        """Return a group's rows, int64, shape (ids,); -1 for an id that is outside of its table.

        Args:
            group: its index.
            checked: raise IdError for such an id of any group, where a lookup of this one would not find it.
        """
        if checked and len(self.slots.of_group) > 1 and not self._are_inside:
            raise self.outside(IdError("an id is outside of its table"))
        return self._rows[slice(*self.bounds(group))]

    def require_inside(self) -> None:
        """Raise IdError if an id is outside of its table. On a GPU this waits for the ids."""
        if len(self._rows) and int(self._rows.min()) < 0:
            raise self.outside(IdError("an id is outside of its table"))

    def bounds(self, group: int) -> tuple[int, int]:
        """Return the places of a group's first id, and past its last."""
        some = self.slots.of_group[group]
        return self.starts[some.start], self.starts[some.stop]

    def tensors(self, group: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors that a group's rows depend on; none if it has no ids.

        Args:
            group: its index.
            device: where its rows are needed.
        """
        begin, end = self.bounds(group)
        if begin == end:
            return ()
        if not self._by_name:
            return self._announced
        some = self.slots.of_group[group]
        if device.type != "cpu":  # known by their memory, where a comparison would wait for them
            return tuple(self._by_name[some.start : some.stop])
        assert isinstance(self._asked.ids, Tensor)
        return self._asked.ids[begin:end], self.counts[some.start : some.stop]

    @leaving_transforms
    def outside(self, error: IdError) -> IdError:
        """Return the error for the first id that is outside of its table, in place of one that does not name it."""
        found = kernels.first_outside(self._asked)
        if found is None:
            return error
        slot, position, value = found
        where = f"values()[{position}]"
        if self._by_name:
            places = torch.unravel_index(torch.tensor(position), self._by_name[slot].shape)
            where = f"ids[{', '.join(str(int(place)) for place in places)}]"
        return self.slots.outside(slot, where, value)


def given(features: Any, slots: Slots, is_weighted: bool) -> Given:
    """Read a mapping of features to ids, or an object with the methods of TorchRec's KeyedJaggedTensor.

    Raises:
        TypeError, ValueError: something is missing, unknown, or does not fit; the message names the feature.
    """
    if isinstance(require_features(features), Mapping):
        if features.keys() != slots.names:
            slots.require_features(list(features))
        return given_by_slot([features[name] for name in slots.features], slots, is_weighted)
    return _keyed(features, slots, is_weighted)


def require_features(features: Any) -> Any:
    """Return features, once they are known to be a mapping or a keyed jagged tensor."""
    if type(features) is dict:
        return features
    is_keyed = has_methods(features, _KEYED) and any(has_methods(features, [name]) for name in ("offsets", "lengths"))
    if has_methods(features, ["variable_stride_per_key"]) and features.variable_stride_per_key():
        raise ValueError("features has a stride for each of its keys; give every key one bag for each sample")
    if isinstance(features, Mapping) or is_keyed:
        return features
    raise TypeError(
        f"features is {a_kind(features)}; pass a mapping from each feature to its ids, or a KeyedJaggedTensor: an "
        "object with keys(), values(), stride(), and offsets() or lengths()"
    )


# ---------------------------------------------------------------------- by name


def given_by_slot(values: Sequence[Any], slots: Slots, is_weighted: bool) -> Given:
    """Read the ids of each slot, in any of the forms that a mapping may have; errors are those of :func:`given`."""
    if set(map(type, values)) == {Tensor}:
        kinds = {ids.is_nested or (ids.dtype, ids.shape, ids.device, ids.layout) for ids in values}
        if len(kinds) == 1 and True not in kinds:
            if is_weighted:
                raise _without_weights(slots.features[0])
            return _alike(values, slots)
    pieces = [piece_of(name, value) for name, value in zip(slots.features, values, strict=True)]
    first = pieces[0]
    stride, device, per_bag = first.stride, first.ids.device, first.per_bag
    for name, piece in zip(slots.features, pieces, strict=True):
        if piece.stride != stride or piece.ids.device != device:
            raise ValueError(
                f"feature {name!r} has {piece.stride} bags on {piece.ids.device}, but {slots.features[0]!r} has "
                f"{stride} on {device}; give every feature one bag for each sample, on one device"
            )
        if piece.weights is not None and not is_weighted:
            raise ValueError(f"feature {name!r} has weights, but is_weighted is False; make the collection with True")
        if piece.weights is None and is_weighted:
            raise _without_weights(name)
        if piece.per_bag != per_bag:
            per_bag = -1
    ids = [piece.ids for piece in pieces]
    counts = torch.tensor([each.numel() for each in ids], dtype=torch.int64)
    bags = len(slots) * stride
    offsets = _joined(pieces, slots, counts, stride) if per_bag < 0 else steps(bags + 1, per_bag, device)
    factors = [piece.weights.reshape(-1) for piece in pieces if piece.weights is not None]
    asked = kernels.FeatureIds(torch.cat([each.reshape(-1) for each in ids]), slots.bases, slots.limits, counts)
    return Given(
        slots,
        asked,
        counts,
        stride,
        offsets,
        is_single=per_bag == 1,
        weights=torch.cat(factors) if factors else None,
        by_name=ids,
    )


def _alike(values: Sequence[Tensor], slots: Slots) -> Given:
    """Read tensors of one shape, without a look at each: a thousand features are as many calls of Python."""
    _, stride, per_bag, _, _ = piece_of(slots.features[0], values[0])
    ids = torch.cat(tuple(values)).reshape(-1)
    counts = torch.full((len(slots),), stride * per_bag)
    offsets = steps(len(slots) * stride + 1, per_bag, ids.device)
    asked = kernels.FeatureIds(ids, slots.bases, slots.limits, counts)
    return Given(slots, asked, counts, stride, offsets, is_single=per_bag == 1, by_name=values)


def _joined(pieces: list[Piece], slots: Slots, counts: Tensor, stride: int) -> Tensor:
    """Return the offsets of all slots' bags."""
    device = pieces[0].ids.device
    starts = [
        steps(stride, piece.per_bag, device) if piece.offsets is None else piece.offsets[:stride].long()
        for piece in pieces
    ]
    ends = counts.cumsum(0)
    begins = near(torch.cat([ends - counts, ends[-1:]]), device)
    offsets = torch.cat(
        [(torch.cat(starts).view(len(slots), stride) + begins[:-1].unsqueeze(1)).reshape(-1), begins[-1:]]
    )
    firsts = offsets[:-1:stride] if stride else begins[:-1]
    wrong = (offsets[1:] < offsets[:-1]).any() | (firsts != begins[:-1]).any()
    closed = [index for index, piece in enumerate(pieces) if piece.offsets is not None and len(piece.offsets) > stride]
    if closed:
        lasts = torch.cat([pieces[index].offsets[-1:] for index in closed])  # type: ignore[index]
        wrong = wrong | (lasts != near(counts[closed], device)).any()
    if bool(wrong):
        for name, piece in zip(slots.features, pieces, strict=True):
            piece.require_ascending(name)
    return offsets


def _without_weights(name: str) -> ValueError:
    return ValueError(
        f"feature {name!r} has no weights, but is_weighted is True; give (ids, offsets, weights), with None for "
        "the offsets of bags of one size, or make the collection with False"
    )


# ---------------------------------------------------------------------- keyed


def _keyed(keyed: Any, slots: Slots, is_weighted: bool) -> Given:
    keys, stride, ids = keyed.keys(), keyed.stride(), keyed.values()
    require_ids("features.values()", ids)
    if ids.ndim != 1:
        raise ValueError(f"features.values() has shape {tuple(ids.shape)}; it must have one dimension")
    order = slots.order(tuple(keys))
    known = keyed.offsets() if has_methods(keyed, ["offsets"]) else offsets_of(keyed.lengths())
    if len(known) != len(keys) * stride + 1 or known.device != ids.device:
        raise ValueError(
            f"features has {len(keys)} keys and a stride of {stride}, but {len(known) - 1} bags, on {known.device}; "
            f"there must be a bag for each key and sample, on {ids.device}"
        )
    offsets = known.long()
    per_key = _offsets_per_key(keyed, offsets, len(keys), stride, len(ids))
    counts, begins = per_key.diff(), per_key[:-1]
    if not order.is_given:
        counts, begins = counts[order.places], begins[order.places]
    weights = keyed.weights_or_none() if is_weighted and has_methods(keyed, ["weights_or_none"]) else None
    if is_weighted and weights is None:
        raise ValueError("features has no weights, but is_weighted is True; give each id one, or make it with False")
    if weights is not None:
        require_weights("features.weights()", weights, ids)
    asked = kernels.FeatureIds(ids, slots.bases, slots.limits, counts, None if order.is_given else begins)
    if not order.is_given:
        places = near(order.places, ids.device)
        offsets = offsets_of(offsets.diff().view(len(keys), stride)[places])
        weights = None if weights is None else weights[positions(begins, counts, ids.device)]
    announced = (ids, known, order.places)
    return Given(slots, asked, counts, stride, offsets, weights=weights, announced=announced)


def _offsets_per_key(keyed: Any, offsets: Tensor, num_keys: int, stride: int, num_ids: int) -> Tensor:
    """Return each key's first id, and the number of ids, int64, on the CPU, once the offsets are known to ascend.

    On a GPU the host waits for them, unless they were on the CPU before.
    """
    if isinstance(keyed, KeyedJaggedTensor) and keyed.is_checked:
        return torch.tensor(keyed.offset_per_key(), dtype=torch.int64)
    places = offsets[::stride] if stride else offsets.new_zeros(num_keys + 1)
    is_near = offsets.device.type == "cpu"
    if is_near and int(offsets[0]) == 0 and int(offsets[-1]) == num_ids and kernels.first_fall(offsets) < 0:
        return places
    falls = offsets[1:] < offsets[:-1]
    *per_key, last, falling = torch.cat([places, offsets[-1:], falls.any().long().view(1)]).tolist()
    if falling:
        place = int(falls.nonzero()[0])
        raise ValueError(
            f"features has offsets that decrease, from {int(offsets[place])} to {int(offsets[place + 1])} after bag "
            f"{place % stride} of feature {keyed.keys()[place // stride]!r}; bags lie one after the other"
        )
    if per_key[0] != 0 or last != num_ids:
        raise ValueError(f"features has offsets from {per_key[0]} to {last}, but {num_ids} ids; give bags of all ids")
    return torch.tensor(per_key, dtype=torch.int64)
