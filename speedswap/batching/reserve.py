"""Memory that a new size leaves free, the state that optimizers have not created yet included."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap.batching.estimating import measure_step
from speedswap.batching.memory import release_cached_memory


class Reserve:
    """Memory that a size leaves free when it is first tried.

    Args:
        nbytes: on each device, for fragmentation and other processes.
        optimizers: whose state is added until it is there.
    """

    def __init__(self, nbytes: int, optimizers: Sequence[Optimizer]) -> None:
        self._nbytes = nbytes
        self._optimizers = optimizers
        self._states: dict[tuple[int, torch.device], int] = {}

    def on(self, device: torch.device) -> int:
        """Return the bytes to leave free on a device."""
        return self._nbytes + sum(self._state(one, device) for one in self._optimizers if not one.state)

    def _state(self, optimizer: Optimizer, device: torch.device) -> int:
        def nbytes(tensor: Tensor) -> int:
            return tensor.untyped_storage().nbytes() if tensor.device == device else 0

        key = id(optimizer), device
        if key not in self._states:
            self._states[key], _ = measure_step(optimizer, {}, nbytes)
        return self._states[key]

    @contextmanager
    def left_free(self, devices: Collection[torch.device]) -> Iterator[None]:
        """Occupy that memory inside the block, so that what does not fit beside it runs out of memory."""
        held = [torch.empty(self.on(device), dtype=torch.uint8, device=device) for device in devices]
        try:
            yield
        finally:
            is_new = any(one.numel() and one.device.type != "cpu" for one in held)
            held.clear()
            if is_new:
                release_cached_memory()  # other processes may need it
