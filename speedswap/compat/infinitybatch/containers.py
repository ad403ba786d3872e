"""The streams of a training, epoch by epoch: inputs, outputs, targets, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from speedswap.compat.infinitybatch.codes import InfinityBatchError
from speedswap.monitor import NoStorage, Storage, make_storage

__all__ = ["Containers", "HasContainers", "Strategies"]

STREAMS = ("inputs", "outputs", "targets")
Strategy = str | Callable[[], Storage]
Strategies = Strategy | Mapping[str, Strategy]


class Containers:
    """What is kept of each epoch's batches: of losses ``(loss, samples)``, of all else what its strategy says.

    Args:
        strategies: for all streams, or by stream (``inputs``, ``outputs``, ``targets``; what is left out keeps
            nothing): ``none``, ``last``, ``host``, ``statistics``, ``disk``, or a function that makes a storage.

    Attributes:
        losses: by epoch, by batch.
        streams: for each stream a storage by epoch.
    """

    def __init__(self, strategies: Strategies) -> None:
        given = strategies if isinstance(strategies, Mapping) else dict.fromkeys(STREAMS, strategies)
        if unknown := set(given) - set(STREAMS):
            raise InfinityBatchError(f"containers has {', '.join(sorted(unknown))}; it may have {', '.join(STREAMS)}")
        self._strategies: dict[str, Strategy] = {name: given.get(name, "none") for name in STREAMS}
        self.losses: list[list[tuple[Any, int]]] = []
        self.streams: dict[str, list[Storage]] = {name: [] for name in STREAMS}
        for name in STREAMS:
            self._make(name)  # so that an unknown strategy is an error now

    def clear(self) -> None:
        """Let go of everything."""
        self.losses = []
        self.streams = {name: [] for name in STREAMS}

    def begin_epoch(self) -> None:
        """Begin a new entry in each stream."""
        self.losses.append([])
        for name, epochs in self.streams.items():
            if epochs and self._strategies[name] == "last":  # the last there was, not the last of each epoch
                epochs[-1].clear()
            epochs.append(self._make(name))

    def keeps(self, name: str) -> bool:
        """Whether anything is kept of a stream."""
        return bool(self.streams[name]) and not isinstance(self.streams[name][-1], NoStorage)

    def add(self, name: str, value: Any) -> None:
        """Give a stream its next value."""
        if self.keeps(name):
            self.streams[name][-1].append(value)

    def _make(self, name: str) -> Storage:
        strategy = self._strategies[name]
        return strategy() if callable(strategy) else make_storage(strategy)  # type: ignore[arg-type]


class HasContainers:
    """The containers as properties.

    Args:
        strategies: as of :class:`Containers`.
    """

    def __init__(self, strategies: Strategies) -> None:
        self._containers = Containers(strategies)

    @property
    def inputs(self) -> list[Storage]:
        """Inputs by epoch and batch, as far as ``containers`` keeps them."""
        return self._containers.streams["inputs"]

    @property
    def outputs(self) -> list[Storage]:
        """Outputs by epoch and batch, as far as ``containers`` keeps them; without their graphs."""
        return self._containers.streams["outputs"]

    @property
    def targets(self) -> list[Storage]:
        """Targets by epoch and batch, as far as ``containers`` keeps them."""
        return self._containers.streams["targets"]

    @property
    def losses(self) -> list[list[tuple[Any, int]]]:
        """``(loss, samples)`` by epoch and batch; with several steps a tuple of their losses."""
        return self._containers.losses

    def clearcontainers_(self) -> None:
        """Let go of all that was kept."""
        self._containers.clear()

    def epochstart_(self) -> None:
        """Begin an epoch in each container."""
        self._containers.begin_epoch()
