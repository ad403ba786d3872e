"""Exchanges between ranks ahead of their steps, in a background thread on each rank."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from queue import SimpleQueue

import torch

from speedswap._process import EndingThread
from speedswap.collectives.lane import Lane
from speedswap.collectives.messages import ANYTHING, FAILED, NO_COUNT, OK, Kind, Line
from speedswap.collectives.task import Task

_PLACES = 1 << 20  # errands between two rounds of the main lane
_PATIENCE = 3.0  # seconds for ranks that are about to announce a batch


class Errand:
    """Work of all ranks that a background thread on each does ahead of time. :meth:`Ahead.announce` starts it.

    The base class does nothing: it marks the end of the announcements under way.

    Args:
        about: the number of its object, the same on all ranks.

    Attributes:
        kind: its kind, as sent in lines.
        failed: True if the announcements ended because of an error.
        time: when it was announced, the same on all ranks; greater than 0.
        rounds: number of rounds of the main lane then.
        is_done: True if all ranks have done it.
        error: the exception raised in it.
        ended: the rank that announced the end instead, as torch.distributed numbers it, and whether it failed.
    """

    kind = Kind.END
    failed = False
    time = rounds = 0
    is_done = False
    error: BaseException | None = None
    ended: tuple[int, bool] | None = None

    def __init__(self, about: int = ANYTHING) -> None:
        self.about = about
        self._is_over = threading.Event()

    def prepare(self) -> list[int]:
        """Do the part that needs no other rank; return a number for each rank."""
        return []

    def run(self, task: Task, counts: list[int]) -> None:
        """Do the rest, in a task of all ranks, with each rank's number for this one."""

    def let_go(self) -> None:
        """Release what only the work needed; it is over."""

    def end(self) -> None:
        """Record that it is over."""
        self._is_over.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done, has failed or is cancelled, or a number of seconds; return whether it is over."""
        return self._is_over.wait(seconds)


class Ahead:
    """The errands of a group's ranks, which each rank's thread does in announcement order.

    All ranks announce the same errands, since they run the same program, unless one has left its loop. So every
    announcement has a time, equal on all ranks: the number of rounds of the main lane that are of one batch, and a
    counter since the last of them. In an errand's first round the ranks compare times. A rank with an older time than
    another's gives its errand up, since another rank has moved past it; the others wait for the next one.

    Args:
        lane: the errands' lane.
        main: the lane of the program's own operations.
    """

    def __init__(self, lane: Lane, main: Lane) -> None:
        self.lane = lane
        self._main = main
        self._queue: SimpleQueue[tuple[Ahead, Errand] | None] = SimpleQueue()
        self._thread: EndingThread | None = None
        self._time = 0
        self._announced_end = -1
        self._ended = -1  # those rounds when an end was announced, by any rank
        weakref.finalize(self, self._queue.put, None)  # ends the thread

    def end(self) -> None:
        """End the thread and the lane, before the process exits."""
        if self._thread is not None:
            self._thread.end()
        self.lane.close()

    def begin(self) -> None:
        """Begin the announcements of another lookahead; every rank must call this."""
        self._time = max(self._main.notes(Kind.BEGIN, self._time))

    def announce(self, errand: Errand) -> None:
        """Queue an errand after those announced before."""
        self._time = max(self._time + 1, self._main.met * _PLACES + 1)
        if self._thread is None:
            ask = partial(self._queue.put, None)
            self._thread = EndingThread(_do_all, self._queue, name="speedswap-ahead", ask=ask)
            self._thread.start()
        errand.time, errand.rounds = self._time, self._main.rounds
        self._queue.put((self, errand))

    def announce_end(self, *, failed: bool) -> None:
        """Cancel the other ranks' errands until the main lane's next round: this rank has none left.

        Args:
            failed: True if an error is the reason.
        """
        if self._announced_end != self._main.met:  # else for another table
            self._announced_end = self._main.met
            end = Errand()
            end.failed = failed
            self.announce(end)

    def wait_for(self, errand: Errand) -> None:
        """Wait until the errand of the next batch is over.

        The other ranks may not have announced it yet, if this one has left batches before it met them there.
        """
        is_alone = errand.rounds == self._main.rounds and not self._main.pending
        if not errand.wait(_PATIENCE if is_alone else None):
            with self._main.task(Kind.MEET) as task:
                task.round()
            errand.wait()

    def note_end(self, errand: Errand) -> None:
        """Record that an errand has met the end, after which all ranks' counts agree again."""
        self._time = errand.time

    def do(self, errand: Errand) -> None:
        """Do an errand, in the background thread."""
        try:
            if errand.time // _PLACES != self._ended:
                with torch.no_grad():
                    self._do(errand)
        except BaseException as error:
            errand.error = error
        finally:
            errand.let_go()
            errand.end()

    def _do(self, errand: Errand) -> None:
        failure: BaseException | None = None
        counts: list[int] | None = None
        with self.lane.task(Kind.ERRAND, errand.about) as task:
            try:
                counts = errand.prepare()
            except BaseException as error:
                failure = error
            lines = self._meet(errand, failure is not None or errand.failed, counts or None)
            if failure is not None:
                task.finish()  # the other ranks know
                raise failure
            for rank, line in zip(self.lane.ranks, lines, strict=False):
                if line.kind == Kind.END:
                    self._ended, errand.ended = errand.time // _PLACES, (rank, line.status == FAILED)
                    return
            if lines and all(line.status == OK and line.about == errand.about for line in lines):
                errand.run(task, [line.amount for line in lines])
                errand.is_done = True

    def _meet(self, errand: Errand, failed: bool, counts: list[int] | None) -> list[Line]:
        """Exchange lines with the ranks that are at the same time; return no lines if one has moved past it."""
        line = Line(errand.kind, errand.about, 0, 0, FAILED if failed else OK, 0, NO_COUNT, errand.time, 0)
        while True:
            lines = self.lane.exchange_lines(line, counts)
            times = [each.note for each in lines]
            if max(times) > errand.time:
                return []
            if min(times) == errand.time:
                return lines


def _do_all(queue: SimpleQueue[tuple[Ahead, Errand] | None]) -> None:
    while (given := queue.get()) is not None:
        ahead, errand = given
        ahead.do(errand)
        del given, ahead, errand  # the errands hold rows
