"""Exchanges between ranks ahead of their steps, in a background thread on each rank; passes at each rank's own pace."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from speedswap._process import EndingThread
from speedswap.collectives.lane import Lane
from speedswap.collectives.messages import ANYTHING, FAILED, NO_COUNT, OK, Kind, Line
from speedswap.collectives.task import PeerOutOfMemory, Task
from speedswap.errors import PeerError, RanksError

_PLACES = 1 << 20  # errands between two rounds of the main lane
_PATIENCE = 3.0  # seconds to wait for ranks that are about to announce a batch


class Errand:
    """Work that all ranks do ahead of time, in a background thread on each. :meth:`Ahead.announce` starts it.

    The base class does nothing: it marks the end of the announcements under way.

    Args:
        about: the number of its object, the same on all ranks.

    Attributes:
        kind: its kind, as sent in lines.
        failed: True if the announcements ended because of an error.
        time: when it was announced, the same on all ranks; greater than 0.
        rounds: the main lane's number of rounds at that time.
        is_done: True if all ranks have done it.
        error: the exception raised in it.
        ended: the rank that announced the end instead, as torch.distributed numbers it, and True if it failed.
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
        """Do the part that needs no other rank; return a count for each rank."""
        return []

    def run(self, task: Task, counts: list[int]) -> None:
        """Do the rest, in a task of all ranks, given each rank's count for this rank."""

    def let_go(self) -> None:
        """Release what only the work needed, once it is over."""

    def end(self) -> None:
        """Record that the work is over."""
        self._is_over.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the work is over (done, failed or cancelled), at most ``seconds``; return whether it is over."""
        return self._is_over.wait(seconds)


class Ahead:
    """The errands of a group's ranks; each rank's thread does them in announcement order.

    All ranks announce the same errands, since they run the same program, unless one has left its loop. So every
    announcement has a time that is equal on all ranks: the main lane's count ``met``, and a counter since it last
    changed. In an errand's first round the ranks compare times. A rank whose time is older than another's drops its
    errand, since another rank has moved past it; the others wait for its next one.

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
        self._ended = -1  # the main lane's `met` when any rank announced an end
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
        """Queue an errand."""
        self._time = max(self._time + 1, self._main.met * _PLACES + 1)
        if self._thread is None:
            ask = partial(self._queue.put, None)
            self._thread = EndingThread(_do_all, self._queue, name="speedswap-ahead", ask=ask)
            self._thread.start()
        errand.time, errand.rounds = self._time, self._main.rounds
        self._queue.put((self, errand))

    def announce_end(self, *, failed: bool) -> None:
        """Cancel the other ranks' errands until the main lane's next round, since this rank has none left.

        Args:
            failed: True if an error is the reason.
        """
        if self._announced_end != self._main.met:  # otherwise already announced, for another table
            self._announced_end = self._main.met
            end = Errand()
            end.failed = failed
            self.announce(end)

    def wait_for(self, errand: Errand) -> None:
        """Wait until the errand of the next batch is over.

        If this rank skipped batches before it met the others, they may not have announced the errand yet.
        """
        is_alone = errand.rounds == self._main.rounds and not self._main.pending
        if not errand.wait(_PATIENCE if is_alone else None):
            with self._main.task(Kind.MEET) as task:
                task.round()
            errand.wait()

    def note_end(self, errand: Errand) -> None:
        """Record that an errand has met the end; from then on all ranks' counts agree again."""
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
        """Exchange lines with the ranks that are at the same time; return none if a rank has moved past it."""
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


