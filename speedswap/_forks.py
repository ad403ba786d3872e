"""Forked children: what they do first, and locks that they find free."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["Locked", "in_child"]


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


_all: weakref.WeakSet[Locked] = weakref.WeakSet()


def _free() -> None:
    """Give every object a new lock: a thread that does not exist in the child may have held the old one."""
    for locked in list(_all):
        locked.lock = threading.RLock()


in_child(_free)
