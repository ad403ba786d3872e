"""The memory that holds a table's records: what every kind has in common, and memory of the host and of a GPU.

Memory is taken exactly: anonymous mappings of the requested size, never a pool that rounds up to a power of two. Pinned
memory is such a mapping, faulted in and then registered with CUDA; a file mapping is never registered.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._warnings import warn_once
from speedswap.errors import TableTooLargeError
from speedswap.kernels.cuda import pinning

MemoryKind = Literal["device", "pinned", "pageable"]

_log = logging.getLogger("speedswap")


def default_kind() -> MemoryKind:
    """Return the memory where a table lives by default: pinned where there is a CUDA device, else pageable."""
    return "pinned" if kernels.cuda_ready()[0] else "pageable"


class Memory:
    """Bytes that hold records.

    Attributes:
        bytes: all of them as one uint8 tensor.
        pinned: whether they are host memory that CUDA kernels may read and write directly.
        fence: the work on it that GPUs have not completed.
    """

    bytes: Tensor
    pinned = False
    fence: kernels.Fence | None = None

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    def settle(self) -> None:
        """Wait until no GPU reads or writes the bytes, so that the host may; only pinned memory needs it."""

    def share(self) -> None:
        """Mark the bytes as shared: outside work of GPUs on them is not tracked; only pinned memory needs it."""

    def close(self) -> None:
        """Release the memory. Views of it must no longer be used."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class DeviceMemory(Memory):
    """Memory of a CUDA device; ordinary memory on a machine without one."""

    def __init__(self, nbytes: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.fence = kernels.Fence() if device == "cuda" else None


class HostMemory(Memory):
    """Anonymous memory, pinned if requested and possible."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        ready, reason = kernels.cuda_ready() if pin else (False, "")
        if not ready:
            if pin:
                warn_once(f"storage 'pinned' works as 'pageable' here: {reason}")
            self.bytes = torch.frombuffer(pinning.anonymous(nbytes), dtype=torch.uint8)
            return
        self._pinned = pinning.PinnedMemory(nbytes)
        self.bytes = self._pinned.bytes
        if self._pinned.failure is not None:
            warn_once(
                f"storage 'pinned' works as 'pageable' here: {nbytes / 2**30:.2f} GiB could not be registered with "
                f"CUDA ({self._pinned.failure}); `speedswap info` shows the limits"
            )
            return
        self.pinned = True
        self.fence = kernels.Fence()

    def settle(self) -> None:
        if self.fence is not None:
            self.fence.wait()

    def share(self) -> None:
        if self.fence is not None:
            self.fence.share()

    def close(self) -> None:
        if self.pinned:
            self._pinned.close()
            self.pinned = False
        self.fence = None
        super().close()


def allocate(storage: MemoryKind, nbytes: int) -> Memory:
    """Allocate zeroed memory for a table that does not live in a file.

    Raises:
        TableTooLargeError: it could not be allocated.
    """
    try:
        if storage == "device":
            return DeviceMemory(nbytes)
        return HostMemory(nbytes, pin=storage == "pinned")
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        raise TableTooLargeError(
            f"could not allocate {nbytes / 2**30:.2f} GiB of {storage} memory ({error}); "
            "use storage='disk' with a path, or fewer or narrower rows"
        ) from error


def available_bytes() -> int:
    """Return the bytes of host memory that can be allocated without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        _log.debug("MemAvailable could not be read: %s", error)
    return physical_bytes()


def physical_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
