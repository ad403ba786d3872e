"""The streams kept during training, per epoch: inputs, outputs, targets and losses, by storage strategy."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap.batching.nested import replace_tensors, tensors_of
from speedswap.compat.infinitybatch.codes import InfinityBatchError


class RunningStatistics:
    """Count, mean, variance and bounds of all the numbers that were added (Welford's method, batch by batch).

    Tensors stay on their device until a figure is read; one element per figure is kept.

    Attributes:
        count: how many numbers were added.

    >>> statistics = RunningStatistics()
    >>> statistics.add(torch.tensor([1.0, 2.0])); statistics.add(6)
    >>> statistics.count, statistics.mean, statistics.maximum
    (3, 3.0, 6.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._figures = [torch.tensor(figure) for figure in (0.0, 0.0, math.inf, -math.inf)]

    def add(self, value: Any) -> None:
        """Add a number, or all the numbers of a tensor or of the tensors in a nested value."""
        if isinstance(value, (int, float)):
            value = torch.tensor(value, dtype=torch.float64)
        for tensor in tensors_of(value):
            if tensor.numel():
                self._add(tensor.detach())

    def _add(self, tensor: Tensor) -> None:
        values = tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
        n, m = self.count, values.numel()
        mean, squares, least, most = (figure.to(values) for figure in self._figures)
        shift = values.mean() - mean
        squares = squares + (values - values.mean()).square().sum() + shift.square() * (n * m / (n + m))
        bounds = torch.minimum(least, values.min()), torch.maximum(most, values.max())
        self._figures = [mean + shift * (m / (n + m)), squares, *bounds]
        self.count = n + m

    @property
    def mean(self) -> float:
        """Mean of all numbers; NaN without any."""
        return float(self._figures[0]) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Unbiased variance; NaN below two numbers."""
        return float(self._figures[1]) / (self.count - 1) if self.count > 1 else math.nan

    @property
    def standard_deviation(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    @property
    def minimum(self) -> float:
        """The least number; infinite without any."""
        return float(self._figures[2])

    @property
    def maximum(self) -> float:
        """The greatest number; minus infinite without any."""
        return float(self._figures[3])

    def as_dict(self) -> dict[str, float]:
        """Return all figures by name."""
        names = ("count", "mean", "standard_deviation", "minimum", "maximum")
        return {name: getattr(self, name) for name in names}


def _host_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


class HostStorage(Sequence[Any]):
    """The kept values of a stream: numbers, tensors, or nested values of them, without graphs; here in host memory.

    Args:
        limit: the number of values that are kept, the newest ones; None for all, which grows without bound.
        copy: returns the kept form of a tensor; a copy in host memory by default.
    """

    def __init__(self, limit: int | None = None, copy: Callable[[Tensor], Tensor] = _host_copy) -> None:
        self._values: deque[Any] = deque(maxlen=limit)
        self._copy = copy

    def append(self, value: Any) -> None:
        """Take the stream's next value."""
        self._values.append(replace_tensors(value, self._copy))

    def clear(self) -> None:
        """Release all values."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def _get(self, position: int) -> Any:
        return self._values[position]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(position) for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"value {index} of {len(self)} kept values; the storage's strategy decides which are kept")
        return self._get(index)


class StatisticsStorage(HostStorage):
    """The :class:`RunningStatistics` of all numbers, its only value."""

    def append(self, value: Any) -> None:
        """Add the value's numbers."""
        statistics = self._values[0] if self._values else RunningStatistics()
        statistics.add(value)
        if statistics.count and not self._values:
            self._values.append(statistics)


class DiskStorage(HostStorage):
    """One file per value, written with ``torch.save`` and read with ``weights_only=True``.

    Args:
        directory: the directory, which is created if missing; values of an earlier storage in it come first. By default
            a temporary one that is removed with the storage.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="speedswap-")
            weakref.finalize(self, temporary.cleanup)
            directory = temporary.name
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._values.extend(sorted(self.directory.glob("[0-9]*.pt")))

    def append(self, value: Any) -> None:
        """Write the value."""
        path = self.directory / f"{len(self):08d}.pt"
        torch.save(replace_tensors(value, self._copy), path)
        self._values.append(path)

    def _get(self, position: int) -> Any:
        return torch.load(self._values[position], weights_only=True)

    def clear(self) -> None:
        """Remove the files."""
        for path in self._values:
            path.unlink(missing_ok=True)
        super().clear()


Strategy = str | Callable[[], HostStorage]
Strategies = Strategy | Mapping[str, Strategy]
STREAMS = ("inputs", "outputs", "targets")
_STRATEGIES: dict[str, Callable[[], HostStorage]] = {
    "none": lambda: HostStorage(limit=0),
    "last": lambda: HostStorage(limit=1, copy=Tensor.detach),
    "host": HostStorage,
    "statistics": StatisticsStorage,
    "disk": DiskStorage,
}


def make_storage(strategy: Strategy) -> HostStorage:
    """Return a new storage by its strategy: ``none``, ``last``, ``host``, ``statistics``, ``disk``, or a function.

    Raises:
        ValueError: the strategy is unknown.

    >>> losses = make_storage("statistics")
    >>> losses.append(torch.tensor(2.0)); losses.append(4.0)
    >>> losses[0].mean
    3.0
    """
    if callable(strategy):
        return strategy()
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {', '.join(_STRATEGIES)}, or a function that makes a storage"
        )
    return _STRATEGIES[strategy]()


def strategies_of(containers: Strategies) -> dict[str, Strategy]:
    """Return the strategy of each stream, from one for all or from a dictionary; a missing one keeps nothing.

    Raises:
        InfinityBatchError: there is no such stream.
        ValueError: a strategy is unknown.
    """
    given = containers if isinstance(containers, Mapping) else dict.fromkeys(STREAMS, containers)
    if unknown := set(given) - set(STREAMS):
        raise InfinityBatchError(f"containers has {', '.join(sorted(unknown))}; it may have {', '.join(STREAMS)}")
    for strategy in given.values():
        make_storage(strategy)
    return {name: given.get(name, "none") for name in STREAMS}
