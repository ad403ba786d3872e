"""Functions that retry with a smaller batch, range or chunk when memory runs out.

As decorators::

    @retry.batch(initial=512)
    def predict(batch_size, model, dataset): ...
    predict(model, dataset)

    @retry.range(initial=256)
    def reduce(start, stop, out, data): ...
    reduce(0, 1024, out, data)

    @retry.chunked(initial=256, join=torch.cat)
    def encode(chunk, start, stop, model): ...
    encode(images, model)

And as calls: ``retry.batch(predict, initial=512)(model, dataset)``.

The size halves on each out-of-memory. A batch starts again; a range, and a tensor's chunks, resume where they failed.
When one sample does not fit, its error is raised, with those of the larger sizes as its causes.

**Sizes are remembered** for each function, calling line (or ``key``), and class of free memory. The next call begins
with what fitted, but never with more than its ``initial``, and tries twice as much after ``grow_after`` pieces without
a failure. All closures of one definition, and a method of all objects, share what they learn; give models of different
sizes different keys. A function's code is remembered, and nothing that it refers to.

**Side effects stay.** What a piece did before it ran out of memory is not undone, and is done again. So assign rather
than add, ``out[start:stop] = f(chunk)`` rather than ``out += f(chunk)``, or return the piece's result and add up
afterwards (``join=sum``). With ``rng=True`` at least a piece's random numbers are the same in each attempt.

These functions are thread-safe. A successful call collects no garbage and takes microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from speedswap.batching.attempts import GROW_AFTER, Attempts, Limit, Limits
from speedswap.batching.functions import check_function, key_of, name_of, require_integer
from speedswap.batching.memory import is_out_of_memory, memory_class
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError

__all__ = ["Retried", "RetriedBatch", "RetriedChunks", "RetriedRange", "batch", "chunked", "range"]

R = TypeVar("R")
Self = TypeVar("Self", bound="Retried")

_lock = threading.Lock()  # guards all limits; held for less than a microsecond

_NOTHING: dict[str, Any] = {}


class Search(Attempts):
    """One call's search for a size that fits.

    Args:
        name: the function's, for messages.
        wanted: the size to begin with where nothing is known: at least 1.
        limits: what earlier calls have learned; None forgets everything.
        key: the situation that this call is in.
        device: its free memory counts; by default that of the current GPU where one is in use, else the host's.
        grow_after: attempts without a failure before a larger size is tried; None: never.

    Attributes:
        size: for the next attempt.
        name: the function's.
        length: samples of the present attempt: fewer than ``size`` in a last piece.
        random: random numbers to restore before the next attempt.
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
        super().__init__(wanted)
        self.name = name
        self.length = wanted
        self.random: RandomState | None = None
        self._wanted = wanted
        self._limits = limits
        self._key = key
        self._device = device
        self._grow_after = grow_after
        self._limit: Limit | None = None
        self._memory: int | None = None
        if limits is not None and key in limits:
            self._memory = self.memory_class()
            with _lock:
                self._limit = limits.find(key, self._memory, grow_after)
            self.choose()

    def memory_class(self) -> int:
        """Return the class of free memory that this call is in."""
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return memory_class(self._device or ("cuda" if uses_gpu else "cpu"))

    def choose(self) -> None:
        """Choose the size after a success: a larger one where it is due."""
        if self._limit is not None:
            with _lock:
                self.size = self._limit.choose(self._wanted)

    def fitted(self, length: int) -> None:
        """Record a success with ``length`` samples."""
        has_shrunk = bool(self._failures)
        self._failures.clear()
        if self._limits is None or (self._limit is None and not has_shrunk):
            return
        with _lock:
            if has_shrunk:
                self._limit = self._limits.note(self._key, self._memory or 0, self.size, self._grow_after)
            elif self._limit is not None and length == self.size:
                self._limit.fitted(length)

    def recover(self, failure: BaseException) -> None:
        """Choose a smaller size.

        Raises:
            BaseException: the failure itself, if it is no out-of-memory, or if a single sample ran out of memory; the
                latter with the earlier failures as its causes.
        """
        length = self.failed_length
        try:
            if not isinstance(failure, Exception) or not is_out_of_memory(failure):
                raise failure
            if length <= 1:
                sizes = ", ".join(str(size) for size in [*(size for size, _ in self._failures), length])
                reason = BatchError(
                    f"{self.name} ran out of memory with every size tried: {sizes}; one sample must fit: free memory "
                    "first, or make the model or the sample smaller"
                )
                raise self.with_history(failure, reason)
            smaller = length // 2
            if self._limit is not None and not self._failures:
                with _lock:
                    smaller = self._limit.failed(length)
            self.release(failure, length)
            self.size = smaller
            if self.random is not None:
                self.random.restore()
        finally:
            del failure  # or its traceback would lead to itself

    @property
    def failed_length(self) -> int:
        """The number of samples that is halved after a failure: those of the attempt itself."""
        return self.length

    def release(self, failure: BaseException, size: int) -> None:
        super().release(failure, size)
        if self._limits is not None and self._memory is None:
            self._memory = self.memory_class()  # nothing of the attempt is left: as free as when it began


