"""Threads that end before Python exits."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["EndingThread"]

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
