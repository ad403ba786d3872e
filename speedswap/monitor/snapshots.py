"""A device's memory in use at one moment, and the source of the figures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from speedswap.batching.memory import free_bytes, status_bytes

__all__ = ["MemorySnapshot", "memory_snapshot"]


@dataclass(frozen=True)
class MemorySnapshot:
    """A device's memory at one moment, in bytes; None where it is unknown.

    Attributes:
        device: the device.
        source: ``"allocator"``: torch's allocator of the device, which counts tensors only; ``"process"``: the
            operating system, which counts all memory of the process.
        allocated: in use: live blocks of the allocator, or the process's resident memory.
        reserved: held by the allocator, in use or not.
        inactive: unused pieces of blocks that are partly in use (``inactive_split_bytes``): they cannot be returned to
            the driver, and serve only requests that fit into them.
        active: blocks in use or awaited by a stream.
        peak: the most that was allocated.
        free: bytes that could still be allocated.
        total: all of the device's.
        retries: how often the allocator released its cache and tried again.
        ooms: how often it ran out of memory.
    """

    device: str
    source: str
    allocated: int
    reserved: int | None = None
    inactive: int | None = None
    active: int | None = None
    peak: int | None = None
    free: int | None = None
    total: int | None = None
    retries: int | None = None
    ooms: int | None = None


def memory_snapshot(device: torch.device | str | int | None = None, *, synchronize: bool = True) -> MemorySnapshot:
    """Take a snapshot of a device's memory.

    Args:
        device: the device; by default the current CUDA device, or the CPU where there is none.
        synchronize: wait for the device's queued work first.

    Returns:
        The snapshot: on CUDA from the allocator, elsewhere from the operating system, as far as it reports.

    >>> memory_snapshot("cpu").source
    'process'
    """
    where = default_device() if device is None else torch.device(device)
    if where.type == "cuda":
        return _of_cuda(where, synchronize)
    return MemorySnapshot(
        device=str(where),
        source="process",
        allocated=status_bytes("/proc/self/status", "VmRSS") or _most_resident(),
        peak=status_bytes("/proc/self/status", "VmHWM") or _most_resident(),
        free=free_bytes("cpu"),
        total=_host_bytes(),
    )


def default_device() -> torch.device:
    """Return the current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _of_cuda(device: torch.device, synchronize: bool) -> MemorySnapshot:
    if synchronize:
        torch.cuda.synchronize(device)
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return MemorySnapshot(
        device=str(device),
        source="allocator",
        allocated=allocated,
        reserved=reserved,
        inactive=stats.get("inactive_split_bytes.all.current", 0),
        active=stats.get("active_bytes.all.current", 0),
        peak=torch.cuda.max_memory_allocated(device),
        free=free + reserved - allocated,
        total=total,
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def _most_resident() -> int:
    """Return the process's peak resident memory without /proc; 0 where that is unknown too."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