def run_batch(
    function: Callable[..., R], search: Search, args: Any = (), kwargs: Any = _NOTHING, *, rng: bool = False
) -> R:
    """Call ``function(size, *args, **kwargs)`` with smaller and smaller sizes until one fits."""
    search.random = RandomState() if rng else None
    while search.again():
        with search:
            search.length = search.size
            result = function(search.size, *args, **kwargs)
    search.fitted(search.size)
    return result


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
        search.random = RandomState() if rng else None
        while search.again():
            with search:
                search.length = min(search.size, stop - start)
                result = function(start, start + search.length, *args, **kwargs)
        search.fitted(search.length)
        results.append(result)
        start += search.length
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


Join = Callable[[list[Any]], Any]

_limits = Limits()


@dataclasses.dataclass(frozen=True)
class RetryOptions:
    """The options of :func:`batch`, :func:`range` and :func:`chunked`."""

    initial: int | None = None
    key: Hashable = None
    rng: bool = False
    grow_after: int | None = GROW_AFTER
    dimension: int = 0
    join: Join | None = None

    def __post_init__(self) -> None:
        for name in ("initial", "grow_after"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name))
        try:
            hash(self.key)
        except TypeError as error:
            raise BatchError(f"key is {self.key!r}; it must be hashable") from error


