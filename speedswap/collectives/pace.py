"""Passes of ranks at a pace of their own: a lookup of one is served by all, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from speedswap.collectives.exchange import PeerOutOfMemory, Status
from speedswap.collectives.kinds import Kind
from speedswap.collectives.lane import Lane
from speedswap.collectives.lines import note_of
from speedswap.collectives.task import Task
from speedswap.errors import PeerError, RanksError

__all__ = ["OwnPace", "Server"]


class Server(Protocol):
    """A table whose rows are spread over the ranks, or an id map whose keys are."""

    def serve(self, task: Task, asked: Any) -> Tensor | None:
        """Answer this rank's lookup, and those of others; None where this rank has none, or it was not its turn."""


class OwnPace:
    """The ranks of a lane while each runs its passes at a pace of its own, and they meet only here and there.

    A lookup needs all ranks. So each says in a round what it wants: rows of a table, or to meet. The first table wanted
    is looked up by all of them, without ids where another one was wanted or none; then they say again what they want.
    Ranks may look up in any order, equally often or not, and try again after running out of memory.

    Where they meet, they exchange numbers as those of an :class:`Exchange` do.

    Args:
        lane: of the ranks.
        servers: the tables by number, the same on all ranks.
    """

    def __init__(self, lane: Lane, servers: Mapping[int, Server]) -> None:
        self._lane = lane
        self._servers = servers
        self._meetings = 0
        self.ranks = lane.ranks
        self.is_active = False

    @contextmanager
    def task(self, number: int) -> Iterator[None]:
        """Surround what the ranks do at their own pace; an exception inside becomes a PeerError of the others.

        Args:
            number: identifies the kind of work; it must be the same on all ranks.
        """
        if self._lane.pending is not None:
            self._lane.pending.settle()  # what passes before have left is weighed otherwise
        failures, self._meetings, self.is_active = self._lane.failures, number << 32, True
        try:
            yield
        except BaseException as error:
            if self._lane.failures == failures:  # else the others know
                with self._lane.task(Kind.AT_OWN_PACE, self._meetings) as task:
                    task.give_up()
            if isinstance(error, PeerOutOfMemory):
                raise PeerError(f"{error}, and the batch cannot be split further here") from None
            raise
        finally:
            self.is_active = False

    def look_up(self, number: int, asked: Any) -> Tensor:
        """Bring rows of a table from their owners; or the rows of keys.

        Args:
            number: of the table, or of the id map.
            asked: ids, unique, shape (n,); or what the id map is asked.

        Returns:
            The weights, shape (n, embedding_dim), in host memory; or rows.
        """
        came = None
        while came is None:
            with self._task() as task:
                # A note is the number of a table, or that of a meeting, as a negative one.
                wanted = min(note for note in task.round(note=number).notes if note >= 0)
                came = self._serve(task, wanted, asked if wanted == number else None)
                task.finish()
        return came

    @contextmanager
    def _task(self) -> Iterator[Task]:
        """Surround a part of a batch, which is left early where another rank has run out of memory and tries again."""
        with suppress(PeerOutOfMemory), self._lane.task(Kind.AT_OWN_PACE, self._meetings, may_retry=True) as task:
            yield task

    def _serve(self, task: Task, number: int, asked: Any = None) -> Tensor | None:
        server = self._servers.get(number)
        if server is None:
            raise RanksError("another rank looks up in an embedding that is gone on this one; keep its module")
        return server.serve(task, asked)

    def round(self, stage: int, *numbers: float, status: Status = Status.OK) -> list[list[float]]:
        """Wait for all ranks, serving their lookups; send numbers to all, and return each rank's.

        Args:
            stage: the point that this rank has reached; it must be the same on all ranks.
            numbers: equally many on all ranks.
            status: this rank's state; other ranks learn of it where they come to this point.

        Returns:
            The numbers of each rank; nothing where this rank reported that it is out of memory.

        Raises:
            PeerOutOfMemory: another rank is out of memory and this one is not.
            PeerError: a rank has failed, is at another point, or cannot be reached.
        """
        each, out = None, []
        while each is None:
            with self._task() as task:
                notes = task.round(note=-1 - (stage * len(Status) + status)).notes
                wanted = [note for note in notes if note >= 0]
                met = [divmod(-1 - note, len(Status)) for note in notes]
                if wanted:
                    self._serve(task, min(wanted))
                elif len({stage for stage, _ in met}) > 1:
                    raise PeerError(f"the ranks are at different points of a batch: {[stage for stage, _ in met]}")
                else:
                    out = [rank for rank, (_, one) in zip(self.ranks, met, strict=True) if one != Status.OK]
                    each = [] if out else [task.round(note=note_of(number)).numbers for number in numbers]
                task.finish()
        self._meetings += 1
        if out and status == Status.OK:
            raise PeerOutOfMemory(f"rank {out[0]} has run out of memory")
        return [] if out else [[number[rank] for number in each] for rank in range(len(self.ranks))]

    def anywhere(self, flags: Sequence[int]) -> tuple[list[int], bool]:
        """Return the maximum of each flag over all ranks, and whether a rank has 0 where another one has more."""
        count, size = len(flags), len(self.ranks)
        with self._lane.task(Kind.AT_OWN_PACE, self._meetings) as task:
            task.round()
            mine = torch.tensor([list(flags)] * size, dtype=torch.uint8, device="cpu").view(size, count)
            theirs = task.send(mine, [1] * size, [1] * size)
            task.finish()
        most = theirs.amax(0)
        return most.tolist(), bool(((theirs == 0) & (most > 0)).any())
