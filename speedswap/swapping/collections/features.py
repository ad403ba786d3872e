"""A batch's features, read for all tables at once: each lookup's ids, bags and rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.swapping.collections.configs import EmbeddingConfig, output_names
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.collections.jagged import (
    GivenFeature,
    KeyedFeatures,
    at_door,
    checked_feature,
    given_feature,
    offsets_of,
    require_bags,
    require_weights,
)
from speedswap.swapping.graphs import leaving_transforms
from speedswap.swapping.prefetched import is_unchanged

_MOST_ORDERS = 64


class Slots:
    """Pairs of a table and a feature looked up in it, ordered by group.

    Args:
        groups: the groups of tables.
        pooling: returns the pooling of a table; None to return its rows one by one. Maxima go last in their group.

    Attributes:
        groups: the groups.
        features: the name of each slot's feature.
        configs: each slot's table.
        bases: each table's first row in its group, int64, shape (slots,), on the CPU.
        limits: each table's number of rows.
        paddings: each table's padding row in the group, -1 for none.
        of_group: the slots of each group.
        of_table: the slots of each table, by name.
        names: all features.
        keys: each slot's name in the output: its feature, with its table if several tables have the feature.
        has_several_groups: True if a batch's lookups are in more than one group.
        splits_ids: True if a batch's ids are split by slot, so that the host needs the number of each slot's ids.
        lookups_per_id: how often ids of the last keyed batch on a GPU were looked up, on average; 0 if there was none.
    """

    def __init__(self, groups: Sequence[TableGroup], pooling: Callable[[EmbeddingConfig], str | None]) -> None:
        self.groups = tuple(groups)
        slots: list[tuple[str, EmbeddingConfig, int]] = []
        self.of_group: list[range] = []
        self.of_table: dict[str, range] = {}
        for group in groups:
            begin = len(slots)
            for config, base in sorted(
                zip(group.configs, group.first_rows, strict=True), key=lambda each: pooling(each[0]) == "max"
            ):
                self.of_table[config.name] = range(len(slots), len(slots) + len(config.feature_names))
                slots += [(feature, config, base) for feature in config.feature_names]
            self.of_group.append(range(begin, len(slots)))
        self.features, self.configs, bases = zip(*slots, strict=True)
        self.bases = torch.tensor(bases, dtype=torch.int64)
        self.limits = torch.tensor([config.num_embeddings for config in self.configs], dtype=torch.int64)
        padded = [(base, config.padding_idx) for _, config, base in slots]
        self.paddings = torch.tensor([-1 if row is None else base + row for base, row in padded])
        self.names = frozenset(self.features)
        self.keys = output_names([(feature, config.name) for feature, config, _ in slots])
        poolings = [pooling(config) for config in self.configs]
        self.has_several_groups = len(groups) > 1
        self.splits_ids = self.has_several_groups or None in poolings or 0 < poolings.count("max") < len(slots)
        self.lookups_per_id = 0.0
        self._orders: dict[tuple[str, ...], Tensor | None] = {}
        self._alike: dict[tuple[int, ...], tuple[Tensor, list[int], int]] = {}

    def __len__(self) -> int:
        return len(self.features)

    def in_order_of(self, configs: Sequence[EmbeddingConfig]) -> list[int]:
        """Return the slots ordered by table."""
        return [slot for config in configs for slot in self.of_table[config.name]]

    def room(self, num_keys: int, num_ids: int) -> int:
        """Return ``room`` of a keyed batch on a GPU; 0 if no batch before tells how often ids are looked up."""
        if any(each._step.is_sharded for each in self.groups):
            return 0
        if num_keys == len(self):
            return num_ids if self.has_several_groups else 0
        return int(1.125 * self.lookups_per_id * num_ids) + 64 if self.lookups_per_id else 0

    def alike(self, stride: int, per_bag: int) -> tuple[Tensor, list[int], int]:
        """Describe a batch in which every slot has the same bags.

        Args:
            stride: the bags of a slot.
            per_bag: the ids of a bag.

        Returns:
            Each slot's number of ids, int64, shape (slots,), on the CPU; the position of each slot's first id, and the
            number of ids; and the number of offsets.
        """
        key = stride, per_bag
        if key not in self._alike:
            if len(self._alike) >= _MOST_ORDERS:
                self._alike.clear()
            count, size = stride * per_bag, len(self.features)
            with torch.inference_mode(False):  # used later in other modes
                counts = torch.full((size,), count, dtype=torch.int64, device="cpu")
            kernels.require_memory(counts, "counts")  # FakeTensorMode's would stay
            self._alike[key] = counts, [slot * count for slot in range(size + 1)], size * stride + 1
        return self._alike[key]

    def require_features(self, names: Sequence[str]) -> None:
        """Raise ValueError unless these are the collection's features."""
        for name in sorted(self.names.difference(names)):
            raise ValueError(f"feature {name!r} is missing; give the ids of {', '.join(sorted(self.names))}")
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"feature {name!r} is looked up in no table; there are {', '.join(sorted(self.names))}: leave it "
                    "out (of a KeyedJaggedTensor with permute), or name it in a table's feature_names"
                )

    def order(self, keys: tuple[str, ...]) -> Tensor | None:
        """Return each slot's feature's index in keys, int64, on the CPU; None if the keys are exactly these features.

        Raises:
            ValueError: a feature is missing, or a key is not a feature, or occurs twice.
        """
        if keys not in self._orders:
            self.require_features(keys)
            if len(set(keys)) < len(keys):
                raise ValueError(f"the keys are {', '.join(keys)}, one of them twice; give each feature once")
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            with torch.inference_mode(False):  # used later in other modes
                places = torch.tensor([keys.index(name) for name in self.features], device="cpu")
            kernels.require_memory(places, "places")
            self._orders[keys] = None if keys == self.features else places
        return self._orders[keys]


