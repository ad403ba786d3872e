"""toma's functions about memory: its ``cpu_memory`` and ``torch_cuda_memory``, which are this module."""

from __future__ import annotations

import os

import torch

from speedswap.batching.memory import free_bytes, is_out_of_memory, release_cached_memory
from speedswap.errors import MemoryBudgetError

__all__ = [
    "cuda_meminfo",
    "gc_cuda",
    "get_available_cpu_memory",
    "get_cuda_assumed_available_memory",
    "get_cuda_available_memory",
    "get_cuda_blocked_memory",
    "get_cuda_total_memory",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_out_of_cpu_memory",
    "set_cpu_memory_limit",
]


gc_cuda = release_cached_memory


def get_available_cpu_memory() -> int:
    """Return the bytes that this process can still take: the system's free memory, or less under a limit of its own."""
    free = free_bytes("cpu")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def set_cpu_memory_limit(num_gigabytes: float) -> None:
    """Let allocations fail once this process has so many GiB of address space; no effect on systems without limits.

    All mappings count: libraries, files and the reservations of CUDA too. The limit can be raised again, up to the
    system's limit for this process.

    Raises:
        MemoryBudgetError: the limit is not positive.
    """
    limit = int(num_gigabytes * 2**30)
    if limit <= 0:
        raise MemoryBudgetError(f"num_gigabytes is {num_gigabytes!r}; it must be above 0")
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether an error says that the host's memory ran out."""
    return is_out_of_memory(exception) and (
        isinstance(exception, MemoryError) or "DefaultCPUAllocator" in str(exception)
    )


def get_cuda_total_memory() -> int:
    """Return the GPU's memory in bytes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def get_cuda_assumed_available_memory() -> int:
    """Return the bytes of the GPU's memory that torch has not taken from the driver."""
    return get_cuda_total_memory() - torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def get_cuda_available_memory() -> int:
    """Return the free bytes of the GPU's memory."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def get_cuda_blocked_memory() -> int:
    """Return the bytes of the GPU's memory that other processes and CUDA itself have taken."""
    return max(0, get_cuda_assumed_available_memory() - get_cuda_available_memory())


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error says that a GPU's memory ran out."""
    return is_out_of_memory(exception) and not is_out_of_cpu_memory(exception) and not is_cudnn_snafu(exception)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether an error is cuDNN's answer to a batch beyond its limits."""
    return is_out_of_memory(exception) and "CUDNN_STATUS_NOT_SUPPORTED" in str(exception)


def cuda_meminfo() -> None:
    """Print the memory that torch has taken from the GPU, now and at most; nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    for when, taken, kept in (
        ("now", torch.cuda.memory_allocated(), torch.cuda.memory_reserved()),
        ("at most", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()),
    ):
        print(f"{when}: {taken / 2**30:.3f} GiB in tensors, {kept / 2**30:.3f} GiB taken from the driver")
