"""Sizes that fit, and attempts at one piece of work, each with fewer samples at once than the one before."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from types import TracebackType
from typing import TypeVar

from speedswap.batching.recovery.oom import chain, forget, release_cached_memory
from speedswap.errors import BatchError

__all__ = ["GROW_AFTER", "Attempts", "Limit", "Limits", "SharedLimits"]

GROW_AFTER = 32  # successes before a larger size is tried
_MOST_PATIENCE = 64  # upper bound of the wait for a trial, in multiples of ``grow_after``
_MOST_KEYS = 1024


class Limit:
    """The largest size that fits in one situation, and when a larger one is due.

    After ``grow_after`` successes a larger size is tried once: halfway to the smallest known to fail, in numbers of
    parts, or twice the size where none is known or little lies between them. Each failure doubles the number of
    successes before the next trial, so that a limit that stays costs ever less.

    Args:
        size: the largest size that fits; None while nothing has failed.
        grow_after: successes before a larger size is tried; None never tries one.

    Attributes:
        largest: the largest size that has fitted, by kind of work.
    """

    def __init__(self, size: int | None, grow_after: int | None = GROW_AFTER) -> None:
        self.size = size
        self.largest: dict[str, int] = {}
        self._grow_after = grow_after
        self._patience = grow_after or 0
        self._clean = 0  # successes since the last change
        self._trial: int | None = None
        self._failed: int | None = None  # the smallest size that did not fit

    def choose(self, wanted: int) -> int:
        """Return the size for the next attempt: at most ``wanted``, and above :attr:`size` where it is a trial."""
        if self.size is None or self.size >= wanted:
            return wanted
        if self._grow_after is not None and self._clean >= self._patience:
            self._clean = 0  # one trial, whatever other threads ask for meanwhile
            self._trial = self._larger(self.size, wanted)
            return self._trial
        return self.size

    def _larger(self, size: int, wanted: int) -> int:
        if self._failed is not None and self._failed <= 2 * size:
            parts = -(-wanted // size)
            failing = (wanted - 1) // (self._failed - 1)  # the most parts that are as large as what failed
            if parts - failing > max(1, parts // 8):
                return -(-wanted // ((parts + failing) // 2))
        return min(2 * size, wanted)  # what failed may fit by now

    @property
    def on_trial(self) -> bool:
        """True if a larger size was chosen, and has neither fitted nor failed yet."""
        return self._trial is not None

    def fitted(self, size: int, wanted: int | None = None) -> bool:
        """Record a success.

        Args:
            size: as it was chosen.
            wanted: the size of the whole; a success with all of it does not count towards a trial.

        Returns:
            Whether the limit grew.
        """
        if size == self._trial:
            self.size, self._trial, self._clean = size, None, 0
            if self._failed is not None and size >= self._failed:
                self._failed = None
            return True
        if size == self.size and size != wanted:
            self._clean += 1
        return False

    def failed(self, size: int) -> int:
        """Record a piece of work's first failure; return the size to try next."""
        self._clean, self._trial = 0, None
        if self.size is None:
            return size // 2
        if self._grow_after is not None:
            self._patience = min(2 * self._patience, _MOST_PATIENCE * self._grow_after)
        return self.size if self.size < size else size // 2

    def shrink(self, size: int, failed: int | None = None) -> None:
        """Lower the limit to ``size`` if it is above.

        Args:
            size: the largest that may fit.
            failed: a size that did not.
        """
        if self.size is None or size < self.size:
            self.size = size
        self._clean = 0
        if failed is not None:
            self._failed = failed if self._failed is None else min(failed, self._failed)

    def end_trial(self, *, due_again: bool) -> None:
        """Drop a trial that did not take place; the next one is due at once, or after as many successes as before."""
        if self._trial is not None:
            self._trial, self._clean = None, self._patience if due_again else 0


class Limits:
    """Limits for each key and class of free memory, such as :func:`~.oom.memory_class` gives.

    Args:
        most_keys: number of keys remembered; the least recently used one is forgotten first.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._known: OrderedDict[Hashable, dict[int, Limit]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: Hashable, memory: int, grow_after: int | None) -> Limit | None:
        """Return the limit of a situation; with less free memory than ever before, that of the nearest class above."""
        classes = self._known.get(key)
        if classes is None:
            return None
        self._known.move_to_end(key)
        if memory not in classes:
            above = min((other for other in classes if other > memory), default=None)
            if above is None:
                return None
            classes[memory] = Limit(classes[above].size, grow_after)
        return classes[memory]

    def nearest(self, key: Hashable, memory: int, grow_after: int | None, initial: int | None) -> Limit:
        """Return the limit of a situation; a new one begins with that of the nearest class, else with ``initial``."""
        classes = self._classes(key)
        if memory not in classes:
            near = min(classes, key=lambda other: abs(other - memory), default=None)
            classes[memory] = Limit(initial if near is None else classes[near].size, grow_after)
        return classes[memory]

    def note(self, key: Hashable, memory: int, size: int, grow_after: int | None) -> Limit:
        """Remember that no more than ``size`` has fitted; return the limit."""
        limit = self.find(key, memory, grow_after)
        if limit is None:
            limit = self._classes(key)[memory] = Limit(size, grow_after)
        limit.shrink(size)
        return limit

    def _classes(self, key: Hashable) -> dict[int, Limit]:
        classes = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        if len(self._known) > self._most_keys:
            self._known.popitem(last=False)
        return classes


class SharedLimits(Limits):
    """Limits that several threads use; unlike others, they cannot be copied.

    Attributes:
        lock: held by the thread that uses one of the limits.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        super().__init__(most_keys)
        self.lock = threading.Lock()


Self = TypeVar("Self", bound="Attempts")


class Attempts(ABC):
    """Attempts at one piece of work, until one does not run out of memory::

        while attempts.again():
            with attempts:
                result = work(attempts.size)

    A failure is handled by :meth:`again`, outside of the ``with`` block: inside, the interpreter still holds the failed
    frames, and with them the memory that has to be freed.

    Args:
        size: number of samples that the first attempt works on at once.

    Attributes:
        size: the same for the next attempt.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._failures: list[tuple[int, BaseException]] = []
        self._failure: BaseException | None = None
        self._succeeded = False

    def again(self) -> bool:
        """Return whether an attempt is due: the first one, or a smaller one after running out of memory.

        Raises:
            BaseException: whatever the last attempt raised, where a smaller one is of no use.
        """
        failure, self._failure = self._failure, None
        due, self._succeeded = not self._succeeded, False
        if failure is not None:
            context = failure.__context__
            try:
                self.recover(failure)
            finally:
                failure.__context__ = context  # raised again, it would get the error that the caller is handling
                del failure, context  # where it is raised again, its traceback refers to this frame
        return due

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._failure, self._succeeded = error, error is None
        return error is not None

    @abstractmethod
    def recover(self, failure: BaseException) -> None:
        """Undo a failed attempt and choose a smaller :attr:`size`, or raise the failure."""

    def release(self, failure: BaseException, size: int) -> None:
        """Free everything that an attempt with ``size`` samples held, and keep its error for the history."""
        forget(failure)
        self._failures.append((size, failure))
        release_cached_memory()

    def with_history(self, failure: BaseException, reason: BatchError) -> BaseException:
        """Return a failure with the earlier ones as its causes, and ``reason`` as the first one's."""
        errors = [error for _, error in self._failures]
        self._failures.clear()
        chain([*errors, failure], reason)
        return failure
