"""One call's attempts at smaller and smaller sizes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedswap.batching.oom import chain, forget, free_bytes, is_out_of_memory, release_cached_memory
from speedswap.batching.retry.limits import GROW_AFTER, Limit, Limits
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError

__all__ = ["Search", "check_function", "check_size", "name_of", "run_batch", "run_chunks", "run_range"]

R = TypeVar("R")

_NOTHING: dict[str, Any] = {}


class Search:
    """One call's search for a size that fits.

    Args:
        name: the function's, for messages.
        wanted: the size to begin with where nothing is known: at least 1.
        limits: what earlier calls have learned; None forgets everything.
        key: the situation that this call is in.
        device: whose free memory counts; by default that of the current GPU where one is in use, else the host's.
        grow_after: attempts without a failure before a larger size is tried; None: never.

    Attributes:
        size: for the next attempt.
        name: the function's.
    """

    def __init__(
        self,
        name: str,
        wanted: int,
        limits: Limits | None = None,
        key: Hashable = None,
        device: torch.device | None = None,
        grow_after: int | None = GROW_AFTER,
    ) -> None:
        self.size = wanted
        self.name = name
        self._wanted = wanted
        self._limits = limits
        self._key = key
        self._device = device
        self._grow_after = grow_after
        self._limit: Limit | None = None
        self._memory: int | None = None
        self._has_shrunk = False
        self._failures: list[tuple[int, BaseException]] = []
        if limits:
            self._memory = self._memory_class()
            with limits.lock:
                self._limit = limits.find(key, self._memory, grow_after)
            self.choose()

    def _memory_class(self) -> int:
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return (free_bytes(self._device or ("cuda" if uses_gpu else "cpu")) or 0).bit_length()

    def fitted(self, length: int) -> None:
        """Note a success with ``length`` samples."""
        if self._has_shrunk:
            self._has_shrunk = False
            self._failures.clear()
            if self._limits is not None:
                with self._limits.lock:
                    self._limit = self._limits.note(self._key, self._memory or 0, self.size, self._grow_after)
        elif self._limits is not None and self._limit is not None and length == self.size:
            with self._limits.lock:
                self._limit.fitted(length)

    def choose(self) -> None:
        """Choose the size after a success: a larger one where it is time to try that."""
        if self._limits is not None and self._limit is not None:
            with self._limits.lock:
                self.size = self._limit.choose(self._wanted)

    def failed(self, error: BaseException, length: int) -> None:
        """Let go of an attempt that ran out of memory, and choose a smaller size.

        Call it outside the ``except`` block: inside, the interpreter still holds all that the attempt had.

        Args:
            error: that says so.
            length: how many samples the attempt had.

        Raises:
            BaseException: the error itself, if that was one sample, with the earlier ones as its causes.
        """
        if length <= 1:
            _link([*self._failures, (length, error)], self.name)
            self._failures.clear()
            try:
                raise error
            finally:
                del error  # or its traceback would lead to itself
        forget(error)
        self._failures.append((length, error))
        release_cached_memory()
        self.size = self._smaller(length)
        self._has_shrunk = True

    def _smaller(self, length: int) -> int:
        if self._limits is not None and self._memory is None:
            self._memory = self._memory_class()  # nothing of the attempt is left: as free as when it began
        if self._limits is None or self._limit is None or self._has_shrunk:
            return length // 2
        with self._limits.lock:
            self._limit.failed()
            return self._limit.size if self._limit.size < length else length // 2


def _link(failures: list[tuple[int, BaseException]], name: str) -> None:
    """Give the last error a history: those before it, and at its end the sizes that were tried."""
    sizes = ", ".join(str(size) for size, _ in failures)
    tried = BatchError(
        f"{name} ran out of memory with every size tried: {sizes}; one sample must fit: free memory first, or make the "
        "model or the sample smaller"
    )
    chain([error for _, error in failures], tried)


def run_batch(
    function: Callable[..., R], search: Search, args: Any = (), kwargs: Any = _NOTHING, *, rng: bool = False
) -> R:
    """Call ``function(size, *args, **kwargs)`` with smaller and smaller sizes until one fits."""
    state = RandomState() if rng else None
    while True:
        size = search.size
        try:
            result = function(size, *args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        else:
            search.fitted(size)
            return result
        try:
            search.failed(failure, size)
        finally:
            del failure  # where it is raised again, its traceback leads here
        if state is not None:
            state.restore()


def run_range(
    function: Callable[..., R],
    start: int,
    stop: int,
    search: Search,
    args: Any = (),
    kwargs: Any = _NOTHING,
    *,
    rng: bool = False,
) -> list[R]:
    """Call ``function(start, stop, *args, **kwargs)`` for piece after piece of a range, each at most a size long."""
    results: list[R] = []
    while start < stop:
        state = RandomState() if rng else None
        while True:
            end = min(start + search.size, stop)
            try:
                result = function(start, end, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            else:
                search.fitted(end - start)
                break
            try:
                search.failed(failure, end - start)
            finally:
                del failure  # where it is raised again, its traceback leads here
            if state is not None:
                state.restore()
        results.append(result)
        start = end
        if start < stop:
            search.choose()
    return results


def run_chunks(
    function: Callable[..., R],
    tensor: Tensor,
    dimension: int,
    search: Search,
    args: Any = (),
    kwargs: Any = _NOTHING,
    *,
    rng: bool = False,
) -> list[R]:
    """Call ``function(chunk, start, stop, *args, **kwargs)`` for chunk after chunk of a tensor, which are views."""

    def piece(start: int, stop: int) -> R:
        return function(tensor.narrow(dimension, start, stop - start), start, stop, *args, **kwargs)

    return run_range(piece, 0, tensor.shape[dimension], search, rng=rng)


def check_size(name: str, value: Any) -> int:
    """A size as an integer.

    Raises:
        BatchError: it is none, or less than 1.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise BatchError(f"{name} is {value!r}; it must be an integer of at least 1")
    return operator.index(value)


def check_function(function: Any) -> None:
    """Refuse what cannot be tried again.

    Raises:
        BatchError: it cannot be called, or does its work after it has returned.
    """
    if not callable(function):
        raise BatchError(f"{function!r} is not a function; options are given by name, as in initial=512")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    for is_late, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_late(inner):
            raise BatchError(
                f"{name_of(function)} is {kind}, which does its work after it has returned, when nothing can retry it; "
                "let it call a plain function that is retried"
            )


def name_of(function: Any) -> str:
    """What to call a function in a message."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__
