"""Ctrl-C as a request: training ends after the step in progress, and what there is can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["INTERRUPTED", "stop_on_interrupt"]

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C sets, so that a step is never cut in two; the second one is as usual."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # Python delivers Ctrl-C to the main thread only
        return
    usual = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, usual)
