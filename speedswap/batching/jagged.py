"""Samples of jagged tensors: torch.nested's, and lists of ids per key with the methods of TorchRec's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["chosen", "device_of", "is_jagged", "is_keyed", "samples_between", "tensors_in"]

_METHODS = ("keys", "values", "lengths", "stride", "weights_or_none")


def is_keyed(value: Any) -> bool:
    """Return whether a value has the methods of TorchRec's KeyedJaggedTensor."""
    return hasattr(value, "stride") and all(callable(getattr(value, name, None)) for name in _METHODS)


def is_jagged(value: Any) -> bool:
    """Return whether a value has lists of different lengths per sample, which no slice can cut out."""
    if isinstance(value, Tensor):
        return value.is_nested and value.layout == torch.jagged
    return is_keyed(value)


def device_of(keyed: Any) -> torch.device:
    """Return the device of the ids."""
    device: torch.device = keyed.values().device
    return device


def tensors_in(keyed: Any) -> Iterator[Tensor]:
    """Yield ids, lengths and weights."""
    yield keyed.values()
    yield keyed.lengths()
    if keyed.weights_or_none() is not None:
        yield keyed.weights_or_none()


def samples_between(jagged: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop - 1``, as an object of the same class."""
    lengths, begins = _lists(jagged)
    some = lengths[:, start:stop]
    # A key's lists lie one after the other.
    return _of_pieces(jagged, begins[:, start], some.sum(1), some)


def chosen(jagged: Any, indices: Sequence[int]) -> Any:
    """Return some samples, in this order, as an object of the same class."""
    lengths, begins = _lists(jagged)
    some = lengths[:, list(indices)]
    return _of_pieces(jagged, begins[:, list(indices)].reshape(-1), some.reshape(-1), some)


def _lists(jagged: Any) -> tuple[Tensor, Tensor]:
    """Return the length and the place of each list, shape (keys, samples)."""
    if isinstance(jagged, Tensor):
        offsets = jagged.offsets()  # type: ignore[attr-defined]
        return offsets.diff().unsqueeze(0), offsets[:-1].unsqueeze(0)
    lengths = jagged.lengths().reshape(-1).long()
    shape = (len(jagged.keys()), jagged.stride())
    return lengths.view(shape), (lengths.cumsum(0) - lengths).view(shape)


def _of_pieces(jagged: Any, begins: Tensor, counts: Tensor, lengths: Tensor) -> Any:
    """Return an object of the same class with the values of some pieces, in lists of these lengths."""
    moved = (begins - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    places = moved + torch.arange(len(moved), device=moved.device)
    values = jagged.values()[places]
    if isinstance(jagged, Tensor):
        return torch.nested.nested_tensor_from_jagged(values, lengths=lengths.reshape(-1))
    weights = jagged.weights_or_none()
    return type(jagged)(
        keys=list(jagged.keys()),
        values=values,
        weights=None if weights is None else weights[places],
        lengths=lengths.reshape(-1).to(jagged.lengths().dtype),
    )
