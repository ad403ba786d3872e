"""A run under way: its progress, shown, and requests to end it.

Ctrl-C and a scheduler's SIGTERM are requests: training ends after the step in progress, and saves its results so far.
In a job of several processes a request to one of them is one to all, after the same step.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from speedswap._process import set_handlers
from speedswap._words import pip_install
from speedswap.apps.ranks import Job, another_has_spoken, joined
from speedswap.errors import PeerError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by Ctrl-C; by ``kill`` and schedulers; by a terminal that is closed."""
WORD_SECONDS = 3.0
"""The time that a rank has to say why it has failed, before others say that it has."""
REPEATED_SECONDS = 5.0
"""In a job another signal within so long is the same one, which both the terminal and torchrun have sent."""
WORDS = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


# ---- requests to end ------------------------------------------------------------------------------------------------


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C that asks the process to end; code that cleans up after Ctrl-C does so after it too.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(word_for(number))
        self.signal = number


class Stop:
    """A request to end: from :meth:`listen` on the first signal is one, and the second acts as usual.

    As a context manager it puts the handlers back. A signal that the process ignores, as SIGHUP under ``nohup`` and
    SIGINT in a shell's background, stays ignored. In threads other than the main one, which Python does not interrupt,
    nothing is done.

    Args:
        job: the processes of the run, if it is more than one. A signal to one of them is a request from the next
            :meth:`poll` on.

    Example:
        >>> with Stop() as stop:
        ...     stop.listen()
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.is_set(), stop.status, stop.word
        (True, 143, 'terminated')
    """

    def __init__(self, job: Job | None = None) -> None:
        self.job = job or Job()
        self._came: int | None = None  # to this process
        self._came_at = 0.0
        self._signal: int | None = None
        self._usual: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin to take the first signal for a request."""
        if self._usual or threading.current_thread() is not threading.main_thread():
            return
        found = {number: signal.getsignal(number) for number in SIGNALS}
        self._usual = {number: usual for number, usual in found.items() if usual not in (signal.SIG_IGN, None)}
        set_handlers(dict.fromkeys(self._usual, self._ask))

    def poll(self, *, due: bool = False) -> bool:
        """Agree with the other processes on requests; all of them call this after a step.

        Args:
            due: True if this process wants a checkpoint to be saved.

        Returns:
            Whether one of them does.
        """
        if self.job.size == 1:
            return due
        notes = self.job.agree((self._came or 0) << 1 | due)
        self._signal = self._signal or max(notes) >> 1 or None
        return any(note & 1 for note in notes)

    def is_set(self) -> bool:
        """Return whether the signal has arrived."""
        return self._signal is not None

    @property
    def status(self) -> int:
        """The exit status, as shells have it: 130 after Ctrl-C, 143 after SIGTERM; 0 without a signal."""
        return 128 + self._signal if self._signal is not None else 0

    @property
    def word(self) -> str:
        """The signal's effect, for messages."""
        return word_for(self._signal)

    def status_of(self, interrupted: bool) -> int:
        """Return the exit status of a run, which this request may have ended."""
        return self.status if interrupted else 0

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.job.size == 1:
            self._signal = number
            self._put_back()
        elif self._came is None:
            self._came, self._came_at = number, time.monotonic()
        elif time.monotonic() - self._came_at > REPEATED_SECONDS:
            self._put_back()
            signal.raise_signal(number)

    def _put_back(self) -> None:
        usual, self._usual = self._usual, {}
        set_handlers(usual)


@contextmanager
def begun(device: torch.device) -> Iterator[tuple[Job, Stop]]:
    """Surround a run with its job's beginning and end; provide the job and a request to end it.

    Args:
        device: to compute on.
    """
    with Stop() as stop, joined(device) as job:  # signals act as usual again once the ranks have ended
        stop.job = job
        try:
            yield job, stop
        except PeerError:
            another_has_spoken(seconds=WORD_SECONDS)  # before torchrun ends this process
            raise


@contextmanager
def listening(stop: Stop | None, job: Job | None = None) -> Iterator[Stop]:
    """Let a request to end listen: the caller's own, which goes on listening, or one of the job for this block."""
    if stop is not None:
        stop.listen()
        yield stop
        return
    with Stop(job) as own:
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
    """Return a signal's effect on a run: ``interrupted``, ``terminated`` or ``hung up``."""
    return WORDS.get(signal.Signals(number or signal.SIGINT), "interrupted")


# ---- progress -------------------------------------------------------------------------------------------------------


class Shown:
    """The display of a run's progress: a bar on standard error, and lines on standard output.

    A bar that cannot be shown, as when its terminal has gone, does not end the run.

    Args:
        bar: of tqdm; None for lines at most.
        lines: False for no lines either.
    """

    def __init__(self, bar: Any = None, *, lines: bool = True) -> None:
        self._bar = bar
        self._lines = lines
        self._ask("refresh")

    def update(self, steps: float) -> None:
        """Advance by a number of steps."""
        if self._bar is not None:
            self._ask("update", min(steps, self._bar.total - self._bar.n))  # fractions may add up to a little more

    def note(self, text: str) -> None:
        """Show a text next to the bar."""
        self._ask("set_postfix_str", text, False)

    def write(self, line: str) -> None:
        """Print a line on standard output."""
        if self._bar is not None:
            self._ask("write", line)
        elif self._lines:
            print(line, flush=True)

    def close(self) -> None:
        """Close the bar, leaving it as it is."""
        self._ask("close")

    def _ask(self, method: str, *args: Any) -> None:
        try:
            if self._bar is not None:
                getattr(self._bar, method)(*args)
        except OSError as error:
            if method == "write" and isinstance(error, BrokenPipeError):
                raise  # the reader of the lines has gone
            self._bar.disable = True


@contextmanager
def show_progress(total_steps: int, done: int = 0, *, shown: bool, unit: str = " steps") -> Iterator[Shown]:
    """Show a run's progress: a bar on standard error, and lines on standard output."""
    if not shown:
        yield Shown(lines=False)
        return
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"no progress bar without tqdm: {pip_install('tqdm', extra='demo')}", file=sys.stderr)
        yield Shown()
        return
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    how = {"unit": unit, "unit_scale": unit != " steps", "mininterval": seconds, "dynamic_ncols": True}
    bar = Shown(tqdm(total=total_steps, initial=done, delay=1e-9, **how))  # delayed, so that Shown shows it first
    try:
        yield bar
    finally:
        bar.close()
