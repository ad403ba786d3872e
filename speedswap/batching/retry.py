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
from speedswap.batching.memory import is_out_of_memory, memory_class
from speedswap.batching.nested import check_function, key_of, name_of, require_integer, require_strided
from speedswap.batching.rollback import RandomState
from speedswap.errors import BatchError

__all__ = ["Retried", "RetriedBatch", "RetriedChunks", "RetriedRange", "batch", "chunked", "range"]

R = TypeVar("R")
Self = TypeVar("Self", bound="Retried")

_lock = threading.Lock()  # guards all limits; held for less than a microsecond


@dataclasses.dataclass(eq=False)
class Search(Attempts):
    """One call's search for a size that fits.

    Attributes:
        name: the function's, for messages.
        wanted: the size to begin with where nothing is known: at least 1.
        limits: what earlier calls have learned; None forgets everything.
        key: the situation that this call is in.
        device: its free memory counts; by default that of the current GPU where one is in use, else the host's.
        grow_after: attempts without a failure before a larger size is tried; None: never.
        rng: restore random numbers before a piece is tried again.
        size: for the next attempt.
        length: samples of the present attempt: fewer than ``size`` in a last piece.
    """

    name: str
    wanted: int
    limits: Limits | None = None
    key: Hashable = None
    device: torch.device | None = None
    grow_after: int | None = GROW_AFTER
    rng: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.wanted)
        self.length = self.wanted
        self._random: RandomState | None = None
        self._limit: Limit | None = None
        self._memory: int | None = None
        if self.limits is not None and self.key in self.limits:
            self._memory = self._memory_class()
            self._limit = self._find(self.limits)
            self.choose()

    def _memory_class(self) -> int:
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return memory_class(self.device or ("cuda" if uses_gpu else "cpu"))

    def _find(self, limits: Limits) -> Limit:
        with _lock:
            return limits.find(self.key, self._memory or 0, self.grow_after, from_less=False)

    def choose(self) -> None:
        """Choose the size after a success: a larger one where it is due."""
        if self._limit is not None:
            with _lock:
                self.size = self._limit.choose(self.wanted)

    def fitted(self) -> None:
        """Record a success."""
        has_shrunk = bool(self._failures)
        self._failures.clear()
        if self.limits is not None and has_shrunk:
            self._limit = self._find(self.limits)
        if self._limit is not None:
            with _lock:
                if has_shrunk:
                    self._limit.shrink(self.size)
                elif self.length == self.size:
                    self._limit.fitted(self.length)

    def recover(self, failure: BaseException) -> bool:
        if not is_out_of_memory(failure):
            return False
        length = self.failed_length
        if length <= 1:
            sizes = ", ".join(str(size) for size in [*(size for size, _ in self._failures), length])
            self.add_history(
                failure,
                f"{self.name} ran out of memory with every size tried: {sizes}; one sample must fit: free memory "
                "first, or make the model or the sample smaller",
            )
            return False
        smaller = length // 2
        if self._limit is not None and not self._failures:
            with _lock:
                smaller = self._limit.failed(length)
        self.release(failure, length)
        self.size = smaller
        if self._random is not None:
            self._random.restore()
        return True

    @property
    def failed_length(self) -> int:
        """The number of samples that is halved after a failure: those of the attempt itself."""
        return self.length

    def release(self, failure: BaseException, size: int) -> None:
        super().release(failure, size)
        if self.limits is not None and self._memory is None:
            self._memory = self._memory_class()  # nothing of the attempt is left: as free as when it began

    def _until_it_fits(self, call: Callable[[int], R], most: int | None = None) -> R:
        """Call with fewer and fewer samples, ``most`` at most, until they fit."""
        self._random = RandomState() if self.rng else None
        while self.again():
            with self:
                self.length = self.size if most is None else min(self.size, most)
                result = call(self.length)
        self.fitted()
        return result

    def run_batch(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Call ``function(size, *args, **kwargs)`` with smaller and smaller sizes until one fits."""
        return self._until_it_fits(lambda size: function(size, *args, **kwargs))

    def run_range(self, function: Callable[..., R], start: int, stop: int, /, *args: Any, **kwargs: Any) -> list[R]:
        """Call ``function(start, stop, *args, **kwargs)`` for one piece of a range after the other."""
        results: list[R] = []

        def piece(length: int) -> R:
            return function(start, start + length, *args, **kwargs)

        while start < stop:
            if results:
                self.choose()
            results.append(self._until_it_fits(piece, stop - start))
            start += self.length
        return results

    def run_chunks(
        self, function: Callable[..., R], tensor: Tensor, dimension: int, /, *args: Any, **kwargs: Any
    ) -> list[R]:
        """Call ``function(chunk, start, stop, *args, **kwargs)`` for chunk after chunk of a tensor, which are views."""
        require_strided(f"the first argument of {name_of(function)}", tensor, remedy=_CUT)

        def piece(start: int, stop: int) -> R:
            return function(tensor.narrow(dimension, start, stop - start), start, stop, *args, **kwargs)

        return self.run_range(piece, 0, tensor.shape[dimension])


_CUT = "or cut it in the function"
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
        situation = key_of(self._function), type(self), key
        return Search(self._name, wanted, _limits, situation, device, options.grow_after, options.rng)


class RetriedBatch(Retried):
    """A function of a batch size and more; called without the batch size."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        initial = self._options.initial
        if initial is None:
            raise BatchError(f"{self._name} has no initial batch size; give one: retry.batch(initial=512)")
        return self._search(initial).run_batch(self._function, *args, **kwargs)


class RetriedRange(Retried):
    """A function of a range and more, called for its pieces."""

    def __call__(self, start: int, stop: int, *args: Any, **kwargs: Any) -> Any:
        wanted = self._options.initial or max(1, stop - start)
        search = self._search(wanted)
        return self._joined(search.run_range(self._function, start, stop, *args, **kwargs))

    def _joined(self, results: list[Any]) -> Any:
        join = self._options.join
        return results if join is None else join(results)


class RetriedChunks(RetriedRange):
    """A function of a tensor, its place and more, called for the tensor's chunks."""

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        options = self._options
        require_strided(f"the first argument of {self._name}", tensor, remedy=_CUT)
        if not isinstance(tensor, Tensor) or not -tensor.dim() <= options.dimension < tensor.dim():
            what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(type(tensor))
            raise BatchError(f"dimension is {options.dimension}, but the first argument of {self._name} is {what}")
        search = self._search(options.initial or max(1, tensor.shape[options.dimension]), tensor.device)
        return self._joined(search.run_chunks(self._function, tensor, options.dimension, *args, **kwargs))


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
