"""One feature of a mapping, in any form that a collection takes: its ids or keys, and their bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.tables import is_single_key


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

    def wrong_offsets(self, name: str) -> ValueError | None:
        """Return the error of offsets that do not ascend from 0 or leave the ids, after waiting for a GPU."""
        if self.offsets is None:
            return None
        count, before = len(self.ids), 0
        if len(self.offsets) > self.stride and int(self.offsets[-1]) != count:
            return ValueError(f"feature {name!r} has offsets up to {int(self.offsets[-1])}, but {count} ids")
        for place, offset in enumerate(self.offsets.tolist()):
            if place == 0 and offset != 0:
                return ValueError(f"offsets[0] of feature {name!r} is {offset}; the first bag begins at 0")
            if not before <= offset <= count:
                return ValueError(
                    f"offsets[{place}] of feature {name!r} is {offset} after {before}, and there are {count} ids; bags "
                    "lie one after the other, so offsets ascend"
                )
            before = offset
        return None

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
    if has_methods(value, ["values", "offsets"]):  # TorchRec's, torch.nested's, or speedswap's
        jagged: Any = value.contiguous() if isinstance(value, Tensor) else value  # without ids between the bags
        weights = jagged.weights_or_none() if has_methods(jagged, ["weights_or_none"]) else None
        return GivenFeature(jagged.values(), jagged.offsets(), weights, is_closed=True)
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


def is_keyed(thing: Any) -> bool:
    """Return whether an object has the methods of TorchRec's KeyedJaggedTensor that are read here."""
    return has_methods(thing, ["keys", "values", "stride"]) and any(
        has_methods(thing, [name]) for name in ("offsets", "lengths")
    )


def has_methods(thing: Any, names: Sequence[str]) -> bool:
    """Return whether an object has all of some methods."""
    return all(callable(getattr(thing, name, None)) for name in names)
