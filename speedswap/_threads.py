"""Threads that end before Python does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["EndingThread"]

_SECONDS = 3.0


class EndingThread(threading.Thread):
    """A daemon thread that is asked to end, and waited for, before Python ends.

    Python ends a daemon thread where it next needs the interpreter. On its way back from torch's C++ that takes the
    whole process down ("terminate called without an active exception").

    Args:
        work: the thread's.
        arguments: of ``work``.
        name: of the thread.
        ask: asks it to end, in another thread.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any, name: str, ask: Callable[[], object]) -> None:
        super().__init__(target=work, args=arguments, name=name, daemon=True)
        self._ask = ask
        self._was_asked = False

    def end(self) -> None:
        """Let the thread end, but wait for it no longer than a few seconds, once."""
        if not self._was_asked:
            self._was_asked = True
            self._ask()
            self.join(_SECONDS)


@atexit.register
def _end_all() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, EndingThread):
            thread.end()
