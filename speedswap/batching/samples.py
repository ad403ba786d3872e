"""Samples on their way into a batch: read ahead by a thread, and stacked one at a time."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from speedswap._threads import EndingThread
from speedswap._words import a_kind
from speedswap.errors import BatchError

__all__ = ["ReadAhead", "Stack", "nbytes_of"]

Item = TypeVar("Item")

_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


def nbytes_of(sample: Any) -> int:
    """Return the bytes of a sample: of its arrays and tensors, and roughly of everything else.

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
    everything else, strings included, becomes a list. Samples and batch are never in memory twice.

    Args:
        size: number of samples in the batch.

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
            BatchError: its structure, shape or dtype differs from the first one's.
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
    """Yield each array of the batch with the sample's value for it."""
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
    """Return shape and dtype in words; the same for a number and the array element that it becomes."""
    if type(value) in _NUMBERS:
        value = _NUMBERS[type(value)](value)
    if not hasattr(value, "shape"):
        return a_kind(value)
    return f"shape {tuple(value.shape)} and dtype {value.dtype}"


class ReadAhead(Generic[Item]):
    """An iterator over the items that a generator yields in a thread of its own, as far ahead as memory allows.

    Args:
        source: runs in the thread.
        nbytes: returns the bytes of an item.
        room: returns the bytes for waiting items, the one being read and the one last handed out, given the bytes of
            the largest item so far.
    """

    def __init__(
        self, source: Generator[Item, None, None], nbytes: Callable[[Item], int], room: Callable[[int], int]
    ) -> None:
        self._source = source
        self._nbytes = nbytes
        self._room = room
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes = self._handed_out = self._largest = 0
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = EndingThread(self._read, name="speedswap-feed", ask=self._stop)
        self._thread.start()

    def __iter__(self) -> ReadAhead[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item; the one before counts as used up."""
        with self._changed:
            self._bytes -= self._handed_out
            self._handed_out = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if self._waiting:
                item, self._handed_out = self._waiting.popleft()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop reading, drop waiting items, and wait for the thread."""
        self._stop()
        self._thread.join()
        self._waiting.clear()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while self._may_read():
                item = next(self._source)
                size = self._nbytes(item)
                with self._changed:
                    self._waiting.append((item, size))
                    self._bytes += size
                    self._largest = max(self._largest, size)
                    self._changed.notify_all()
                del item
        except StopIteration:
            pass
        except BaseException as error:  # raised where the items are used
            self._error = error
        finally:
            self._source.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_read(self) -> bool:
        """Wait until there is room for another item; with none waiting, one is always read."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._bytes or self._bytes + self._largest <= self._room(self._largest)
            )
            return not self._closed
