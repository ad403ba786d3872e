"""toma's names, over :mod:`speedswap.batching.retry`: ``from speedswap.compat.toma import toma``.

Calls, arguments and the halving of sizes are toma's. In addition, ranges and chunks return the list of their pieces'
results; a remembered size is never above the one that a call requests, and grows again after 32 pieces without a
failure; functions are not kept alive; all calls are thread-safe; success costs microseconds.

The side effects of a piece that ran out of memory stay, and are repeated: assign to slices rather than add to them.

``batch``, ``range``, ``chunked`` and ``execute`` are decorators whose functions remember sizes. Their ``cache_type``
and ``context``, and ``toma_cache_type`` and ``toma_context`` of :class:`explicit` calls, choose where: in a cache of
that type (:data:`DEFAULT_CACHE_TYPE`) for each context (the function itself).
"""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedswap._machine import physical_bytes
from speedswap._words import require_kind
from speedswap.batching.attempts import Limits
from speedswap.batching.memory import free_bytes, is_out_of_memory, release_cached_memory
from speedswap.batching.nested import check_function, key_of, name_of, require_integer
from speedswap.batching.retry import Search
from speedswap.errors import MemoryBudgetError

__all__ = [
    "CONTEXT_CACHE_SIZE",
    "DEFAULT_CACHE_TYPE",
    "Batchsize",
    "BatchsizeCache",
    "GlobalBatchsizeCache",
    "NoBatchsizeCache",
    "StacktraceMemoryBatchsizeCache",
    "batchsize_cache",
    "cpu_memory",
    "explicit",
    "get_cache_for_context",
    "should_reduce_batch_size",
    "simple",
    "stacktrace",
    "toma",
    "torch_cuda_memory",
]

# toma's class of this name, whose DEFAULT_CACHE_TYPE can be assigned too, and its modules, importable by these names.
toma = batchsize_cache = cpu_memory = torch_cuda_memory = stacktrace = sys.modules[__name__]
_MODULES = ("batchsize_cache", "cpu_memory", "torch_cuda_memory", "stacktrace")
sys.modules.update({f"{__name__}.{name}": toma for name in _MODULES})

Function = Callable[..., Any]
AnyFunction = TypeVar("AnyFunction", bound=Function)

# ---------------------------------------------------------------------- stack traces


_watermark = ContextVar("watermark", default=0)
"""The number of the outermost frames that traces leave out, in each thread and task."""


def get_simple_traceback(ignore_top: int = 0) -> tuple[tuple[str, int, str], ...]:
    """Return the callers, innermost first, down to the watermark: file, line and function of each.

    It holds no frames, and costs a tenth of a microsecond per frame.

    Args:
        ignore_top: the number of innermost callers to leave out.
    """
    callers = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_stack(sys._getframe())
    ]
    return tuple(callers[1 + ignore_top : len(callers) - _watermark.get()])


@contextlib.contextmanager
def watermark(*, above: int = 3) -> Iterator[None]:
    """Leave out, inside the ``with`` block, the callers of its function.

    Args:
        above: the number of frames from this one to that function, which is kept.
    """
    before = _watermark.set(sum(1 for _ in traceback.walk_stack(sys._getframe())) - above)
    try:
        yield
    finally:
        _watermark.reset(before)


def set_watermark(func: AnyFunction) -> AnyFunction:
    """Leave out the function's callers in traces that are taken while it runs."""
    return watermark(above=2)(func)


# ---------------------------------------------------------------------- memory

gc_cuda = release_cached_memory


def get_available_cpu_memory() -> int:
    """Return the bytes that this process can still take: the system's free memory, or less under its own limit."""
    free = free_bytes("cpu")
    return physical_bytes() if free is None else free


def set_cpu_memory_limit(num_gigabytes: float) -> None:
    """Make allocations fail beyond that many GiB of address space.

    All mappings count: libraries, files and the reservations of CUDA too. The limit can be raised again, up to the
    system's limit for this process.

    Raises:
        MemoryBudgetError: the limit is not positive.
    """
    require_kind("num_gigabytes", num_gigabytes, Real, "a number of GiB")  # a text would be repeated 2³⁰ times
    limit = int(num_gigabytes * 2**30)
    if limit <= 0:
        raise MemoryBudgetError(f"num_gigabytes is {num_gigabytes!r}; it must be above 0")
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
        # On a device whose memory is unknown: if memory matters, it is a part of the key.
        super().__init__("the function", value, limits, key, torch.device("meta"))

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


