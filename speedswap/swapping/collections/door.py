"""The forms in which features are given: a mapping of tensors, bags and jagged tensors, or a keyed jagged tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.swapping.collections.jagged import KeyedJaggedTensor, offsets_of
from speedswap.tables import is_single_key


class KeyedFeatures(NamedTuple):
    """The features of a keyed jagged tensor, speedswap's or TorchRec's.

    Attributes:
        keys: their names.
        stride: the number of bags per feature.
        ids: the ids, or keys, of all features.
        read_bags: returns each bag's first id, and the number of ids; or each bag's number of ids.
        has_offsets: True for the former.
        weights: one per id, or None.
        offset_per_key: each feature's first id, and the number of ids; None unless the offsets are known to ascend.
    """

    keys: list[str]
    stride: int
    ids: Any
    read_bags: Callable[[], Tensor]
    has_offsets: bool
    weights: Tensor | None
    offset_per_key: list[int] | None

    def offsets(self) -> Tensor:
        """Return each bag's first id, and the number of ids."""
        return self.read_bags() if self.has_offsets else offsets_of(self.read_bags())

    def checked_offsets(self, name: str) -> Tensor:
        """Return the offsets, without checking that they ascend.

        Raises:
            ValueError: there is no bag for each feature and sample; the message has the name.
        """
        offsets = self.offsets()
        bags, device = len(offsets) - 1, offsets.device
        if self.ids.ndim != 1:
            raise ValueError(f"{name}.values() has shape {tuple(self.ids.shape)}; it must have one dimension")
        if bags != len(self.keys) * self.stride or device != self.ids.device:
            raise ValueError(
                f"{name} has {len(self.keys)} keys and a stride of {self.stride}, but {bags} bags, on {device}; there "
                f"must be a bag for each key and sample, on {self.ids.device}"
            )
        return offsets

    def by_key(self) -> Mapping[str, Any]:
        """Return a jagged tensor per feature."""
        return KeyedJaggedTensor(self.keys, self.ids, self.weights, None, self.offsets(), self.stride).to_dict()


def at_door(given: Any) -> Mapping[str, Any] | KeyedFeatures:
    """Return features as a mapping, unread, or what a keyed jagged tensor holds.

    Raises:
        TypeError, ValueError: as :func:`keyed_features` does.
    """
    if isinstance(given, Mapping):
        return given
    return keyed_features("features", given, "a mapping from each feature to its ids")


def keyed_features(name: str, given: Any, others: str) -> KeyedFeatures:
    """Return what an object with the methods of TorchRec's KeyedJaggedTensor holds.

    Args:
        name: of the argument.
        given: the object.
        others: what may be given instead.

    Raises:
        TypeError: it lacks them.
        ValueError: its keys have bags of different samples.
    """
    has_offsets = _has_methods(given, "offsets")
    if not _has_methods(given, "keys", "values", "stride") or not (has_offsets or _has_methods(given, "lengths")):
        raise TypeError(
            f"{name} is {a_kind(given)}; pass {others}, or a KeyedJaggedTensor: an object with keys(), values(), "
            "stride(), and offsets() or lengths()"
        )
    if _has_methods(given, "variable_stride_per_key") and given.variable_stride_per_key():
        raise ValueError(
            f"{name} has a stride for each of its keys; look the keys up one by one, keyed[key], or give every key one "
            "bag for each sample"
        )
    read_bags = given.offsets if has_offsets else given.lengths
    per_key = given.offset_per_key() if isinstance(given, KeyedJaggedTensor) and given.is_checked else None
    keys, stride, ids = given.keys(), given.stride(), given.values()
    return KeyedFeatures(keys, stride, ids, read_bags, has_offsets, _weights_of(given), per_key)


class GivenFeature(NamedTuple):
    """One feature of a mapping: its ids or keys, and their bags.

    Attributes:
        ids: a tensor, or keys of any kind.
        offsets: each bag's first id; None for bags of one size.
        weights: one per id, or None.
        is_closed: True if the last of the offsets is the number of ids.
    """

    ids: Any
    offsets: Any = None
    weights: Any = None
    is_closed: bool = False

    @property
    def stride(self) -> int:
        """The number of bags."""
        return len(self.ids) if self.offsets is None else max(len(self.offsets) - self.is_closed, 0)

    @property
    def per_bag(self) -> int:
        """The number of ids per bag; -1 if there are offsets."""
        if self.offsets is not None:
            return -1
        return 1 if self.ids.ndim == 1 else int(self.ids.shape[1])

    def require_offsets(self, name: str) -> None:
        """Raise ValueError unless offsets ascend from 0 within the ids, after waiting for a GPU."""
        if self.offsets is None:
            return
        count, before = len(self.ids), 0
        if len(self.offsets) > self.stride and int(self.offsets[-1]) != count:
            raise ValueError(f"feature {name!r} has offsets up to {int(self.offsets[-1])}, but {count} ids")
        for place, offset in enumerate(self.offsets.tolist()):
            if place == 0 and offset != 0:
                raise ValueError(f"offsets[0] of feature {name!r} is {offset}; the first bag begins at 0")
            if not before <= offset <= count:
                raise ValueError(
                    f"offsets[{place}] of feature {name!r} is {offset} after {before}, and there are {count} ids; bags "
                    "lie one after the other, so offsets ascend"
                )
            before = offset

    def with_rows(self, rows: Tensor) -> Tensor | GivenFeature:
        """Return the feature with rows in place of its keys."""
        if self.offsets is None:
            return rows if self.weights is None else self._replace(ids=rows)
        return self._replace(ids=rows, offsets=self.offsets.to(rows.device) if self.is_closed else self.offsets)


