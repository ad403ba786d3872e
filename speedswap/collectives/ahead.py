"""Exchanges between the ranks of a job ahead of their steps, in a thread of each."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from queue import SimpleQueue

import torch

from speedswap._threads import EndingThread
from speedswap.collectives.lane import Lane
from speedswap.collectives.messages import ANYTHING, FAILED, OK, Kind, Line
from speedswap.collectives.task import Task

_PLACES = 1 << 20  # errands between two rounds of the main lane
_DEPTH_BITS = 10
_MOST_DEPTH = (1 << _DEPTH_BITS) - 1


class Errand:
    """Work of all ranks that one of their threads does ahead of its time. :meth:`Ahead.announce` starts it.

    This one has nothing to do: it tells that no more comes of what is under way.

    Args:
        about: the number of what it is about, the same on all ranks.

    Attributes:
        kind: as lines tell it.
        failed: no more comes because of an error.
        time: of its announcement, the same on all ranks; greater than 0.
        places: times from this one on that no other errand has.
        is_done: True if all ranks have done it.
        error: what was raised in it.
        ended: the rank that has announced the end in its place, as torch.distributed numbers it, and whether it failed.
    """

    kind = Kind.END
    failed = False
    time = 0
    places = 1
    is_done = False
    error: BaseException | None = None
    ended: tuple[int, bool] | None = None

    def __init__(self, about: int = ANYTHING) -> None:
        self.about = about
        self._is_over = threading.Event()

    def prepare(self) -> list[int]:
        """Do what needs no other rank; return a number for each."""
        return []

    def run(self, task: Task, counts: list[int]) -> None:
        """Do the rest, in a task of all ranks, with the number that each has for this one."""

    def let_go(self) -> None:
        """Let go of what only the work needs, which is over."""

    def wait(self) -> None:
        """Return when it is done, has failed or will not be done."""
        self._is_over.wait()


class Ahead:
    """The errands of a group's ranks, which each rank's thread does in the order of their announcement.

    All ranks announce the same errands, as their programs run alike. Where one has left its loop they do not, so every
    announcement has its time, which is the same on all ranks: how many rounds the main lane has had, and a number since
    the last of them. In their first round ranks compare times. One with an older time than another's gives this errand
    up, since somebody has gone past it; the others wait for the next one.

    Args:
        lane: of the errands.
        main: the lane of what the program itself asks for.
    """

    def __init__(self, lane: Lane, main: Lane) -> None:
        self.lane = lane
        self._main = main
        self._queue: SimpleQueue[tuple[Ahead, Errand] | None] = SimpleQueue()
        self._thread: EndingThread | None = None
        self._time = 0
        self._announced_end = -1
        self._ended = -1  # the rounds of the main lane when an end was announced, by this rank or another
        weakref.finalize(self, self._queue.put, None)  # which ends the thread

    def end(self) -> None:
        """Let the thread and the lane end, before the process does."""
        if self._thread is not None:
            self._thread.end()
        self.lane.close()

    def begin(self, depth: int) -> None:
        """Let the announcements of another lookahead come; every rank calls this.

        Args:
            depth: how many batches ahead; the same on all ranks, which announce as many before a turn.

        Raises:
            ValueError: it is not, on all of them.
        """
        notes = self._main.notes(Kind.BEGIN, self._time << _DEPTH_BITS | min(depth, _MOST_DEPTH))
        self._time = max(notes) >> _DEPTH_BITS
        depths = [note & _MOST_DEPTH for note in notes]
        if len({*depths}) > 1:
            given = ", ".join(f"{each} on rank {rank}" for rank, each in zip(self.lane.ranks, depths, strict=True))
            raise ValueError(f"depth is {given}; give all ranks the same")

    def announce(self, errand: Errand) -> None:
        """Let an errand be done, after those announced before."""
        self._time = max(self._time + 1, self._main.rounds * _PLACES + 1)
        if self._thread is None:
            ask = partial(self._queue.put, None)
            self._thread = EndingThread(_do_all, self._queue, name="speedswap-ahead", ask=ask)
            self._thread.start()
        errand.time = self._time
        self._time += errand.places - 1
        self._queue.put((self, errand))

    def announce_end(self, *, failed: bool) -> None:
        """Let the other ranks' errands until the main lane's next round come to nothing: this one has no more of them.

        Args:
            failed: because of an error.
        """
        if self._announced_end != self._main.rounds:  # else for another table
            self._announced_end = self._main.rounds
            end = Errand()
            end.failed = failed
            self.announce(end)

    def note_end(self, errand: Errand) -> None:
        """Note that an errand has met the end, after which all ranks count alike again."""
        self._time = errand.time + errand.places - 1

    def do(self, errand: Errand) -> None:
        """Do an errand, in the thread."""
        try:
            if errand.time // _PLACES != self._ended:
                with torch.no_grad():
                    self._do(errand)
        except BaseException as error:
            errand.error = error
        finally:
            errand.let_go()
            errand._is_over.set()

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
                task.finish()  # the others know
                raise failure
            for rank, line in zip(self.lane.ranks, lines, strict=False):
                if line.kind == Kind.END:
                    self._ended, errand.ended = errand.time // _PLACES, (rank, line.status == FAILED)
                    return
            if lines and all(line.status == OK and line.about == errand.about for line in lines):
                errand.run(task, [line.amount for line in lines])
                errand.is_done = True

    def _meet(self, errand: Errand, failed: bool, counts: list[int] | None) -> list[Line]:
        """Exchange lines with ranks that are at this time, too; return none if one has gone past it."""
        line = Line(errand.kind, errand.about, 0, 0, FAILED if failed else OK, 0, 0, errand.time, 0)
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
        del given, ahead, errand  # which hold rows
