"""Make a batch of samples, one at a time, so that samples and batch need not be in memory twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from speedswap._words import a_kind
from speedswap.errors import BatchError

__all__ = ["Stack", "nbytes_of"]

_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


def nbytes_of(sample: Any) -> int:
    """Bytes of a sample: of the arrays and tensors in it, and roughly of everything else.

    >>> nbytes_of((np.zeros(3), {"label": torch.zeros(2)}))
    32
    """
    if isinstance(sample, (np.ndarray, np.generic, torch.Tensor)):
        return int(sample.nbytes)
    if isinstance(sample, dict):
        return sum(map(nbytes_of, sample.values()))
    if isinstance(sample, (tuple, list)):
        return sum(map(nbytes_of, sample))
    return sys.getsizeof(sample)


class Stack:
    """A batch that is filled sample by sample.

    Arrays and tensors get a new first dimension, numbers become an array, dictionaries and tuples keep their structure;
    everything else, strings among it, becomes a list.

    Args:
        size: how many samples will be put into it.

    >>> stack = Stack(2)
    >>> stack.put((np.ones(3), 7), "first")
    >>> stack.put((np.zeros(3), 8), "second")
    >>> stack.batch[0].shape, stack.batch[1]
    ((2, 3), array([7, 8]))
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.batch: Any = None
        self._filled = 0

    def put(self, sample: Any, identity: Any) -> None:
        """Copy a sample into the next place.

        Raises:
            BatchError: it has another structure, shape or dtype than the first one.
        """
        if self._filled == 0:
            self.batch = _room_for(sample, self.size)
        for column, value in _columns(self.batch, sample, identity):
            if not isinstance(column, list) and _kind(column[0]) != _kind(value):
                raise BatchError(
                    f"sample {identity!r} has {_kind(value)}, others in its batch {_kind(column[0])}; let read return "
                    "samples of one shape and dtype, or give a collate function that pads them"
                )
            column[self._filled] = value
        self._filled += 1


def _room_for(sample: Any, size: int) -> Any:
    if isinstance(sample, torch.Tensor):
        return sample.new_empty((size, *sample.shape))
    if isinstance(sample, (np.ndarray, np.generic)):
        return np.empty((size, *sample.shape), sample.dtype)
    if type(sample) in _NUMBERS:
        return np.empty(size, _NUMBERS[type(sample)])
    if isinstance(sample, dict):
        return {name: _room_for(value, size) for name, value in sample.items()}
    if isinstance(sample, tuple):
        parts = [_room_for(value, size) for value in sample]
        return type(sample)(*parts) if hasattr(sample, "_fields") else tuple(parts)
    return [None] * size


def _columns(batch: Any, sample: Any, identity: Any) -> Iterator[tuple[Any, Any]]:
    """Each array of the batch with what the sample has for it."""
    if isinstance(batch, (dict, tuple)):
        if type(sample) is not type(batch) or len(sample) != len(batch) or _names(sample) != _names(batch):
            raise BatchError(f"sample {identity!r} has another structure than the others in its batch")
        for name in _names(batch):
            yield from _columns(batch[name], sample[name], identity)
    else:
        yield batch, sample


def _names(value: Any) -> list[Any]:
    return sorted(value, key=str) if isinstance(value, dict) else list(range(len(value)))


def _kind(value: Any) -> str:
    """Shape and dtype in words; the same for a number and the array element that it becomes."""
    if type(value) in _NUMBERS:
        value = _NUMBERS[type(value)](value)
    if not hasattr(value, "shape"):
        return a_kind(value)
    return f"shape {tuple(value.shape)} and dtype {value.dtype}"
