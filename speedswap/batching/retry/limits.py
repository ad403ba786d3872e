"""What sizes have fitted, of which function, in which situation."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["GROW_AFTER", "Limit", "Limits", "Registry", "identity_of"]

V = TypeVar("V")

GROW_AFTER = 32  # attempts without a failure before twice the size is tried
_MOST_PATIENCE = 64  # times that: how rarely a size that keeps failing is tried at the most
_MOST_KEYS = 1024


class Limit:
    """The largest size that has fitted in one situation, and when to try more.

    After ``grow_after`` attempts without a failure twice the size is tried once. Each failure makes the next trial come
    after twice as many attempts, so that a limit that stays costs ever less.

    Args:
        size: what has fitted.
        grow_after: attempts before a larger size is tried; None keeps the size for good.
    """

    def __init__(self, size: int, grow_after: int | None = GROW_AFTER) -> None:
        self.size = size
        self._grow_after = grow_after
        self._patience = grow_after or 0
        self._clean = 0
        self._trial: int | None = None

    def choose(self, wanted: int) -> int:
        """The size for the next attempt: at most what is wanted, and more than :attr:`size` where it is a trial."""
        if self.size >= wanted:
            return wanted
        if self._grow_after is not None and self._clean >= self._patience:
            self._clean = 0  # one trial, whoever else asks meanwhile
            self._trial = min(2 * self.size, wanted)
            return self._trial
        return self.size

    def fitted(self, size: int) -> None:
        """Note an attempt that succeeded."""
        if size == self._trial:
            self.size, self._trial, self._clean = size, None, 0
        elif size == self.size:
            self._clean += 1

    def failed(self) -> None:
        """Note that an attempt ran out of memory."""
        self._clean, self._trial = 0, None
        if self._grow_after is not None:
            self._patience = min(2 * self._patience, _MOST_PATIENCE * self._grow_after)

    def shrink(self, size: int) -> None:
        """Note that no more than this has fitted."""
        self.size, self._clean = min(self.size, size), 0


class Limits:
    """What has fitted one function, for each key and class of free memory (a power of two of bytes).

    Nothing is remembered, and nothing costs time, until memory has run out once. With less memory free than ever
    before, the limit of the nearest class above holds; with more, there is none until something fails there, too.

    Args:
        most_keys: how many keys are remembered; the one longest unused is forgotten first.
    """

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self.lock = threading.Lock()
        self._most_keys = most_keys
        self._known: OrderedDict[Hashable, dict[int, Limit]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: Hashable, memory: int, grow_after: int | None) -> Limit | None:
        """The limit for this situation, if there is one; called with the lock held."""
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

    def note(self, key: Hashable, memory: int, size: int, grow_after: int | None) -> Limit:
        """Remember that no more than this has fitted; called with the lock held."""
        limit = self.find(key, memory, grow_after)
        if limit is None:
            limit = self._known.setdefault(key, {})[memory] = Limit(size, grow_after)
            if len(self._known) > self._most_keys:
                self._known.popitem(last=False)
        limit.shrink(size)
        return limit


class Registry(Generic[V]):
    """Something for each function, for as long as that lives.

    Args:
        make: makes what a function has that was never seen before.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._known: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, function: Callable[..., Any]) -> V:
        """What a function has; the same for all closures of one piece of code, and for all objects of its method."""
        identity = identity_of(function)
        number = id(identity)
        with self._lock:
            known = self._known.get(number)
            if known is not None and known[0]() is identity:
                return known[1]
            made = self._make()
            self._known[number] = weakref.ref(identity, functools.partial(self._drop, number)), made
            return made

    def _drop(self, number: int, reference: weakref.ref[Any]) -> None:
        known = self._known.get(number)  # no lock: a collection may run this wherever it likes
        if known is not None and known[0] is reference:
            del self._known[number]


def identity_of(function: Callable[..., Any]) -> Any:
    """What stands for a function: its code where it has one, below partials, methods and decorators; else itself.

    Code is one for all closures that a definition makes, so that these share what was learned, and holds none of them.
    """
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        return code
    try:
        weakref.ref(function)
    except TypeError:
        return type(function)
    return function
