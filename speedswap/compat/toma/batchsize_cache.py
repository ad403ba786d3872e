"""toma's caches of sizes that fitted, and its stack traces, by which one cache keeps calls apart."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

import torch

from speedswap.batching.attempts import SharedLimits
from speedswap.batching.memory import free_bytes
from speedswap.batching.retry import Search
from speedswap.compat.toma.memory import get_available_cpu_memory

__all__ = [
    "Batchsize",
    "BatchsizeCache",
    "GlobalBatchsizeCache",
    "NoBatchsizeCache",
    "StacktraceMemoryBatchsizeCache",
    "get_simple_traceback",
    "set_watermark",
    "watermark",
]

P = ParamSpec("P")
R = TypeVar("R")


class _Watermark(threading.local):
    """The number of a thread's outermost frames that are left out."""

    frames = 0


_watermark = _Watermark()


def get_simple_traceback(ignore_top: int = 0) -> tuple[tuple[str, int, str], ...]:
    """Return the callers, innermost first, down to the watermark: file, line and function of each.

    It holds no frames, and costs a tenth of a microsecond per frame.

    Args:
        ignore_top: the number of innermost callers to leave out.
    """
    trace = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        trace.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(trace[ignore_top : len(trace) - _watermark.frames])


@contextlib.contextmanager
def watermark() -> Iterator[None]:
    """Leave out, inside the ``with`` block, the callers of its function."""
    with _below(sys._getframe(2), 1):
        yield


def set_watermark(func: Callable[P, R]) -> Callable[P, R]:
    """Leave out the function's callers in traces that are taken while it runs."""

    @functools.wraps(func)
    def watermark_wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with _below(sys._getframe(0), 0):
            return func(*args, **kwargs)

    return watermark_wrapper


@contextlib.contextmanager
def _below(frame: FrameType | None, kept: int) -> Iterator[None]:
    """Leave out a frame and the frames below it, except the ``kept`` uppermost."""
    frames = -kept
    while frame is not None:
        frames += 1
        frame = frame.f_back
    before, _watermark.frames = _watermark.frames, frames
    try:
        yield
    finally:
        _watermark.frames = before


class Batchsize(Search):
    """One call's size, which halves from step to step of toma's sequence.

    Args:
        value: the first size.
        limits: the sizes that earlier calls found to fit.
        key: the situation of this call.
        name: the function's name, for messages.
    """

    def __init__(
        self, value: int, limits: SharedLimits | None = None, key: Hashable = None, name: str = "the function"
    ) -> None:
        super().__init__(name, value, limits, key)

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
        self._limits = SharedLimits()

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
        self._limits = SharedLimits(self.LRU_CACHE_SIZE if lru_cache_size is None else lru_cache_size)

    def get_batchsize(self, initial_batchsize: int) -> Batchsize:
        """Return the size that fitted last in this situation, if it is below the requested one."""
        ram = get_available_cpu_memory() // self.MEMORY_GRANULARITY if self.TRACK_RAM else -1
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpu = (free_bytes("cuda") or 0) // self.MEMORY_GRANULARITY if uses_gpu else 0
        return Batchsize(initial_batchsize, self._limits, (get_simple_traceback(1), ram, gpu))
