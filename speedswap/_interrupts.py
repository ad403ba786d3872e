"""Signals deferred while rows are written to the tables, or sent to other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

__all__ = ["deferred_interrupts", "set_handlers"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def set_handlers(handlers: Mapping[int, Any]) -> None:
    """Set the handlers of signals: all of them, even if one that has just been set is called and raises."""
    left = dict(handlers)
    try:
        while left:
            number = next(iter(left))
            signal.signal(number, left[number])
            del left[number]
    finally:
        if left:
            set_handlers(left)


def _replay(handlers: Mapping[int, Any], came: list[tuple[int, FrameType | None]]) -> None:
    """Call the handler of each signal, even if an earlier one raises."""
    if came:
        (number, frame), *later = came
        try:
            handlers[number](number, frame)
        finally:
            _replay(handlers, later)


class deferred_interrupts:
    """Defer a Ctrl-C inside the block to its end, and SIGTERM and SIGHUP if they have handlers.

    Several tables, or weight and state, are then written as a whole. Ignored signals stay ignored, and signals that end
    the process at once, as SIGTERM does by default, still do. In threads other than the main one, which Python does not
    interrupt, this does nothing.
    """

    def __enter__(self) -> None:
        self._handled: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        if threading.current_thread() is threading.main_thread():
            usual = {number: signal.getsignal(number) for number in SIGNALS}
            self._handled = {number: handler for number, handler in usual.items() if callable(handler)}
        try:
            set_handlers(dict.fromkeys(self._handled, self._note))
        except BaseException:
            self.__exit__()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def __exit__(self, *exc_info: object) -> None:
        set_handlers(self._handled)
        _replay(self._handled, self._came)