@dataclass(eq=False)
class FeatureBatch:
    """The ids of a batch, ordered by slot and then by bag.

    Attributes:
        slots: the collection's.
        asked: the ids, their number per slot, and the tables' row ranges.
        stride: number of bags per slot.
        offsets: each bag's first id, and the number of ids, int64, shape (slots · stride + 1,), on the ids' device.
        known_starts: the position of each slot's first id, and the number of ids; None if only ``offsets`` has them.
        is_single: True if every bag has one id.
        weights: a factor per id, shape (ids,), or None.
        by_name: each slot's ids as passed; empty for a keyed batch.
        announced: for a keyed batch, the tensors that its ids depend on.
        require_offsets: raises the error of offsets that do not ascend, after waiting for a GPU; None if they have been
            checked.
        room: a bound of the number of ids, if only a GPU knows it before the rows of all groups are found; or else 0.
        order: for a keyed batch, as :meth:`Slots.order` returned it.
    """

    slots: Slots
    asked: kernels.FeatureIds
    stride: int
    offsets: Tensor
    known_starts: list[int] | None
    is_single: bool = False
    weights: Tensor | None = None
    by_name: Sequence[Tensor] = ()
    announced: tuple[Tensor, ...] = ()
    require_offsets: Callable[[], object] | None = None
    room: int = 0
    order: Tensor | None = None
    _arriving: _Arriving | None = None
    _merged: Tensor | None = None
    _found: list[tuple[Tensor, Tensor] | None] | None = None
    _is_inside: bool = False
    _source: tuple[object, list[Any], list[int | None]] | None = None

    @property
    def starts(self) -> list[int]:
        """The position of each slot's first id, and the number of ids; on a GPU the host may wait for them."""
        if self.room and self.known_starts is None:
            self._find_together()
        if self.known_starts is None:
            self.known_starts = (self._arriving or _Arriving(self.offsets[:: self.stride])).numbers()
        return self.known_starts

    def learn(self, per_key: Tensor) -> None:
        """Take over each key's first id and the number of ids of a keyed batch, int64, on the CPU."""
        asked, order = self.asked, self.order
        asked.counts = per_key.diff()
        if order is not None:
            asked.counts, asked.begins = asked.counts[order], per_key[order]
            if self.weights is not None:
                self.weights = self.weights[_positions(asked.begins, asked.counts, self.weights.device)]
        self.known_starts = [0, *asked.counts.cumsum(0).tolist()]
        self.slots.lookups_per_id = self.known_starts[-1] / max(len(asked.ids), 1)

    def _find_together(self) -> None:
        """Find the rows of all groups in the round trip that tells ``starts``, if only a GPU knows these.

        Raises:
            ValueError: offsets do not ascend.
        """
        slots, arriving = self.slots, self._arriving

        def starts_of() -> list[int]:
            assert arriving is not None
            *per_key, is_wrong = arriving.numbers()
            if is_wrong:
                raise self.outside(IdError("offsets do not ascend"))
            self.learn(torch.tensor(per_key, device="cpu"))
            return [min(self.starts[place], self.room) for place in (*(some.start for some in slots.of_group), -1)]

        num_rows = [each.num_embeddings for each in slots.groups]
        found = kernels.find_together(self.asked, slots.of_group, num_rows, self.room, starts_of)
        if self.starts[-1] <= self.room:
            self._found = found

    def rows(self, group: int, *, checked: bool = False) -> Tensor:
        """Return a group's rows, int64, on a GPU also int32, shape (ids,); -1 for an id outside its table.

        Args:
            group: its index.
            checked: True to raise IdError for an invalid id of any group, which a lookup in this one would miss.
        """
        if self.room and self.known_starts is None:
            self._find_together()
        if self._merged is None:
            self._merged = kernels.merge_ids(self.asked)
        if not self.slots.has_several_groups:
            return self._merged
        if checked:
            self.require_inside()
        begin, end = self.bounds(group)
        return self._merged[begin:end]

    def found(self, group: int) -> tuple[Tensor, Tensor]:
        """Return a group's rows and each id's index among them. Those of all groups are found at once: one wait.

        Raises:
            IdError: an id of any group is outside its table.
        """
        if self.room and self.known_starts is None:
            self._find_together()
        if self._found is None:
            groups = self.slots.groups
            self._found = kernels.find_all([(self.rows(i), each.num_embeddings) for i, each in enumerate(groups)])
        found = self._found[group]
        if found is None or None in self._found:
            raise self.outside(IdError("an id is outside of its table"))
        return found

    def require_inside(self) -> None:
        """Raise IdError if an id is outside its table. On a GPU this waits for the ids."""
        if not self._is_inside:
            rows = self._merged = kernels.merge_ids(self.asked) if self._merged is None else self._merged
            self._is_inside = not rows.shape[0] or int(rows.min()) >= 0
            if not self._is_inside:
                raise self.outside(IdError("an id is outside of its table"))

    def bounds(self, group: int) -> tuple[int, int]:
        """Return the positions of a group's first id, and past its last."""
        return self.span(self.slots.of_group[group])

    def span(self, some: range) -> tuple[int, int]:
        """Return the positions of consecutive slots' first id, and past their last."""
        if self.known_starts is None and not self.room and len(some) == len(self.slots):
            return 0, self.asked.total  # without asking a GPU for the others
        starts = self.starts
        return starts[some.start], starts[some.stop]

    def tensors(self, group: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors that a group's rows depend on; none if it has no ids.

        Args:
            group: its index.
            device: where its rows are needed.
        """
        if device.type != "cpu":
            rows = self.rows(group)
            return (rows,) if rows.shape[0] else ()
        begin, end = self.bounds(group)
        if begin == end:
            return ()
        if not self.by_name:
            return self.announced
        some, ids, counts = self.slots.of_group[group], self.asked.ids, self.asked.counts
        assert isinstance(ids, Tensor)
        assert counts is not None
        return ids[begin:end], counts[some.start : some.stop]

    def remember(self, features: Any) -> None:
        """Remember what the batch was read from, to be used again at its turn; only for features on a GPU."""
        form, parts = _parts(features, self.slots)
        if [each for each in parts if each is not None and (each.requires_grad or not each.is_cuda)]:
            return
        with suppress(RuntimeError):  # tensors of inference mode have no version
            self._source = form, parts, [None if each is None else each._version for each in parts]

    def is_of(self, features: Any) -> bool:
        """Return whether the batch was read from these features, which have not changed since."""
        if self._source is None:
            return False
        before, given, versions = self._source
        form, parts = _parts(features, self.slots)
        return form == before and all(
            is_unchanged(then, version, now) if then is not None and isinstance(now, Tensor) else then is now
            for then, version, now in zip(given, versions, parts, strict=True)
        )

    def has_changed(self) -> bool:
        """Return whether the features' ids have been overwritten since; those of a keyed batch on the CPU say so."""
        if self._source is not None:
            given, versions = self._source[1:]
            return [None if each is None else each._version for each in given] != versions
        ids = self.asked.ids
        if not self.by_name or not isinstance(ids, Tensor):
            return False
        return not kernels.have_same_bits(torch.cat([each.reshape(-1) for each in self.by_name]), ids)

    @leaving_transforms
    def outside(self, error: IdError) -> IdError:
        """Return the error for the first id outside its table, to replace one without names.

        Raises:
            ValueError: offsets do not ascend.
        """
        if self.require_offsets is not None:
            self.require_offsets()
        found = kernels.first_outside(self.asked)
        if found is None:
            return error
        slot, position, value = found
        where, config = f"values()[{position}]", self.slots.configs[slot]
        if self.by_name:
            places = torch.unravel_index(torch.tensor(position), self.by_name[slot].shape)
            where = f"ids[{', '.join(str(int(place)) for place in places)}]"
        return IdError(
            f"{where} of feature {self.slots.features[slot]!r} is {value}, but table {config.name!r} has rows 0 to "
            f"{config.num_embeddings - 1}; map unknown ids to a padding row (padding_idx=) before the lookup"
        )


def read_features(features: Any, slots: Slots, is_weighted: bool) -> FeatureBatch:
    """Read a mapping of features to ids, or an object with the methods of TorchRec's KeyedJaggedTensor.

    Raises:
        TypeError, ValueError: a feature is missing, unknown, or invalid; the message names it.
    """
    if type(features) is not dict:
        features = at_door(features)
        if isinstance(features, KeyedFeatures):
            return _read_keyed(features, slots, is_weighted)
    if features.keys() != slots.names:
        slots.require_features(list(features))
    return read_slots([features[name] for name in slots.features], slots, is_weighted)


def _parts(features: Any, slots: Slots) -> tuple[object, list[Any]]:
    """Return the tensors of features, None for offsets or weights left out, and what tells how they are arranged."""
    if type(features) is not dict:
        features = at_door(features)
        if isinstance(features, KeyedFeatures):
            return (*features.keys, features.stride), [features.ids, features.read_bags(), features.weights]
    if features.keys() != slots.names:
        return None, []
    given = [(name, features[name]) for name in slots.features]
    parts = [(each,) if type(each) is Tensor else given_feature(name, each)[:3] for name, each in given]
    return [*map(len, parts)], [each for some in parts for each in some]


# ---------------------------------------------------------------------- by name


def _require_all_weighted(name: str, is_weighted: bool, weights: Tensor | None) -> None:
    """Raise ValueError if a feature has weights and the collection takes none, or vice versa."""
    if weights is not None and not is_weighted:
        raise ValueError(f"feature {name!r} has weights, but is_weighted is False; make the collection with True")
    if weights is None and is_weighted:
        raise ValueError(
            f"feature {name!r} has no weights, but is_weighted is True; give (ids, offsets, weights), with None for "
            "the offsets of bags of one size, or make the collection with False"
        )


def read_slots(values: Sequence[Any], slots: Slots, is_weighted: bool) -> FeatureBatch:
    """Read each slot's value, in any form; errors are those of :func:`read_features`."""
    if _are_alike(values):  # without examining each: a thousand features would take a thousand calls
        name, ids = slots.features[0], values[0]
        require_bags(name, ids)
        if is_weighted:
            _require_all_weighted(name, is_weighted, None)
        stride, per_bag = ids.shape[0], 1 if ids.ndim == 1 else ids.shape[1]
        counts, starts, num_offsets = slots.alike(stride, per_bag)
        together = values if ids.is_cuda else torch.cat(tuple(values))  # on a GPU a kernel reads them one by one
        if ids.ndim == 2 and isinstance(together, Tensor):
            together = together.reshape(-1)
        asked = kernels.FeatureIds(together, slots.bases, slots.limits, counts)
        offsets = steps(num_offsets, per_bag, ids.device)
        return FeatureBatch(slots, asked, stride, offsets, starts, is_single=per_bag == 1, by_name=values)
    bags = [checked_feature(name, value) for name, value in zip(slots.features, values, strict=True)]
    stride, device, per_bag = bags[0].stride, bags[0].ids.device, bags[0].per_bag
    for name, each in zip(slots.features, bags, strict=True):
        if each.stride != stride or each.ids.device != device:
            raise ValueError(
                f"feature {name!r} has {each.stride} bags on {each.ids.device}, but {slots.features[0]!r} has "
                f"{stride} on {device}; give every feature one bag for each sample, on one device"
            )
        _require_all_weighted(name, is_weighted, each.weights)
    given = [each.ids for each in bags]
    starts = [0, *accumulate(ids.numel() for ids in given)]
    counts = torch.tensor(starts, device="cpu").diff()
    together = given if given[0].is_cuda else torch.cat([ids.reshape(-1) for ids in given])
    asked = kernels.FeatureIds(together, slots.bases, slots.limits, counts)
    weights = [each.weights.reshape(-1) for each in bags if each.weights is not None]
    is_even = per_bag >= 0 and all(each.per_bag == per_bag for each in bags)
    require_offsets = None
    if is_even:
        offsets = steps(len(slots) * stride + 1, per_bag, device)
    elif device.type == "cpu":
        offsets = _offsets(bags, slots, starts)
    else:
        asked.offsets = [(None if each.offsets is None else each.offsets.contiguous(), each.is_closed) for each in bags]
        offsets = kernels.join_bags(asked, stride).offsets
        require_offsets = functools.partial(_require_offsets, bags, slots)
        if not (starts[-1] and stride):  # no lookup would notice
            require_offsets()
    return FeatureBatch(
        slots,
        asked,
        stride,
        offsets,
        starts,
        is_single=is_even and per_bag == 1,
        weights=torch.cat(weights) if weights else None,
        by_name=given,
        require_offsets=require_offsets,
    )


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether all values are tensors of one shape."""
    if set(map(type, values)) != {Tensor}:
        return False
    kinds = {ids.is_nested or (ids.dtype, ids.shape, ids.device, ids.layout) for ids in values}
    return len(kinds) == 1 and True not in kinds


def _offsets(bags: list[GivenFeature], slots: Slots, starts: Sequence[int]) -> Tensor:
    """Return the offsets of all slots' bags in host memory, after checking that they ascend."""
    device, stride, begins = bags[0].ids.device, bags[0].stride, torch.tensor(starts)
    firsts = [
        steps(stride, each.per_bag, device) if each.offsets is None else each.offsets[:stride].long() for each in bags
    ]
    offsets = (torch.cat(firsts).view(len(slots), stride) + begins[:-1].unsqueeze(1)).reshape(-1)
    offsets = torch.cat([offsets, begins[-1:]])
    wrong = (offsets[1:] < offsets[:-1]).any()
    if stride:
        wrong = wrong | (offsets[:-1:stride] != begins[:-1]).any()
    closed = [index for index, each in enumerate(bags) if each.is_closed and len(each.offsets)]
    if closed:
        lasts = torch.cat([bags[index].offsets[-1:] for index in closed])
        wrong = wrong | (lasts != torch.tensor([bags[index].ids.numel() for index in closed])).any()
    if bool(wrong):
        _require_offsets(bags, slots)
    return offsets


def _require_offsets(bags: Sequence[GivenFeature], slots: Slots) -> None:
    """Raise the error of the first feature whose offsets do not ascend."""
    for name, each in zip(slots.features, bags, strict=True):
        each.require_offsets(name)


# ---------------------------------------------------------------------- keyed


def _read_keyed(given: KeyedFeatures, slots: Slots, is_weighted: bool) -> FeatureBatch:
    keys, stride, ids = given.keys, given.stride, given.ids
    kernels.require_id_dtype(ids, "features.values()")
    order = slots.order(tuple(keys))
    known = given.checked_offsets("features")
    weights = given.weights if is_weighted else None
    if is_weighted and weights is None:
        raise ValueError("features has no weights, but is_weighted is True; give each id one, or make it with False")
    if weights is not None:
        require_weights("features.weights()", weights, ids)
    if ids.is_cuda and given.offset_per_key is None and len(ids) and stride:
        room = slots.room(len(keys), len(ids))
        if room or len(keys) == len(slots):
            return _read_keyed_on_gpu(given, slots, known, order, weights, room)
    offsets = known.long()
    per_key = _offsets_per_key(given, offsets)
    announced: tuple[Tensor, ...] = ids, known
    if order is not None:
        announced += (order,)
        offsets = offsets_of(offsets.diff().view(len(keys), stride)[kernels.near(order, ids.device)])
    asked = kernels.FeatureIds(ids, slots.bases, slots.limits, None)
    found = FeatureBatch(slots, asked, stride, offsets, None, weights=weights, announced=announced, order=order)
    found.learn(per_key)
    return found


def _read_keyed_on_gpu(
    given: KeyedFeatures, slots: Slots, known: Tensor, order: Tensor | None, weights: Tensor | None, room: int
) -> FeatureBatch:
    """Read a keyed batch on a GPU without waiting for its offsets: if they are wrong, every id is outside its table."""
    ids, stride, num_keys = given.ids, given.stride, len(given.keys)
    counts = torch.tensor([len(ids)], device="cpu")
    known = (known if known.dtype is torch.int32 else known.long()).contiguous()
    whole = kernels.FeatureIds(ids, slots.bases[:1], slots.limits[:1], counts, offsets=[(known, True)])
    bags, begins = kernels.join_bags(whole, num_keys * stride)._replace(stride=stride), None
    per_key = bags.offsets[::stride]
    if order is not None:
        places = kernels.near(torch.nn.functional.pad(order, (0, 1)), ids.device)
        begins = per_key[places]
        bags = bags._replace(offsets=offsets_of(bags.offsets.diff().view(num_keys, stride)[places[:-1]]))
    asked = kernels.FeatureIds(ids, slots.bases, slots.limits, None, begins, bags=bags)
    found = FeatureBatch(slots, asked, stride, bags.offsets, None, weights=weights, room=room, order=order)
    found.require_offsets = lambda: _offsets_per_key(given, known.long())
    if room:
        found._arriving = _Arriving(torch.cat([per_key, bags.wrong]))
        return found
    if slots.splits_ids:  # they are there once the host has waited for the rows
        found._arriving = _Arriving(bags.offsets[::stride])
    if order is not None and weights is not None:
        indices = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
        found._merged = kernels.merge_ids(asked, indices)
        found.weights = weights[indices]
    return found


def _offsets_per_key(given: KeyedFeatures, offsets: Tensor) -> Tensor:
    """Return each key's first id, and the number of ids, int64, on the CPU, after checking that offsets ascend.

    On a GPU the host waits for them, unless they were on the CPU before.
    """
    if given.offset_per_key is not None:
        return torch.tensor(given.offset_per_key, dtype=torch.int64, device="cpu")
    stride, num_ids = given.stride, len(given.ids)
    places = offsets[::stride] if stride else offsets.new_zeros(len(given.keys) + 1)
    is_near = offsets.device.type == "cpu"
    if is_near and int(offsets[0]) == 0 and int(offsets[-1]) == num_ids and kernels.first_fall(offsets) < 0:
        return places
    falls = offsets[1:] < offsets[:-1]
    *per_key, last, falling = torch.cat([places, offsets[-1:], falls.any().long().view(1)]).tolist()
    if falling:
        place = int(falls.nonzero()[0])
        raise ValueError(
            f"features has offsets that decrease, from {int(offsets[place])} to {int(offsets[place + 1])} after bag "
            f"{place % stride} of feature {given.keys[place // stride]!r}; bags lie one after the other"
        )
    if per_key[0] != 0 or last != num_ids:
        raise ValueError(f"features has offsets from {per_key[0]} to {last}, but {num_ids} ids; give bags of all ids")
    return torch.tensor(per_key, dtype=torch.int64, device="cpu")


def _positions(begins: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Return the positions of ids that are in pieces, piece by piece."""
    total = int(counts.sum())
    moved = kernels.near(torch.stack([begins - (counts.cumsum(0) - counts), counts]), device)
    return torch.arange(total, device=device) + moved[0].repeat_interleave(moved[1], output_size=total)


# ---------------------------------------------------------------------- small tensors, on the ids' device


class _Arriving:
    """Numbers on their way from a GPU to the host, behind what torch's current stream has queued.

    Args:
        numbers: shape (n,).
    """

    def __init__(self, numbers: Tensor) -> None:
        self._held = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._held.copy_(numbers.contiguous(), non_blocking=True)
        self._arrived = torch.cuda.current_stream(numbers.device).record_event()

    def numbers(self) -> list[int]:
        """Return the numbers, waiting for them unless they have arrived."""
        if not self._arrived.query():
            self._arrived.synchronize()
        return self._held.tolist()


def steps(count: int, step: int, device: torch.device) -> Tensor:
    """Return 0, step, 2 · step, …: the offsets of equally large bags, not to be modified."""
    # One per stream: work on another stream may not have made them yet.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if count <= _SMALL:
        return _small_steps(count, step, device, stream)
    return (_large_steps if count <= _LARGE else _new_steps)(count, step, device, stream)


def _new_steps(count: int, step: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # used later in other modes
        made = torch.arange(count, device=device) * step
    kernels.require_memory(made, "offsets")  # FakeTensorMode's would stay
    return made


# Cache only the last of the large ones: a few would fill memory that batches need.
_SMALL, _LARGE = 1 << 14, 1 << 20
_small_steps = functools.lru_cache(maxsize=64)(_new_steps)
_large_steps = functools.lru_cache(maxsize=1)(_new_steps)