class OwnPace:
    """The ranks of a lane while each runs passes at its own pace and they meet only occasionally.

    A lookup needs all ranks. So in each round every rank says what it wants: rows of a table, or to meet. All ranks
    look up the first table requested, with an empty lookup on ranks that did not request it, and then repeat the round.
    Ranks may look up in any order, any number of times, and retry after running out of memory.

    Args:
        lane: the ranks' lane.
        servers: tables and id maps by number, the same on all ranks. Their ``serve(task, asked, part)`` answers this
            rank's lookup and the others'; it returns None if this rank has no lookup or it is not this lookup's turn.
    """

    def __init__(self, lane: Lane, servers: Mapping[int, Any]) -> None:
        self._lane = lane
        self._servers = servers
        self._meetings = 0
        self.ranks = lane.ranks
        self.is_active = False

    @classmethod
    def of(cls, ranks: Sequence[int]) -> OwnPace:
        """Return the pace of ranks without shared tables, as torch.distributed numbers them; each must call this."""
        job, timeout = distributed_c10d._get_default_group(), distributed_c10d.default_pg_timeout
        return cls(Lane(job, "own pace", timeout, ranks=ranks), {})

    @contextmanager
    def task(self, number: int) -> Iterator[None]:
        """Surround work that the ranks do at their own pace; an exception inside becomes a PeerError on the others.

        Args:
            number: identifies the kind of work; it must be the same on all ranks.
        """
        before = self._meetings, self.is_active  # the work may be nested in other work at each rank's own pace
        if self._lane.pending is not None and not self.is_active:
            self._lane.pending.settle()  # gradients left by earlier passes have different weights
        failures, self._meetings, self.is_active = self._lane.failures, number << 32, True
        try:
            yield
        except BaseException as error:
            if self._lane.failures == failures:  # otherwise the others know
                with self._lane.task(Kind.AT_OWN_PACE, self._meetings) as task:
                    task.give_up()
            if isinstance(error, PeerOutOfMemory):
                raise PeerError(f"{error}, and the batch cannot be split further here") from None
            raise
        finally:
            self._meetings, self.is_active = before

    def look_up(self, number: int, asked: Any, part: int = 0) -> Tensor:
        """Fetch rows of a table from their owners, or the rows of keys.

        Args:
            number: the number of the table or id map.
            asked: ids, shape (n,); or the request to the id map.
            part: the index of the table's column, the weight by default.

        Returns:
            The column's values, shape (n, …), in host memory; or the keys' rows.
        """
        came, mine = None, part << 32 | number
        while came is None:
            with self._task() as task:
                # A note combines a column and its table's number, or is the negative number of a meeting.
                wanted = min(note for note in task.round(note=mine).notes if note >= 0)
                came = self._serve(task, wanted, asked if wanted == mine else None)
        return came

    @contextmanager
    def _task(self) -> Iterator[Task]:
        """Surround a part of a batch; leave it early if another rank has run out of memory and retries."""
        with suppress(PeerOutOfMemory), self._lane.task(Kind.AT_OWN_PACE, self._meetings, may_retry=True) as task:
            yield task

    def _serve(self, task: Task, wanted: int, asked: Any = None) -> Tensor | None:
        part, number = divmod(wanted, 1 << 32)
        server = self._servers.get(number)
        if server is None:
            raise RanksError("another rank looks up in an embedding that was freed on this one; keep its module")
        found: Tensor | None = server.serve(task, asked, part)
        return found

    def round(self, stage: int, *numbers: float, is_out_of_memory: bool = False) -> list[list[float]]:
        """Wait for all ranks, serving their lookups; send numbers to all, and return each rank's.

        Args:
            stage: the point that this rank has reached; it must be the same on all ranks.
            numbers: the same count on all ranks.
            is_out_of_memory: True if this rank is out of memory; other ranks learn of it when they reach this point.

        Returns:
            Each rank's numbers; nothing if this rank reported that it is out of memory.

        Raises:
            PeerOutOfMemory: another rank is out of memory and this one is not.
            PeerError: a rank has failed, is at another point of the program, or is unreachable.
        """
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64).repeat(len(self.ranks))
        each: Sequence[Tensor] | None = None
        out: list[int] = []
        while each is None:
            with self._task() as task:
                note = -1 - 2 * stage - is_out_of_memory
                found = task.round([len(numbers)] * len(self.ranks), note=note, ids=sent)
                wanted = [note for note in found.notes if note >= 0]
                if wanted:
                    self._serve(task, min(wanted))
                else:
                    stages = [(-1 - note) // 2 for note in found.notes]
                    out = [rank for rank, note in zip(self.ranks, found.notes, strict=True) if (-1 - note) % 2]
                    if not out and len({*stages}) > 1:
                        other = next(place for place, one in enumerate(stages) if one != stages[0])
                        raise PeerError(
                            f"rank {self.ranks[other]} is at another point of the training loop than rank "
                            f"{self.ranks[0]}. {task.purpose.remedy.rstrip()}"
                        )
                    each = [] if out else task.numbers_that_came(sent, found.counts)
        self._meetings += 1
        if out and not is_out_of_memory:
            raise PeerOutOfMemory(f"rank {out[0]} has run out of memory")
        return [own.view(torch.float64).tolist() for own in each]

    def anywhere(self, flags: Sequence[int]) -> tuple[list[int], bool]:
        """Return each flag's maximum over all ranks, and whether some ranks have a flag at 0 and others not."""
        with self._lane.task(Kind.AT_OWN_PACE, self._meetings) as task:
            theirs = torch.tensor(task.share([*flags]), dtype=torch.int64, device="cpu")
        most = theirs.amax(0)
        return most.tolist(), bool(((theirs == 0) & (most > 0)).any())
