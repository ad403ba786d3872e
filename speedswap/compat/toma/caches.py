"""toma's caches of sizes that fitted, and what tells situations apart: stack traces and free memory.

toma's modules ``stacktrace``, ``cpu_memory`` and ``torch_cuda_memory`` are this one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

import torch

from speedswap.batching.attempts import Limits
from speedswap.batching.memory import free_bytes, is_out_of_memory, release_cached_memory
from speedswap.batching.retry import Search
from speedswap.errors import MemoryBudgetError

P = ParamSpec("P")
R = TypeVar("R")

# ---------------------------------------------------------------------- stack traces


class _Watermark(threading.local):
    """The number of a thread's outermost frames that traces leave out."""

    frames = 0


_watermark = _Watermark()


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def get_simple_traceback(ignore_top: int = 0) -> tuple[tuple[str, int, str], ...]:
    """Return the callers, innermost first, down to the watermark: file, line and function of each.

    It holds no frames, and costs a tenth of a microsecond per frame.

    Args:
        ignore_top: the number of innermost callers to leave out.
    """
    callers = [(one.f_code.co_filename, one.f_lineno, one.f_code.co_name) for one in _walk(sys._getframe())]
    return tuple(callers[1 + ignore_top : len(callers) - _watermark.frames])


@contextlib.contextmanager
def watermark(*, above: int = 3) -> Iterator[None]:
    """Leave out, inside the ``with`` block, the callers of its function.

    Args:
        above: the number of frames from this one to that function, which is kept.
    """
    before, _watermark.frames = _watermark.frames, sum(1 for _ in _walk(sys._getframe())) - above
    try:
        yield
    finally:
        _watermark.frames = before


def set_watermark(func: Callable[P, R]) -> Callable[P, R]:
    """Leave out the function's callers in traces that are taken while it runs."""

    @functools.wraps(func)
    def watermark_wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with watermark(above=2):
            return func(*args, **kwargs)

    return watermark_wrapper


# ---------------------------------------------------------------------- memory

gc_cuda = release_cached_memory


def get_available_cpu_memory() -> int:
    """Return the bytes that this process can still take: the system's free memory, or less under its own limit."""
    free = free_bytes("cpu")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def set_cpu_memory_limit(num_gigabytes: float) -> None:
    """Make allocations fail beyond that many GiB of address space; no effect on systems without limits.

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


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether an error is cuDNN's answer to a batch beyond its limits."""
    return is_out_of_memory(exception) and "CUDNN_STATUS_NOT_SUPPORTED" in str(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error says that a GPU's memory ran out."""
    return is_out_of_memory(exception) and not is_out_of_cpu_memory(exception) and not is_cudnn_snafu(exception)


def get_cuda_total_memory() -> int:
    """Return the GPU's memory in bytes; 0 without a GPU."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0


def get_cuda_assumed_available_memory() -> int:
    """Return the bytes of the GPU's memory that torch has not taken from the driver."""
    return get_cuda_total_memory() - torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def get_cuda_available_memory() -> int:
    """Return the free bytes of the GPU's memory."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def get_cuda_blocked_memory() -> int:
    """Return the bytes of the GPU's memory that other processes and CUDA itself have taken."""
    return max(0, get_cuda_assumed_available_memory() - get_cuda_available_memory())


def cuda_meminfo() -> None:
    """Print the memory that torch has taken from the GPU, now and at most; nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    for when, taken, kept in (
        ("now", torch.cuda.memory_allocated(), torch.cuda.memory_reserved()),
        ("at most", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()),
    ):
        print(f"{when}: {taken / 2**30:.3f} GiB in tensors, {kept / 2**30:.3f} GiB taken from the driver")


# ---------------------------------------------------------------------- sizes


class Batchsize(Search):
    """One call's size, which halves from step to step of toma's sequence.

    Args:
        value: the first size.
        limits: the sizes that earlier calls found to fit.
        key: the situation of this call.
    """

    def __init__(self, value: int, limits: Limits | None = None, key: Hashable = None) -> None:
        super().__init__("the function", value, limits, key)

    @property
    def value(self) -> int:
        """Size of the next attempt."""
        return self.size

    def get(self) -> int:
        """Return the size of the next attempt."""
        return self.size

    def decrease_batchsize(self) -> None:
        """Halve the size, to no less than 1."""
        self.size = max(1, self.size // 2)

    @property
    def failed_length(self) -> int:
        """The step, also if the failed piece was a shorter one at the end."""
        return self.size

    def memory_class(self) -> int:
        """Return one class for all: if memory matters, it is a part of the key."""
        return 0


class BatchsizeCache:
    """Base of the caches, one per function or context."""

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """Return the size for a call with ``initial_batchsize``."""
        raise NotImplementedError


class NoBatchsizeCache(BatchsizeCache):
    """A cache that starts each call with the requested size."""

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """Return the requested size."""
        return Batchsize(initial_batchsize)


class GlobalBatchsizeCache(BatchsizeCache):
    """A cache of the size that fitted, whatever the caller."""

    def __init__(self) -> None:
        self._limits = Limits()

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """Return the size that fitted last, if it is below the requested one."""
        return Batchsize(initial_batchsize, self._limits)


class StacktraceMemoryBatchsizeCache(BatchsizeCache):
    """A cache of the sizes that fitted, for each stack of callers and amount of free memory.

    Args:
        lru_cache_size: the number of remembered ones; :attr:`LRU_CACHE_SIZE` by default.
    """

    LRU_CACHE_SIZE: int = 2**16
    MEMORY_GRANULARITY: int = 2**28
    """Bytes within which amounts of free memory count as equal."""
    TRACK_RAM: bool = True
    """Count the host's memory too, not only the GPU's."""

    def __init__(self, lru_cache_size: int | None = None) -> None:
        self._limits = Limits(self.LRU_CACHE_SIZE if lru_cache_size is None else lru_cache_size)

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """Return the size that fitted last in this situation, if it is below the requested one."""
        ram = get_available_cpu_memory() // self.MEMORY_GRANULARITY if self.TRACK_RAM else -1
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpu = (free_bytes("cuda") or 0) // self.MEMORY_GRANULARITY if uses_gpu else 0
        return Batchsize(initial_batchsize, self._limits, (get_simple_traceback(1), ram, gpu))