class Retried:
    """A function that is tried again with less at a time, as :func:`batch`, :func:`range` and :func:`chunked` make it.

    It can be called, and used as a method where the function is one.

    Args:
        function: called for each piece.
        options: of the retries.
    """

    def __init__(self, function: Callable[..., Any], options: RetryOptions) -> None:
        check_function(function)
        functools.update_wrapper(cast(Any, self), function, updated=())
        self._function = function
        self._options = options
        self._name: str = name_of(function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of one object."""
        if instance is None:
            return self
        bind = getattr(self._function, "__get__", None)
        return self if bind is None else type(self)(bind(instance, owner), self._options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Copy and pickle without remembered sizes; a decorated function by its name, as functions are."""
        name: str = getattr(self, "__name__", "")
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return name
        return type(self), (self._function, self._options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._function!r}>"

    def using(self: Self, **options: Any) -> Self:
        """Return the same function with other options, such as another ``initial`` for one call.

        >>> @batch(initial=512)
        ... def sizes(batch_size):
        ...     return batch_size
        >>> sizes(), sizes.using(initial=64)()
        (512, 64)
        """
        return type(self)(self._function, dataclasses.replace(self._options, **options))

    def _search(self, wanted: int, device: torch.device | None = None) -> Search:
        options = self._options
        key = options.key
        if key is None:
            caller = sys._getframe(1).f_back
            key = (caller.f_code.co_filename, caller.f_lineno) if caller is not None else None
        return Search(
            self._name, wanted, _limits, (key_of(self._function), type(self), key), device, options.grow_after
        )


class RetriedBatch(Retried):
    """A function of a batch size and more; called without the batch size."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        initial = self._options.initial
        if initial is None:
            raise BatchError(f"{self._name} has no initial batch size; give one: retry.batch(initial=512)")
        return run_batch(self._function, self._search(initial), args, kwargs, rng=self._options.rng)


class RetriedRange(Retried):
    """A function of a range and more, called for its pieces."""

    def __call__(self, start: int, stop: int, *args: Any, **kwargs: Any) -> Any:
        wanted = self._options.initial or max(1, stop - start)
        search = self._search(wanted)
        return self._joined(run_range(self._function, start, stop, search, args, kwargs, rng=self._options.rng))

    def _joined(self, results: list[Any]) -> Any:
        join = self._options.join
        return results if join is None else join(results)


class RetriedChunks(RetriedRange):
    """A function of a tensor, its place and more, called for the tensor's chunks."""

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        options = self._options
        if not isinstance(tensor, Tensor) or not -tensor.dim() <= options.dimension < tensor.dim():
            what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(type(tensor))
            raise BatchError(f"dimension is {options.dimension}, but the first argument of {self._name} is {what}")
        search = self._search(options.initial or max(1, tensor.shape[options.dimension]), tensor.device)
        return self._joined(
            run_chunks(self._function, tensor, options.dimension, search, args, kwargs, rng=options.rng)
        )


def batch(
    function: Callable[..., Any] | None = None,
    *,
    initial: int | None = None,
    key: Hashable = None,
    rng: bool = False,
    grow_after: int | None = GROW_AFTER,
) -> Any:
    """Call a function with a batch size, and again with half of it for as long as memory runs out.

    Args:
        function: takes a batch size and more; left out where this is a decorator with options.
        initial: the batch size to begin with, in samples; required before the function is called.
        key: remembered sizes belong to it, hashable; the calling line by default.
        rng: restore torch's, Python's and NumPy's random numbers before a piece is tried again.
        grow_after: attempts without a failure until twice the size is tried; None: never.

    Returns:
        The function without its batch size, with the same result.

    Raises:
        BatchError: a size is less than 1, or the function is a coroutine or generator.

    >>> @batch(initial=8)
    ... def fitting(batch_size, most):
    ...     if batch_size > most:
    ...         raise MemoryError(f"{batch_size} are too many")
    ...     return batch_size
    >>> fitting(3)
    2
    """
    return _made(RetriedBatch, function, RetryOptions(initial, key, rng, grow_after))


def range(
    function: Callable[..., Any] | None = None,
    *,
    initial: int | None = None,
    join: Join | None = None,
    key: Hashable = None,
    rng: bool = False,
    grow_after: int | None = GROW_AFTER,
) -> Any:
    """Call a function for each successive piece of a range, with smaller pieces from where memory runs out.

    Args:
        function: takes the first index of a piece, the index after its last, and more.
        initial: the length of the pieces to begin with; the whole range by default.
        join: makes one result of the list of the pieces' results, such as ``torch.cat`` or ``sum``; an empty range
            gives it an empty list.
        key, rng, grow_after: as for :func:`batch`.

    Returns:
        The function, to be called with the range's start and stop, which returns the pieces' results as a list, in
        order, or joined.

    Raises:
        BatchError: a size is less than 1, or the function is a coroutine or generator.

    >>> @range(initial=4)
    ... def pieces(start, stop):
    ...     if stop - start > 3:
    ...         raise MemoryError
    ...     return start, stop
    >>> pieces(0, 5)
    [(0, 2), (2, 4), (4, 5)]
    """
    return _made(RetriedRange, function, RetryOptions(initial, key, rng, grow_after, join=join))


def chunked(
    function: Callable[..., Any] | None = None,
    *,
    initial: int | None = None,
    dimension: int = 0,
    join: Join | None = None,
    key: Hashable = None,
    rng: bool = False,
    grow_after: int | None = GROW_AFTER,
) -> Any:
    """Call a function for each successive chunk of a tensor, with smaller chunks from where memory runs out.

    Args:
        function: takes a chunk (a view), its first index in the tensor, the index after its last, and more.
        initial: the length of the chunks to begin with; the whole tensor by default.
        dimension: the dimension of the tensor that is cut.
        join, key, rng, grow_after: as for :func:`range`.

    Returns:
        The function, to be called with the whole tensor, which returns the chunks' results as a list, in order, or
        joined.

    Raises:
        BatchError: a size is less than 1, the function is a coroutine or generator, or the dimension does not exist.

    >>> squares = chunked(lambda chunk, start, stop: chunk.square(), initial=2, join=torch.cat)
    >>> squares(torch.arange(5))
    tensor([ 0,  1,  4,  9, 16])
    """
    return _made(RetriedChunks, function, RetryOptions(initial, key, rng, grow_after, dimension, join))


def _made(kind: type[Retried], function: Callable[..., Any] | None, options: RetryOptions) -> Any:
    if function is None:
        return lambda function: kind(function, options)
    return kind(function, options)
