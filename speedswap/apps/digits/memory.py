"""Memory with a limit: tensors are counted, and one too many is out of memory, on any machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap.batching.nested import tensors_of

__all__ = ["LimitedMemory"]


class LimitedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that are made inside of it, and raises ``torch.OutOfMemoryError`` when they are too many.

    It sits where torch calls its kernels, in the backward pass too. Tensors made outside are not counted; those
    made inside are, until they are freed, there or later. What a kernel takes and gives back by itself is not seen.

    Args:
        limit_bytes: what may be alive at once; without one everything is only counted.

    Attributes:
        live_bytes: what is alive now.
        peak_bytes: the most that was alive at once since :meth:`reset_peak`.

    Example:
        >>> memory = LimitedMemory(limit_bytes=1000)
        >>> with memory:
        ...     kept = torch.ones(200)  # 800 bytes
        ...     view = kept.view(10, 20)  # and no more for a view
        ...     more = torch.ones(51)
        Traceback (most recent call last):
        torch.OutOfMemoryError: out of memory: 204 bytes more would make it 1,004, and the limit is 1,000
        >>> del kept, view
        >>> memory.live_bytes, memory.peak_bytes
        (0, 800)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted: set[int] = set()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors_of(made)}
        # The same storage as an argument's: a view, or written in place.
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))} if storages else ()
        for key, storage in storages.items():
            if key not in given and key not in self._counted:
                self._count(key, storage)
        return made

    def _count(self, key: int, storage: UntypedStorage) -> None:
        nbytes = storage.nbytes()
        if self.limit_bytes is not None and self.live_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory: {nbytes:,} bytes more would make it {self.live_bytes + nbytes:,}, "
                f"and the limit is {self.limit_bytes:,}"
            )
        self._counted.add(key)
        weakref.finalize(storage, self._freed, key, nbytes).atexit = False
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= nbytes
