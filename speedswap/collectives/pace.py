"""Passes that ranks run at their own pace, while all ranks serve each other's lookups at any point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from speedswap.collectives.lane import Lane
from speedswap.collectives.messages import Kind
from speedswap.collectives.task import PeerOutOfMemory, Task
from speedswap.errors import PeerError, RanksError


class OwnPace:
    """The ranks of a lane while each runs its passes at its own pace and they meet only occasionally.

    A lookup needs all ranks. So in a round each rank says what it wants: rows of a table, or to meet. All of them look
    up the first table requested, with an empty lookup on ranks that did not request it, and then repeat the round.
    Ranks may look up in any order, equally often or not, and retry after running out of memory.

    Args:
        lane: the ranks' lane.
        servers: tables and id maps by number, the same on all ranks. Their ``serve(task, asked, part)`` answers this
            rank's lookup and the others'; it returns None if this rank has no lookup, or it was not its turn.
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
        before = self._meetings, self.is_active  # the work may be part of other work at each rank's pace
        if self._lane.pending is not None and not self.is_active:
            self._lane.pending.settle()  # gradients left by earlier passes are weighted differently
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
                # A note is a column and the number of its table, or the negative number of a meeting.
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
            raise RanksError("another rank looks up in an embedding that is gone on this one; keep its module")
        found: Tensor | None = server.serve(task, asked, part)
        return found

    def round(self, stage: int, *numbers: float, is_out_of_memory: bool = False) -> list[list[float]]:
        """Wait for all ranks, serving their lookups; send numbers to all, and return each rank's.

        Args:
            stage: the point that this rank has reached; it must be the same on all ranks.
            numbers: equally many on all ranks.
            is_out_of_memory: True if this rank is; other ranks learn of it when they reach this point.

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
                            f"rank {self.ranks[other]} is in another place of the training loop than rank "
                            f"{self.ranks[0]}. {task.purpose.remedy.rstrip()}"
                        )
                    each = [] if out else task.numbers_that_came(sent, found.counts)
        self._meetings += 1
        if out and not is_out_of_memory:
            raise PeerOutOfMemory(f"rank {out[0]} has run out of memory")
        return [own.view(torch.float64).tolist() for own in each]

    def anywhere(self, flags: Sequence[int]) -> tuple[list[int], bool]:
        """Return each flag's maximum over all ranks, and whether ranks differ in having a flag at 0."""
        with self._lane.task(Kind.AT_OWN_PACE, self._meetings) as task:
            theirs = torch.tensor(task.share([*flags]), dtype=torch.int64, device="cpu")
        most = theirs.amax(0)
        return most.tolist(), bool(((theirs == 0) & (most > 0)).any())
