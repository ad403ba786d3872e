"""What becomes of a stream of outputs or losses: nothing, the last, copies in host memory, figures, or files."""

from __future__ import annotations

import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from speedswap.batching.nested import replace_tensors
from speedswap.monitor.statistics import RunningStatistics

__all__ = ["DiskStorage", "HostStorage", "LastStorage", "NoStorage", "StatisticsStorage", "Storage", "make_storage"]

Strategy = Literal["none", "last", "host", "statistics", "disk"]


class Storage(ABC):
    """Where the values of a stream go. Whatever is kept is detached: no graph stays alive by it."""

    @abstractmethod
    def append(self, value: Any) -> None:
        """Take the stream's next value: a number, a tensor, or a nested value of them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many values can be had."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """One value, or several."""
        if isinstance(index, slice):
            return [self._get(position) for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"value {index} of {len(self)} that were kept; which are kept is the storage's strategy")
        return self._get(position)

    def __iter__(self) -> Iterator[Any]:
        return (self._get(position) for position in range(len(self)))

    @abstractmethod
    def _get(self, position: int) -> Any: ...

    @abstractmethod
    def clear(self) -> None:
        """Let go of everything."""


class NoStorage(Storage):
    """Keeps nothing."""

    def append(self, value: Any) -> None:
        """Let go of it."""

    def __len__(self) -> int:
        return 0

    def _get(self, position: int) -> Any:
        raise IndexError(position)

    def clear(self) -> None:
        """There is nothing to let go of."""


class HostStorage(Storage):
    """Keeps copies in host memory.

    Args:
        limit: how many; the oldest go. None for all, which grows without bound.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._values: list[Any] = []

    def append(self, value: Any) -> None:
        """Keep a copy of it."""
        self._values.append(replace_tensors(value, _host_copy))
        if self._limit is not None:
            del self._values[: max(0, len(self._values) - self._limit)]

    def __len__(self) -> int:
        return len(self._values)

    def _get(self, position: int) -> Any:
        return self._values[position]

    def clear(self) -> None:
        """Let go of the copies."""
        self._values.clear()


class LastStorage(HostStorage):
    """Keeps the last value, detached, where it is."""

    def append(self, value: Any) -> None:
        """Keep it in place of the one before."""
        self._values = [replace_tensors(value, Tensor.detach)]


class StatisticsStorage(Storage):
    """Keeps :class:`speedswap.monitor.RunningStatistics` of all numbers; its only value is those."""

    def __init__(self) -> None:
        self.statistics = RunningStatistics()

    def append(self, value: Any) -> None:
        """Count its numbers in."""
        self.statistics.add(value)

    def __len__(self) -> int:
        return 1 if self.statistics.count else 0

    def _get(self, position: int) -> RunningStatistics:
        return self.statistics

    def clear(self) -> None:
        """Begin anew."""
        self.statistics = RunningStatistics()


class DiskStorage(Storage):
    """Writes each value to a file of its own, with ``torch.save``, and reads it back with ``weights_only=True``.

    Args:
        directory: where; it is made if need be, and files of a storage that was there before are read on. By default a
            temporary one that goes away with the storage.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="speedswap-")
            weakref.finalize(self, temporary.cleanup)
            directory = temporary.name
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._count = len(list(self.directory.glob("[0-9]*.pt")))

    def _path(self, position: int) -> Path:
        return self.directory / f"{position:08d}.pt"

    def append(self, value: Any) -> None:
        """Write it."""
        torch.save(replace_tensors(value, _host_copy), self._path(self._count))
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def _get(self, position: int) -> Any:
        return torch.load(self._path(position), weights_only=True)

    def clear(self) -> None:
        """Remove the files."""
        for position in range(self._count):
            self._path(position).unlink(missing_ok=True)
        self._count = 0


_STRATEGIES: dict[str, Callable[[], Storage]] = {
    "none": NoStorage,
    "last": LastStorage,
    "host": HostStorage,
    "statistics": StatisticsStorage,
    "disk": DiskStorage,
}


def make_storage(strategy: Strategy | Storage) -> Storage:
    """A storage by its strategy's name: ``none``, ``last``, ``host``, ``statistics`` or ``disk``; or the one given.

    Raises:
        ValueError: there is no such strategy.

    >>> losses = make_storage("statistics")
    >>> losses.append(torch.tensor(2.0)); losses.append(4.0)
    >>> losses[0].mean
    3.0
    """
    if isinstance(strategy, Storage):
        return strategy
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(_STRATEGIES)}, or a Storage")
    return _STRATEGIES[strategy]()


def _host_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
