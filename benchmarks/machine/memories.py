"""Kinds of host memory that a GPU reads and writes over the bus."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from speedswap.kernels.cuda import driver, pinning

__all__ = ["KINDS", "HostMemory"]

# Of CUDA's headers: CuPy has no names for them.
_PREFERRED_LOCATION, _ACCESSED_BY, _THE_PROCESSOR = 3, 5, -1


class HostMemory(Protocol):
    """Memory as bytes.

    Attributes:
        bytes: uint8, shape (nbytes,); empty once it is closed.
        failure: what kept a GPU from using it; None if it may.
    """

    bytes: Tensor
    failure: str | None

    def close(self) -> None:
        """Give the memory back."""


class _OfCuda:
    """Memory that CUDA has allocated at an address, which ``free`` gives back to it."""

    failure: str | None = None

    def __init__(self, pointer: int, nbytes: int, free: Callable[[int], None]) -> None:
        self.bytes = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
        self._pointer, self._free = pointer, free

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._free(self._pointer)


def _allocated(nbytes: int) -> HostMemory:
    runtime = driver.cupy().cuda.runtime
    flags = runtime.hostAllocPortable | runtime.hostAllocMapped
    return _OfCuda(runtime.hostAlloc(nbytes, flags), nbytes, runtime.freeHost)


def _managed(nbytes: int) -> HostMemory:
    """Take memory that stays with the processor, and is mapped by the current GPU."""
    runtime = driver.cupy().cuda.runtime
    taken = _OfCuda(runtime.mallocManaged(nbytes), nbytes, runtime.free)
    try:
        _advise(taken.bytes, _PREFERRED_LOCATION, _THE_PROCESSOR)
        _advise(taken.bytes, _ACCESSED_BY, runtime.getDevice())
    except BaseException:
        taken.close()
        raise
    return taken


def _advise(managed: Tensor, advice: int, device: int) -> None:
    """Advise CUDA; by the driver's own call where CuPy's takes no processor for a device, as from CUDA 13 on it may."""
    try:
        driver.cupy().cuda.runtime.memAdvise(managed.data_ptr(), managed.nbytes, advice, device)
    except RuntimeError as error:
        given = ctypes.c_uint64(managed.data_ptr()), ctypes.c_size_t(managed.nbytes), advice, device
        try:
            status = ctypes.CDLL("libcuda.so.1").cuMemAdvise(*given)
        except (OSError, AttributeError):
            raise error from None
        if status:
            raise RuntimeError(f"{error}; and by cuMemAdvise: error {status}") from error


KINDS: dict[str, Callable[[int], HostMemory]] = {
    "registered": pinning.PinnedMemory,
    "allocated": _allocated,
    "managed": _managed,
}
"""Functions that take memory, by kind; managed memory comes last, since too much of it can hang a GPU."""
