"""Forks, signals and threads of the process."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

__all__ = ["EndingThread", "Locked", "all_held", "in_child", "set_handlers"]


def in_child(action: Callable[[], object]) -> None:
    """Have every process that is forked from this one begin with an action."""
    os.register_at_fork(after_in_child=action)


class Locked:
    """An object that one thread uses at a time.

    Attributes:
        lock: held by that thread; reentrant.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _all.add(self)


def all_held(locks: Iterable[threading.RLock]) -> ExitStack:
    """Hold several locks until the stack is closed.

    Every thread takes them in the same order, so that two threads never wait for each other.
    """
    with ExitStack() as held:
        for lock in sorted({*locks}, key=id):
            held.enter_context(lock)
        return held.pop_all()


_all: weakref.WeakSet[Locked] = weakref.WeakSet()


def _free() -> None:
    """Give every object a new lock: a thread that does not exist in the child may have held the old one."""
    for locked in list(_all):
        locked.lock = threading.RLock()


in_child(_free)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def set_handlers(handlers: Mapping[int, Any]) -> None:
    """Set all signal handlers, even if one that was just set is called and raises."""
    left = dict(handlers)
    try:
        while left:
            number = next(iter(left))
            signal.signal(number, left[number])
            del left[number]
    finally:
        if left:
            set_handlers(left)


_SECONDS = 3.0


class EndingThread(threading.Thread):
    """A daemon thread that is asked to end, and joined, before Python exits.

    At exit, Python ends a daemon thread when it next needs the interpreter. If that is on its return from torch's C++,
    the whole process aborts ("terminate called without an active exception").

    Args:
        work: the thread's function.
        arguments: arguments of ``work``.
        name: the thread's name.
        ask: asks the thread to end; called in another thread.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any, name: str, ask: Callable[[], object]) -> None:
        super().__init__(target=work, args=arguments, name=name, daemon=True)
        self._ask = ask
        self._was_asked = False

    def end(self) -> None:
        """Ask the thread to end, and wait at most a few seconds, once."""
        if not self._was_asked:
            self._was_asked = True
            self._ask()
            self.join(_SECONDS)


@atexit.register
def _end_all() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, EndingThread):
            thread.end()