# ---------------------------------------------------------------------- calls

CacheType = Callable[[], BatchsizeCache]

DEFAULT_CACHE_TYPE: CacheType = StacktraceMemoryBatchsizeCache
"""The ``cache_type`` of calls that name none; assign a new one here, which is ``toma.DEFAULT_CACHE_TYPE`` too."""

CONTEXT_CACHE_SIZE = 2**14
"""The number of functions and contexts with a cache; the least recently used is forgotten first."""

should_reduce_batch_size = is_out_of_memory


@functools.lru_cache(CONTEXT_CACHE_SIZE)
def _cache_of(batchsize_cache_type: CacheType, key: Any) -> BatchsizeCache:
    return batchsize_cache_type()


def get_cache_for_context(batchsize_cache_type: CacheType, context: Any) -> BatchsizeCache:
    """Return the cache of a function, which is not kept alive, or of any other hashable context."""
    return _cache_of(batchsize_cache_type, key_of(context) if callable(context) else context)


def _search(func: Function, name: str, initial: Any, cache_type: CacheType | None, context: Any) -> Batchsize:
    """Return a call's search for a size that fits, with the sizes that its cache knows."""
    cache = get_cache_for_context(cache_type or DEFAULT_CACHE_TYPE, func if context is None else context)
    search = cache.get_batchsize(require_integer(name, initial))
    search.name = name_of(func)
    return search


def _begin(
    func: Function, name: str, initial: Any, /, toma_cache_type: Any = None, toma_context: Any = None, **kwargs: Any
) -> tuple[Batchsize, dict[str, Any]]:
    """Return the search of a call whose named arguments are toma's and the function's, and the latter."""
    return _search(func, name, initial, toma_cache_type, toma_context), kwargs


