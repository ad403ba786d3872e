"""InfinityBatch's batches and losses, and the streams that it keeps: inputs, outputs, targets and losses."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speedswap._words import a_kind
from speedswap.batching.nested import replace_tensors, tensors_of
from speedswap.compat.infinitybatch.changes import InfinityBatchError

_TARGET_KEYS = ("targets", "target", "labels", "label", "y")


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    A tuple or list has the targets last; a mapping has them under ``targets``, ``target``, ``labels``, ``label`` or
    ``y``. Several inputs stay a tuple, named ones a dictionary.

    Raises:
        InfinityBatchError: the batch has another form.

    >>> unpack(("pixels", "lengths", "digits"))
    (('pixels', 'lengths'), 'digits')
    >>> unpack({"pixels": 1, "labels": 2})
    ({'pixels': 1}, 2)
    """
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, batch[key]
        raise InfinityBatchError(
            f"a batch has the keys {', '.join(map(str, batch))}, none of which is {', '.join(_TARGET_KEYS)}; give "
            "InfinityBatch unpack=, which returns inputs and targets"
        )
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise InfinityBatchError(
        f"a batch is {a_kind(batch)}, not inputs and targets; give InfinityBatch unpack=, which returns both"
    )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return a model's outputs; a mapping is its named arguments, a tuple or list several positional ones."""
    if isinstance(inputs, MutableMapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def moved(value: Any, device: torch.device | None) -> Any:
    """Return a nested value with its tensors on a device."""
    if device is None:
        return value
    waits = device.type == "cpu"  # else data from a GPU would be read before it has arrived
    return replace_tensors(value, lambda tensor: tensor.to(device, non_blocking=not waits))


def samples_first(outputs: Any, size: int) -> Any:
    """Return outputs of ``size`` samples, with a first dimension for a single sample's that were squeezed to 0-d."""
    if size > 1:
        return outputs
    return replace_tensors(outputs, lambda tensor: tensor.reshape(1) if tensor.dim() == 0 else tensor)


class WatchedLoader:
    """A data loader whose batches are watched as they are yielded; in all else it is the loader.

    Args:
        loader: the loader.
        watched: called with the loader; yields its batches.
    """

    def __init__(self, loader: Any, watched: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        self._watched = watched

    def __iter__(self) -> Iterator[Any]:
        return self._watched(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: Any) -> Any:
        return self.loader[index]

    def __eq__(self, other: object) -> bool:
        return self.loader is (other.loader if isinstance(other, WatchedLoader) else other)

    def __hash__(self) -> int:
        return hash(id(self.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def named(value: Any) -> dict[Any, Any]:
    """Return one object, a list or a dictionary as a dictionary; a list's keys are its positions."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {0: value}


def as_list(value: Any) -> list[Any]:
    """Return one object, a list or a dictionary as a list."""
    return list(named(value).values())


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
    return tensor.detach().to("cpu", copy=True)


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


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One of the steps on each batch, for training several models, criteria or optimizers.

    Attributes:
        loss: called with the models, the criteria (both as InfinityBatch has them: one, a list, or by name), and inputs
            and targets of a micro-batch on the forward device; returns its loss. A loss that compares samples with each
            other, or is reduced otherwise than ``reduction`` and ``normalizer`` say, is refused on its first batch.
        optimizers: names or positions of the optimizers that step; None for all.
        reduction: the reduction of ``loss`` over samples, as for :class:`speedswap.BatchSplitter`.
        normalizer: called with inputs and targets; returns the count that the mean is over, samples by default.
    """

    loss: Callable[[Any, Any, Any, Any], Tensor]
    optimizers: Iterable[Any] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    normalizer: Callable[[Any, Any], Tensor | float] | None = None


# Their means are over elements, and each sample has equally many.
_OVER_ELEMENTS = {
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss),
    *(nn.SoftMarginLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits),
}
_OVER_TARGETS = {nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss}
Normalizer = Callable[[Any, Any], Tensor | float]
Reduction = tuple[Literal["mean", "sum"], Normalizer | None]
"""The reduction of a loss and its normalizer, as for :class:`speedswap.BatchSplitter`."""


def reduction_of(criterion: Any) -> Reduction | None:
    """Return the reduction of one of torch's criteria; None for others, and if it depends on more than samples.

    >>> reduction_of(nn.MSELoss(reduction="sum"))
    ('sum', None)
    >>> reduction_of(lambda outputs, targets: outputs.std()) is None
    True
    """
    kind = criterion if isinstance(criterion, FunctionType) else type(criterion)
    if kind not in _OVER_ELEMENTS | _OVER_TARGETS:
        return None
    reduction, weight = getattr(criterion, "reduction", "mean"), getattr(criterion, "weight", None)
    if reduction == "mean" and kind in _OVER_TARGETS:
        return "mean", _targets_counter(weight, getattr(criterion, "ignore_index", -100))
    if reduction == "sum":
        return "sum", None
    return ("mean", None) if reduction == "mean" and weight is None else None


def _targets_counter(weight: Tensor | None, ignored: int) -> Normalizer:
    """Return a function that counts the targets that are not ignored, by the weights of their classes."""

    def count(inputs: Any, targets: Tensor) -> Tensor | float:
        if targets.is_floating_point():  # probabilities of classes: the mean is over samples
            return len(targets)
        valid = targets[targets != ignored]
        return valid.numel() if weight is None else weight.to(valid.device)[valid].sum()

    return count
