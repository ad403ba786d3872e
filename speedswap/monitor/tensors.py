"""Follow the memory of tensors on any device, operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap.batching.nested import tensors_of

__all__ = ["Lifetime", "TensorTracker"]


@dataclass
class Lifetime:
    """What became of the memory that one kind of operation made.

    Attributes:
        operation: its name in torch.
        made: how many blocks it made.
        made_bytes: and their bytes.
        freed: how many of them are gone.
        lifetime: operations that those lived through, on average.
        largest: bytes of the largest block.
    """

    operation: str
    made: int = 0
    made_bytes: int = 0
    freed: int = 0
    lifetime: float = 0.0
    largest: int = 0


class TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, by watching every operation inside ``with``.

    Each storage counts once, whoever views it, until nothing holds it any more, the graph included. What no operation
    inside has touched is not known: ``add`` makes it so. It costs some microseconds an operation.

    Args:
        device: count this one's tensors alone; None for all.

    Attributes:
        live: bytes now.
        peak: the most since ``reset_peak``.
        operations: how many were seen.
        lifetimes: how long temporary blocks live, by the operation that made them.

    >>> with TensorTracker() as tracker:
    ...     x = torch.ones(1024)
    ...     y = x + (x * 2)
    >>> tracker.live, tracker.peak
    (8192, 12288)
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = None if device is None else torch.device(device)
        self._blocks: dict[int, tuple[weakref.ref[Any], int, str, int]] = {}
        self.live = self.peak = self.operations = 0
        self.lifetimes: dict[str, Lifetime] = {}

    def reset_peak(self) -> None:
        """Let the peak be what is alive now."""
        self.peak = self.live

    def add(self, value: Any, operation: str = "given") -> None:
        """Count the tensors of a nested value in."""
        for tensor in tensors_of(value):
            self._add(tensor, operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.add((args, kwargs))
        result = func(*args, **kwargs)
        self.operations += 1
        self.add(result, str(func.overloadpacket))
        return result

    def _add(self, tensor: Tensor, operation: str) -> None:
        if tensor.device.type == "meta" or not self._counts(tensor.device):
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse tensors have none
            return
        key = storage._cdata
        known = self._blocks.get(key)
        if known is not None and known[0]() is not None:
            return
        nbytes = storage.nbytes()
        self._blocks[key] = (weakref.ref(storage, self._freed(key)), nbytes, operation, self.operations)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if operation != "given":
            lifetime = self.lifetimes.setdefault(operation, Lifetime(operation))
            lifetime.made += 1
            lifetime.made_bytes += nbytes
            lifetime.largest = max(lifetime.largest, nbytes)

    def _counts(self, device: torch.device) -> bool:
        wanted = self._device
        return wanted is None or (device.type == wanted.type and wanted.index in (None, device.index))

    def _freed(self, key: int) -> Callable[[Any], None]:
        tracker_ref = weakref.ref(self)

        def freed(reference: Any) -> None:
            tracker = tracker_ref()
            if tracker is not None and key in tracker._blocks and tracker._blocks[key][0] is reference:
                tracker._forget(key)

        return freed

    def _forget(self, key: int) -> None:
        _, nbytes, operation, born = self._blocks.pop(key)
        self.live -= nbytes
        if operation in self.lifetimes:
            lifetime = self.lifetimes[operation]
            lifetime.freed += 1
            lifetime.lifetime += (self.operations - born - lifetime.lifetime) / lifetime.freed