class explicit:
    """Calls that remember sizes; ``toma_cache_type`` and ``toma_context`` choose where."""

    @staticmethod
    def batch(func: Function, initial_batchsize: int | None, *args: Any, **kwargs: Any) -> Any:
        """Call ``func(batchsize, *args, **kwargs)``, with half the batch size after each out-of-memory.

        >>> explicit.batch(lambda batchsize: batchsize, 64)
        64
        """
        search, kwargs = _begin(func, "initial_batchsize", initial_batchsize, **kwargs)
        return search.run_batch(func, *args, **kwargs)

    @staticmethod
    def range(func: Function, start: int, end: int, initial_step: int | None, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``func(start, end, *args, **kwargs)`` for piece after piece, and continue where one failed.

        >>> explicit.range(lambda start, end: (start, end), 0, 5, 2)
        [(0, 2), (2, 4), (4, 5)]
        """
        search, kwargs = _begin(func, "initial_step", initial_step, **kwargs)
        return search.run_range(func, start, end, *args, **kwargs)

    @staticmethod
    def chunked(
        func: Function, tensor: Tensor, initial_step: int | None, *args: Any, toma_dimension: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``func(chunk, start, end, *args, **kwargs)`` for chunk after chunk of a tensor."""
        search, kwargs = _begin(func, "initial_step", initial_step, **kwargs)
        return search.run_chunks(func, tensor, toma_dimension or 0, *args, **kwargs)


class simple:
    """The calls of :class:`explicit` without a memory of sizes."""

    @staticmethod
    def batch(func: Function, initial_batchsize: int, *args: Any, **kwargs: Any) -> Any:
        """Call as :meth:`explicit.batch` does."""
        return explicit.batch(func, initial_batchsize, *args, toma_cache_type=NoBatchsizeCache, **kwargs)

    @staticmethod
    def range(func: Function, start: int, end: int, initial_step: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Call as :meth:`explicit.range` does."""
        return explicit.range(func, start, end, initial_step, *args, toma_cache_type=NoBatchsizeCache, **kwargs)

    @staticmethod
    def chunked(func: Function, tensor: Tensor, initial_step: int, dimension: int = 0) -> list[Any]:
        """Call as :meth:`explicit.chunked` does."""
        return explicit.chunked(func, tensor, initial_step, toma_dimension=dimension, toma_cache_type=NoBatchsizeCache)


def batch(func: Function | None = None, *, initial_batchsize: int | None = None, **where: Any) -> Any:
    """Turn ``func(batchsize, …)`` into ``func(…, toma_initial_batchsize=, toma_context=)``.

    Args:
        func: the function; left out where this is a decorator with options.
        initial_batchsize: for calls that give none.
        where: ``cache_type`` and ``context``, which choose where sizes are remembered.

    >>> @batch(initial_batchsize=512)
    ... def run_inference(batchsize, dataset):
    ...     return batchsize
    >>> run_inference([1, 2, 3]), run_inference([1, 2, 3], toma_initial_batchsize=64)
    (512, 64)
    """

    return _decorated(func, Batchsize.run_batch, "initial_batchsize", initial_batchsize, **where)


def range(func: Function | None = None, *, initial_step: int | None = None, **where: Any) -> Any:
    """Turn ``func(start, end, …)`` into a function that calls it for each piece of a range.

    Call-time: ``toma_initial_step=``, ``toma_context=``. The arguments are those of :func:`batch`.
    """

    def run(search: Batchsize, func: Function, /, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
        return search.run_range(func, start, end, *args, **kwargs)

    return _decorated(func, run, "initial_step", initial_step, **where)


def chunked(
    func: Function | None = None, *, initial_step: int | None = None, dimension: int | None = None, **where: Any
) -> Any:
    """Turn ``func(chunk, start, end, …)`` into ``func(tensor, …)``, which calls it for each chunk.

    Call-time: ``toma_initial_step=``, ``toma_dimension=``, ``toma_context=``. The arguments are those of :func:`batch`,
    and the ``dimension`` that is cut, 0 by default.
    """

    def run(search: Batchsize, func: Function, /, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("toma_dimension", None)
        return search.run_chunks(func, tensor, (dimension if given is None else given) or 0, *args, **kwargs)

    return _decorated(func, run, "initial_step", initial_step, **where, more=", toma_dimension")


class execute:
    """Decorators that call the function at once and replace it by its result."""

    @staticmethod
    def batch(initial_batchsize: int, cache_type: CacheType | None = None, context: Any = None) -> Any:
        """Call ``func(batchsize)`` at once."""
        return lambda func: batch(func, initial_batchsize=initial_batchsize, cache_type=cache_type, context=context)()

    @staticmethod
    def range(start: int, end: int, initial_step: int, cache_type: CacheType | None = None, context: Any = None) -> Any:
        """Call ``func(start, end)`` for each piece at once."""
        where = {"cache_type": cache_type, "context": context}
        return lambda func: range(func, initial_step=initial_step, **where)(start, end)

    @staticmethod
    def chunked(
        tensor: Tensor, initial_step: Any = None, dimension: Any = None, cache_type: Any = None, context: Any = None
    ) -> Any:
        """Call ``func(chunk, start, end)`` for each chunk at once."""
        where = {"cache_type": cache_type, "context": context}
        return lambda func: chunked(func, initial_step=initial_step, dimension=dimension, **where)(tensor)


def _decorated(
    func: Function | None,
    run: Function,
    name: str,
    initial: Any,
    cache_type: Any = None,
    context: Any = None,
    more: str = "",
) -> Any:
    """Return the function with retries, or a decorator if no function is given.

    Args:
        func: the user's function.
        run: called with a search, the function, and the arguments of each call.
        name: the name of the initial size.
        initial, cache_type, context: as of the decorators.
        more: names of further arguments, for the docstring.
    """
    if func is None:
        return lambda func: _decorated(func, run, name, initial, cache_type, context, more)
    check_function(func)

    @functools.wraps(func)
    def wrapped(*args: Any, toma_context: Any = None, **kwargs: Any) -> Any:
        given = kwargs.pop(f"toma_{name}", None)
        chosen = context if toma_context is None else toma_context
        return run(_search(func, name, initial if given is None else given, cache_type, chosen), func, *args, **kwargs)

    wrapped.__doc__ = f"{func.__doc__ or ''}\n\nEach call may give toma_{name}, toma_context{more} too.\n"
    return wrapped
