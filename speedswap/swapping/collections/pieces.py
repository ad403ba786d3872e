"""The ids of one feature in any of the forms that a collection takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind

__all__ = ["Piece", "has_methods", "piece_of", "require_ids", "require_weights"]

_INDEX = (torch.int64, torch.int32)


class Piece(NamedTuple):
    """The ids of one feature.

    Attributes:
        ids: int32 or int64; one dimension, or (bags, ids per bag).
        stride: bags.
        per_bag: ids of each bag, or -1 if they differ.
        offsets: then each bag's first id; with one item more, the number of ids.
        weights: one per id, or None.
    """

    ids: Tensor
    stride: int
    per_bag: int
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def require_ascending(self, name: str) -> None:
        """Raise ValueError unless the offsets ascend from 0, and not past the ids."""
        if self.offsets is None:
            return
        if len(self.offsets) > self.stride and int(self.offsets[-1]) != len(self.ids):
            raise ValueError(f"feature {name!r} has offsets up to {int(self.offsets[-1])}, but {len(self.ids)} ids")
        before = 0
        for place, offset in enumerate(self.offsets.tolist()):
            if place == 0 and offset != 0:
                raise ValueError(f"offsets[0] of feature {name!r} is {offset}; the first bag begins at 0")
            if not before <= offset <= len(self.ids):
                raise ValueError(
                    f"offsets[{place}] of feature {name!r} is {offset} after {before}, and there are {len(self.ids)} "
                    "ids; bags lie one after the other, so offsets ascend"
                )
            before = offset


def piece_of(name: str, value: Any) -> Piece:
    """Read a feature's ids: a tensor, a tuple (ids, offsets) or (ids, offsets, weights), or a jagged tensor.

    Raises:
        TypeError, ValueError: they do not fit; the message names the feature.
    """
    if isinstance(value, Tensor) and not value.is_nested:
        return _regular(name, value)
    if isinstance(value, tuple | list):
        if len(value) not in (2, 3):
            raise ValueError(
                f"feature {name!r} is {a_kind(value)} of {len(value)}; give a tensor of ids, or "
                "(ids, offsets[, weights])"
            )
        ids, offsets, *weights = value
        piece = _regular(name, ids) if offsets is None else _bags(name, ids, offsets)
        return _weighted(name, piece, weights[0] if weights else None)
    if has_methods(value, ["values", "offsets"]):  # of TorchRec, torch.nested, or here
        if isinstance(value, Tensor):
            value = value.contiguous()  # without ids between the bags
        piece = _bags(name, value.values(), value.offsets())
        piece = piece._replace(stride=max(piece.stride - 1, 0))
        return _weighted(name, piece, value.weights_or_none() if has_methods(value, ["weights_or_none"]) else None)
    raise TypeError(
        f"feature {name!r} is {a_kind(value)}; give a tensor of ids, (ids, offsets[, weights]), or a jagged tensor"
    )


def _regular(name: str, ids: Any) -> Piece:
    require_ids(f"feature {name!r}", ids)
    if ids.ndim == 1:
        return Piece(ids, ids.shape[0], 1)
    if ids.ndim == 2:
        return Piece(ids, *ids.shape)
    raise ValueError(
        f"feature {name!r} has shape {tuple(ids.shape)}; give (batch,), or (batch, ids per sample) filled up with "
        "padding_idx, or (ids, offsets)"
    )


def _bags(name: str, ids: Any, offsets: Any) -> Piece:
    require_ids(f"feature {name!r}", ids)
    require_ids(f"offsets of feature {name!r}", offsets)
    if ids.ndim != 1 or offsets.ndim != 1 or ids.device != offsets.device:
        raise ValueError(
            f"feature {name!r} has ids of shape {tuple(ids.shape)} on {ids.device} and offsets of shape "
            f"{tuple(offsets.shape)} on {offsets.device}; both have one dimension, on one device"
        )
    if len(ids) and not len(offsets):
        raise ValueError(f"feature {name!r} has {len(ids)} ids, but its offsets are empty; begin the first bag at 0")
    return Piece(ids, len(offsets), -1, offsets)


def _weighted(name: str, piece: Piece, weights: Any) -> Piece:
    if weights is None:
        return piece
    require_weights(f"weights of feature {name!r}", weights, piece.ids)
    return piece._replace(weights=weights)


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


def require_ids(what: str, ids: Any) -> None:
    """Raise TypeError unless ids are a dense int32 or int64 tensor."""
    kernels.require_dense(ids, what)
    if ids.dtype not in _INDEX:
        raise TypeError(f"{what} has dtype {ids.dtype}; convert it to torch.int64 or torch.int32, as ids.long() does")


def has_methods(thing: Any, names: Sequence[str]) -> bool:
    """Return whether an object has all of some methods."""
    return all(callable(getattr(thing, name, None)) for name in names)
