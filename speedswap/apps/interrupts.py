"""Ctrl-C and a scheduler's SIGTERM as requests: training ends after the step in progress, and saves what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from speedswap.swapping.interrupts import set_handlers

__all__ = ["Ended", "Stop", "ending_signals", "listening", "word_for"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what ``kill`` and schedulers send, and what a terminal sends that is closed."""
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Ended(KeyboardInterrupt):
    """Another signal than Ctrl-C that asks the process to end; what cleans up after Ctrl-C does so after it too.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(word_for(number))
        self.signal = number


class Stop:
    """A request to end: from :meth:`listen` on the first signal is one, and the second is as usual.

    As a context manager it puts the handlers back. A signal that the process ignores, as SIGHUP under ``nohup`` and
    SIGINT in a shell's background, stays ignored. In threads other than the main one, which Python does not interrupt,
    nothing is done.

    Example:
        >>> with Stop() as stop:
        ...     stop.listen()
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.is_set(), stop.status, stop.word
        (True, 143, 'terminated')
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._usual: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin to take the first signal for a request."""
        if self._usual or threading.current_thread() is not threading.main_thread():
            return
        found = {number: signal.getsignal(number) for number in SIGNALS}
        self._usual = {number: usual for number, usual in found.items() if usual not in (signal.SIG_IGN, None)}
        set_handlers(dict.fromkeys(self._usual, self._ask))

    def is_set(self) -> bool:
        """Tell whether the signal has come."""
        return self._signal is not None

    @property
    def status(self) -> int:
        """The exit status, as shells have it: 130 after Ctrl-C, 143 after SIGTERM; 0 without a signal."""
        return 128 + self._signal if self._signal is not None else 0

    @property
    def word(self) -> str:
        """What came of it, for messages."""
        return word_for(self._signal)

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._put_back()

    def _put_back(self) -> None:
        usual, self._usual = self._usual, {}
        set_handlers(usual)


@contextmanager
def listening(stop: Stop | None) -> Iterator[Stop]:
    """Let a request to end listen: the caller's own, which goes on doing so, or one for this block."""
    if stop is not None:
        stop.listen()
        yield stop
        return
    with Stop() as own:
        own.listen()
        yield own


@contextmanager
def ending_signals() -> Iterator[None]:
    """Let the signals that would end the process at once raise :class:`Ended`, so that it cleans up first."""
    here = threading.current_thread() is threading.main_thread()
    ours = [number for number in SIGNALS[1:] if here and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    try:
        set_handlers(dict.fromkeys(ours, end))
        yield
    finally:
        set_handlers(dict.fromkeys(ours, signal.SIG_DFL))


def word_for(number: int | None) -> str:
    """What a signal did to a run: ``interrupted``, ``terminated`` or ``hung up``."""
    return WORDS.get(signal.Signals(number), "interrupted") if number is not None else "interrupted"