def checked_feature(name: str, value: Any) -> GivenFeature:
    """Return a feature with consistent ids, offsets and weights, without checking that offsets ascend.

    Raises:
        TypeError, ValueError: they are inconsistent; the message names the feature.
    """
    feature = given_feature(name, value)
    ids, offsets, weights, _ = feature
    if offsets is None:
        require_bags(name, ids)
    else:
        kernels.require_id_dtype(ids, f"feature {name!r}")
    if weights is not None:
        require_weights(f"weights of feature {name!r}", weights, ids)
    if offsets is None:
        return feature
    kernels.require_id_dtype(offsets, f"offsets of feature {name!r}")
    if ids.ndim != 1 or offsets.ndim != 1 or ids.device != offsets.device:
        raise ValueError(
            f"feature {name!r} has ids of shape {tuple(ids.shape)} on {ids.device} and offsets of shape "
            f"{tuple(offsets.shape)} on {offsets.device}; both have one dimension, on one device"
        )
    if len(ids) and not len(offsets):
        raise ValueError(f"feature {name!r} has {len(ids)} ids, but its offsets are empty; begin the first bag at 0")
    return feature


def given_feature(name: str, value: Any, *, takes_keys: bool = False) -> GivenFeature:
    """Return a feature that is a tensor, a tuple (ids, offsets) or (ids, offsets, weights), or a jagged tensor.

    Args:
        name: the feature's.
        value: its value.
        takes_keys: True if any other value is keys.

    Raises:
        TypeError, ValueError: it is none of these; the message names the feature.
    """
    if isinstance(value, GivenFeature):
        return value
    if isinstance(value, Tensor) and not value.is_nested:
        return GivenFeature(value)
    if isinstance(value, tuple | list) and not (takes_keys and (not value or is_single_key(value[0]))):
        if len(value) not in (2, 3):
            raise ValueError(
                f"feature {name!r} is {a_kind(value)} of {len(value)}; give a tensor of ids, or "
                "(ids, offsets[, weights])"
            )
        return GivenFeature(*value)
    if _has_methods(value, "values", "offsets"):  # TorchRec's, torch.nested's, or speedswap's
        jagged: Any = value.contiguous() if isinstance(value, Tensor) else value  # without ids between the bags
        return GivenFeature(jagged.values(), jagged.offsets(), _weights_of(jagged), is_closed=True)
    if takes_keys:
        return GivenFeature(value)
    raise TypeError(
        f"feature {name!r} is {a_kind(value)}; give a tensor of ids, (ids, offsets[, weights]), or a jagged tensor"
    )


def require_bags(name: str, ids: Any) -> None:
    """Raise TypeError or ValueError unless the ids of a feature without offsets are one or several per sample."""
    kernels.require_id_dtype(ids, f"feature {name!r}")
    if ids.ndim not in (1, 2):
        raise ValueError(
            f"feature {name!r} has shape {tuple(ids.shape)}; give (batch,), or (batch, ids per sample) filled up "
            "with padding_idx, or (ids, offsets)"
        )


def require_weights(what: str, weights: Any, ids: Tensor) -> None:
    """Raise TypeError or ValueError unless weights are floating-point, one per id, on the ids' device."""
    kernels.require_dense(weights, what)
    if not weights.is_floating_point():
        raise TypeError(f"{what} have dtype {weights.dtype}; convert them with .float()")
    if weights.shape != ids.shape or weights.device != ids.device:
        raise ValueError(
            f"{what} have shape {tuple(weights.shape)} on {weights.device}, but ids {tuple(ids.shape)} on "
            f"{ids.device}; give one per id"
        )


def _weights_of(jagged: Any) -> Tensor | None:
    weights: Tensor | None = jagged.weights_or_none() if _has_methods(jagged, "weights_or_none") else None
    return weights


def _has_methods(thing: Any, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)
