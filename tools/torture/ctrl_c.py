"""Ctrl-C at a line of some files, as it comes from a keyboard: between two steps of the interpreter, in that code."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

__all__ = ["CtrlC", "ctrl_c_at"]


def _in_c(name: str) -> Any:
    """Return a function of Python's as a trace function, which gets three arguments; it does not look at them."""
    function = ctypes.PyDLL(None)[name]
    function.argtypes, function.restype = [ctypes.py_object] * 3, None
    return function


# Does what an arriving SIGINT does: Python's handler runs where the interpreter next looks for signals.
_set_interrupt = _in_c("PyErr_SetInterrupt")
_nothing = _in_c("Py_IsInitialized")


@dataclass
class CtrlC:
    """An interrupt that may have come.

    Attributes:
        lines: calls and lines that have run, until it came.
        came: the place where it did, if so.
    """

    lines: int = 0
    came: list[str] = field(default_factory=list)


@contextmanager
def ctrl_c_at(line: int, folder: str) -> Iterator[CtrlC]:
    """Raise Ctrl-C inside the block once ``line`` calls and lines of a folder's files have run; never for 0.

    It strikes in the traced code, never in the tracer: there it could leave a lock held whose ``with`` block is just
    ending, although no real signal can arrive between its last line and the lock's release.
    """
    found = CtrlC()

    def interrupt(number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        if not found.came:  # one that was deferred may be repeated
            found.came.append("" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event in ("call", "line"):
            found.lines += 1
            if found.lines == line:
                return _interrupt_next(frame)
        return trace

    usual, before = signal.signal(signal.SIGINT, interrupt), sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        try:
            sys.settrace(before)  # one that was due at the last moment comes here
        finally:
            signal.signal(signal.SIGINT, usual)


def _interrupt_next(frame: FrameType) -> Any:
    """Return what interrupts when the frame's next line begins, and let no trace function of Python's run any more."""
    sys.settrace(_nothing)
    caller = frame.f_back
    while caller is not None:
        caller.f_trace = None
        caller = caller.f_back
    return _set_interrupt
