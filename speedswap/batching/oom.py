"""Out of memory: how it is recognized, and how what it left behind is given back."""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch

from speedswap.errors import SpeedswapError

__all__ = ["chain", "forget", "free_bytes", "is_out_of_memory", "release_cached_memory"]

# What the allocators and libraries under torch say. The class alone tells only for torch's own caching allocators;
# everything else arrives as RuntimeError.
_TEXTS = re.compile(
    "|".join(
        [
            r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA) out of memory",
            r"MPS backend out of memory",
            r"(CUDA|HIP)( driver)? error: out of memory",
            r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)",
            r"(CUDA|HIP)_ERROR_OUT_OF_MEMORY",
            r"(CUDA|HIP) failure (2 )?'out of memory'",  # NCCL and RCCL
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED",
            r"(CUFFT|HIPFFT)_ALLOC_FAILED",
            r"rocblas_status_memory_error",
            r"miopenStatusAllocFailed",
            r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers to a batch beyond its limits
            r"Unable to find a valid cuDNN algorithm",  # none fits into the memory left for workspaces
            r"(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
            r"PT_DEVMEM Allocation failed",  # Gaudi
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
        ]
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, so that the same work in smaller pieces may succeed.

    CUDA, cuBLAS, cuDNN, cuFFT, HIP, XPU, MPS, torch's CPU allocator and Python's own ``MemoryError`` are recognized.
    An error of speedswap's own never counts: it asks for something else than a smaller batch.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    False
    """
    if isinstance(error, SpeedswapError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def forget(error: BaseException) -> None:
    """Let go of all that an error's tracebacks keep alive: the local variables of the frames that failed.

    Call it outside the ``except`` block; inside, the interpreter still holds the error's frames. An exception that the
    caller is handling meanwhile, in the context of which the error arose, is left alone.
    """
    for failure in _chain(error, sys.exc_info()[1]):
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None


def _chain(error: BaseException, end: BaseException | None) -> Iterator[BaseException]:
    """An error and those it came from, short of ``end``."""
    seen = {id(end)}
    waiting = [error]
    while waiting:
        failure = waiting.pop()
        if id(failure) not in seen:
            seen.add(id(failure))
            yield failure
            waiting += [other for other in (failure.__cause__, failure.__context__) if other is not None]


def chain(errors: Sequence[BaseException], cause: BaseException) -> None:
    """Make each error the cause of the next one, and ``cause`` that of the first.

    Causes that they have already stay, with the chain behind them; one object that was raised again and again is one
    link.
    """
    linked = {id(cause)}
    for error in errors:
        if id(error) in linked:
            continue
        last = error
        while last.__cause__ is not None and id(last.__cause__) not in linked:
            linked.add(id(last))
            last = last.__cause__
        linked |= {id(last), id(error)}
        last.__cause__ = cause
        cause = error


def release_cached_memory() -> None:
    """Collect garbage and give the memory that torch's allocators keep for later back to the devices.

    For after an out-of-memory alone: it takes milliseconds, and training without it is faster.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def free_bytes(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on a device; None where that cannot be known.

    On CUDA, what the driver has left and what torch's allocator keeps unused; on the CPU, what Linux calls available,
    or what is left below the process's address space limit where that is less.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_stats_as_nested_dict(device)  # once, and not flattened: that takes longer than asking
        return int(free + held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"])
    if device.type == "cpu":
        return _free_host_bytes()
    return None


def _free_host_bytes() -> int | None:
    bounds = []
    available = _kilobytes("/proc/meminfo", "MemAvailable")
    if available is not None:
        bounds.append(available)
    try:
        import resource
    except ImportError:  # not on Windows
        return min(bounds, default=None)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _kilobytes("/proc/self/status", "VmSize") if limit != resource.RLIM_INFINITY else None
    if taken is not None:
        bounds.append(max(0, limit - taken))
    return min(bounds, default=None)


def _kilobytes(path: str, field: str) -> int | None:
    """A field of one of Linux's status files, in bytes."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
