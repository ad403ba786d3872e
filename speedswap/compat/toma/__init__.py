"""toma's names, over :mod:`speedswap.batching.retry`: ``from speedswap.compat.toma import toma``.

Calls, arguments and the halving of sizes are toma's. In addition, ranges and chunks return the list of their pieces'
results; a remembered size is never above the one that a call requests, and grows again after 32 pieces without a
failure; functions are not kept alive; all calls are thread-safe; success costs microseconds.

The side effects of a piece that ran out of memory stay, and are repeated: assign to slices rather than add to them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from speedswap.batching.functions import check_function, key_of, name_of, require_integer
from speedswap.batching.memory import is_out_of_memory
from speedswap.batching.retry import run_batch, run_chunks, run_range
from speedswap.compat.toma import caches
from speedswap.compat.toma.caches import (
    Batchsize,
    BatchsizeCache,
    GlobalBatchsizeCache,
    NoBatchsizeCache,
    StacktraceMemoryBatchsizeCache,
)

__all__ = [
    "CONTEXT_CACHE_SIZE",
    "DEFAULT_CACHE_TYPE",
    "Batchsize",
    "BatchsizeCache",
    "GlobalBatchsizeCache",
    "NoBatchsizeCache",
    "StacktraceMemoryBatchsizeCache",
    "cpu_memory",
    "explicit",
    "get_cache_for_context",
    "should_reduce_batch_size",
    "simple",
    "stacktrace",
    "toma",
    "torch_cuda_memory",
]

# toma's own modules, importable by these names too.
cpu_memory = torch_cuda_memory = stacktrace = caches
sys.modules.update({f"{__name__}.{name}": caches for name in ("cpu_memory", "torch_cuda_memory", "stacktrace")})

CacheType = Callable[[], BatchsizeCache]

DEFAULT_CACHE_TYPE: CacheType = StacktraceMemoryBatchsizeCache
"""The ``cache_type`` of calls that name none; assign a new one here, or as ``toma.DEFAULT_CACHE_TYPE``."""

CONTEXT_CACHE_SIZE = 2**14
"""The number of functions and contexts with a cache; the least recently used is forgotten first."""

should_reduce_batch_size = is_out_of_memory


@functools.lru_cache(CONTEXT_CACHE_SIZE)
def _cache_of(batchsize_cache_type: CacheType, key: Any) -> BatchsizeCache:
    return batchsize_cache_type()


def get_cache_for_context(batchsize_cache_type: CacheType, context: Any) -> BatchsizeCache:
    """Return the cache of a function, which is not kept alive, or of any other hashable context."""
    return _cache_of(batchsize_cache_type, key_of(context) if callable(context) else context)


def _search(func: Callable[..., Any], name: str, initial: Any, cache_type: CacheType | None, context: Any) -> Batchsize:
    """Return a call's search for a size that fits, with the sizes that its cache knows."""
    cache = get_cache_for_context(cache_type or DEFAULT_CACHE_TYPE, func if context is None else context)
    search = cache.get_batchsize(require_integer(name, initial))
    search.name = name_of(func)
    return search


