"""Out-of-memory errors: recognizing them, and releasing what a failed attempt still holds."""

from __future__ import annotations

import errno
import gc
import re
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch

from speedswap.errors import SpeedswapError

__all__ = ["chain", "forget", "free_bytes", "is_out_of_memory", "memory_class", "release_cached_memory", "status_bytes"]

# Messages of the allocators and libraries under torch. Only torch's own caching allocators raise a class of their own;
# everything else arrives as RuntimeError.
_TEXTS = re.compile(
    "|".join(
        [
            r"\b(CPU|CUDA|HIP|XPU|NPU|MLU|MUSA|HPU) out of memory",
            r"MPS backend out of memory",
            r"^Invalid buffer size: ",  # MPS
            r"(CUDA|HIP)( driver)? error: out of memory",
            r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)",
            r"(CUDA|HIP)_ERROR_OUT_OF_MEMORY",
            r"(CUDA|HIP) failure (2 )?'out of memory'",  # NCCL and RCCL
            r"Failed to (CUDA|HIP) (host )?(calloc|malloc)",  # likewise
            r"NVML_SUCCESS == .*CUDACachingAllocator",  # the allocator, where it cannot say how much memory there is
            r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # its workspace did not fit
            r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED",
            r"(CUFFT|HIPFFT)_ALLOC_FAILED",
            r"rocblas_status_memory_error",
            r"miopenStatusAllocFailed",
            r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers to a batch beyond its limits
            r"Unable to find a valid cuDNN algorithm",  # none fits into the memory left for workspaces
            r"(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
            r"PT_DEVMEM Allocation failed",  # Gaudi
            r"RESOURCE_EXHAUSTED",  # XLA
            r"HSA_STATUS_ERROR_OUT_OF_RESOURCES",
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            r"could not (create|execute) a primitive(?! descriptor)",  # oneDNN, without room for code or workspace
            r"std::bad_alloc|^bad allocation$",
            r"Cannot allocate memory",  # ENOMEM, as of shared memory
        ]
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory, so that the same work in smaller pieces may succeed.

    Errors of CUDA, cuBLAS, cuDNN, cuFFT, NCCL, HIP, XPU, MPS, XLA, oneDNN and torch's CPU allocator, Python's
    ``MemoryError``, NumPy's and CuPy's, and ``OSError`` with ``ENOMEM`` are recognized. speedswap's own errors never
    count: their remedy is not a smaller batch.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    False
    """
    if isinstance(error, SpeedswapError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def forget(error: BaseException) -> None:
    """Release everything that an error's tracebacks keep alive: the local variables of the failed frames.

    Call it outside the ``except`` block; inside, the interpreter still holds the error's frames. An exception that the
    caller is handling meanwhile, and in whose context the error arose, is left alone.
    """
    for failure in _chain(error, sys.exc_info()[1]):
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None


def _chain(error: BaseException, end: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those it came from, short of ``end``."""
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

    Existing causes stay, with the chain behind them; an object that was raised repeatedly is one link.
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
    """Collect garbage, and return the memory that torch's allocators cache to the devices.

    Only for use after an out-of-memory: it takes milliseconds, and training is faster without it.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def free_bytes(device: torch.device | str) -> int | None:
    """Return the bytes that can still be allocated on a device; None where that is unknown.

    On CUDA, the driver's free memory and the unused part of torch's cache; on the CPU, what Linux calls available, or
    the rest of the process's address space limit where that is less.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_stats_as_nested_dict(device)  # not flattened: that takes longer than the query
        return int(free + held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"])
    if device.type == "cpu":
        return _free_host_bytes()
    return None


def memory_class(device: torch.device | str) -> int:
    """Return the class of a device's free memory: the number of bits of its bytes; 0 where that is unknown."""
    return (free_bytes(device) or 0).bit_length()


def _free_host_bytes() -> int | None:
    bounds = []
    available = status_bytes("/proc/meminfo", "MemAvailable")
    if available is not None:
        bounds.append(available)
    try:
        import resource
    except ImportError:  # not on Windows
        return min(bounds, default=None)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = status_bytes("/proc/self/status", "VmSize") if limit != resource.RLIM_INFINITY else None
    if taken is not None:
        bounds.append(max(0, limit - taken))
    return min(bounds, default=None)


def status_bytes(path: str, field: str) -> int | None:
    """Return a field of one of Linux's status files, in bytes; None where there is no such file or field."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