class explicit:
    """Calls that remember sizes, in a cache for each function or ``toma_context``."""

    @staticmethod
    def batch(
        func: Callable[..., Any],
        initial_batchsize: int | None,
        *args: Any,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``func(batchsize, *args, **kwargs)``, with half the batch size after each out-of-memory.

        >>> explicit.batch(lambda batchsize: batchsize, 64)
        64
        """
        search = _search(func, "initial_batchsize", initial_batchsize, toma_cache_type, toma_context)
        return run_batch(func, search, args, kwargs)

    @staticmethod
    def range(
        func: Callable[..., Any],
        start: int,
        end: int,
        initial_step: int | None,
        *args: Any,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``func(start, end, *args, **kwargs)`` for piece after piece, and continue where one failed.

        >>> explicit.range(lambda start, end: (start, end), 0, 5, 2)
        [(0, 2), (2, 4), (4, 5)]
        """
        search = _search(func, "initial_step", initial_step, toma_cache_type, toma_context)
        return run_range(func, start, end, search, args, kwargs)

    @staticmethod
    def chunked(
        func: Callable[..., Any],
        tensor: Tensor,
        initial_step: int | None,
        *args: Any,
        toma_dimension: int | None = None,
        toma_context: Any = None,
        toma_cache_type: CacheType | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``func(chunk, start, end, *args, **kwargs)`` for chunk after chunk of a tensor."""
        search = _search(func, "initial_step", initial_step, toma_cache_type, toma_context)
        return run_chunks(func, tensor, toma_dimension or 0, search, args, kwargs)


class simple:
    """The calls of :class:`explicit` without a memory of sizes."""

    @staticmethod
    def batch(func: Callable[..., Any], initial_batchsize: int, *args: Any, **kwargs: Any) -> Any:
        """Call as :meth:`explicit.batch` does."""
        return explicit.batch(func, initial_batchsize, *args, toma_cache_type=NoBatchsizeCache, **kwargs)

    @staticmethod
    def range(
        func: Callable[..., Any], start: int, end: int, initial_step: int, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call as :meth:`explicit.range` does."""
        return explicit.range(func, start, end, initial_step, *args, toma_cache_type=NoBatchsizeCache, **kwargs)

    @staticmethod
    def chunked(func: Callable[..., Any], tensor: Tensor, initial_step: int, dimension: int = 0) -> list[Any]:
        """Call as :meth:`explicit.chunked` does."""
        return explicit.chunked(func, tensor, initial_step, toma_dimension=dimension, toma_cache_type=NoBatchsizeCache)


class _Names(type):
    """The metaclass that makes ``toma.NAME`` the module's NAME, for reading and for assigning a default."""

    def __getattr__(cls, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"toma has no attribute {name!r}")
        return globals()[name]

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in __all__:
            globals()[name] = value
        else:
            super().__setattr__(name, value)


class toma(metaclass=_Names):
    """Decorators whose functions remember sizes."""

    @staticmethod
    def batch(
        func: Callable[..., Any] | None = None,
        *,
        initial_batchsize: int | None = None,
        cache_type: CacheType | None = None,
        context: Any = None,
    ) -> Any:
        """Turn ``func(batchsize, …)`` into ``func(…, toma_initial_batchsize=, toma_context=)``.

        >>> @toma.batch(initial_batchsize=512)
        ... def run_inference(batchsize, dataset):
        ...     return batchsize
        >>> run_inference([1, 2, 3]), run_inference([1, 2, 3], toma_initial_batchsize=64)
        (512, 64)
        """

        def run(func: Callable[..., Any], search: Batchsize, /, *args: Any, **kwargs: Any) -> Any:
            return run_batch(func, search, args, kwargs)

        return _decorated(func, run, "initial_batchsize", initial_batchsize, cache_type, context)

    @staticmethod
    def range(
        func: Callable[..., Any] | None = None,
        *,
        initial_step: int | None = None,
        cache_type: CacheType | None = None,
        context: Any = None,
    ) -> Any:
        """Turn ``func(start, end, …)`` into a function that calls it for each piece of a range.

        Call-time: ``toma_initial_step=``, ``toma_context=``.
        """

        def run(func: Callable[..., Any], search: Batchsize, /, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
            return run_range(func, start, end, search, args, kwargs)

        return _decorated(func, run, "initial_step", initial_step, cache_type, context)

    @staticmethod
    def chunked(
        func: Callable[..., Any] | None = None,
        *,
        initial_step: int | None = None,
        dimension: int | None = None,
        cache_type: CacheType | None = None,
        context: Any = None,
    ) -> Any:
        """Turn ``func(chunk, start, end, …)`` into ``func(tensor, …)``, which calls it for each chunk.

        Call-time: ``toma_initial_step=``, ``toma_dimension=``, ``toma_context=``.
        """

        def run(func: Callable[..., Any], search: Batchsize, /, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("toma_dimension", None)
            return run_chunks(func, tensor, (dimension if given is None else given) or 0, search, args, kwargs)

        return _decorated(func, run, "initial_step", initial_step, cache_type, context, ", toma_dimension")

    class execute:
        """Decorators that call the function at once and replace it by its result."""

        @staticmethod
        def batch(initial_batchsize: int, cache_type: CacheType | None = None, context: Any = None) -> Any:
            """Call ``func(batchsize)`` at once."""
            how = {"toma_cache_type": cache_type, "toma_context": context}
            return lambda func: explicit.batch(func, initial_batchsize, **how)

        @staticmethod
        def range(
            start: int, end: int, initial_step: int, cache_type: CacheType | None = None, context: Any = None
        ) -> Any:
            """Call ``func(start, end)`` for each piece at once."""
            how = {"toma_cache_type": cache_type, "toma_context": context}
            return lambda func: explicit.range(func, start, end, initial_step, **how)

        @staticmethod
        def chunked(
            tensor: Tensor,
            initial_step: int | None = None,
            dimension: int | None = None,
            cache_type: CacheType | None = None,
            context: Any = None,
        ) -> Any:
            """Call ``func(chunk, start, end)`` for each chunk at once."""
            how = {"toma_cache_type": cache_type, "toma_context": context, "toma_dimension": dimension}
            return lambda func: explicit.chunked(func, tensor, initial_step, **how)


def _decorated(
    func: Callable[..., Any] | None,
    run: Callable[..., Any],
    name: str,
    initial: int | None,
    cache_type: CacheType | None,
    context: Any,
    more: str = "",
) -> Any:
    """Return the function with retries, or a decorator if no function is given.

    Args:
        func: the user's function.
        run: called with the function, a search, and the arguments of each call.
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
        return run(func, _search(func, name, initial if given is None else given, cache_type, chosen), *args, **kwargs)

    wrapped.__doc__ = f"{func.__doc__ or ''}\n\nEach call may give toma_{name}, toma_context{more} too.\n"
    return wrapped


def __getattr__(name: str) -> Any:
    """Make ``import speedswap.compat.toma as toma`` equivalent to ``from … import toma``."""
    if name in ("batch", "chunked", "execute", "range"):
        return getattr(toma, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
