"""Lanes: the order in which the ranks of a group meet, and their connections."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from speedswap.collectives.messages import ANYTHING, KINDS, Kind, Line, Sheet
from speedswap.collectives.task import Pending, Task
from speedswap.errors import PeerError, RanksError, ThreadError
from speedswap.kernels import deferred_interrupts

SPARE_IDS = 1 << 20


class Lane:
    """The rounds of some ranks, all of which take part in each, in one order.

    A lane has connections of its own: its rounds neither mingle with the model's collectives nor wait for a GPU. All
    ranks know the size of the next round, whatever it is for, so one that has failed, or is elsewhere, meets
    the others in their next one, where all of them raise. None is left waiting for one that has given up.

    Args:
        process_group: the processes; each of them has to make the lane.
        name: of the lane, which no other one of the group has.
        timeout: of a round; after it the lane cannot be used any more.
        payload: the group that carries rows of a GPU between GPUs; by default they go through host memory.
        ranks: those of the processes that have the lane, as torch.distributed numbers them; by default all.

    Attributes:
        pending: things to be finished by all ranks; one that is at the beginning of another task joins those that
            finish them, and goes on.
        failures: tasks that have failed on all ranks, or on this one with the others being told.
        rounds: so far; at one place of their programs all ranks have had equally many.
        step: of the training, which all ranks are in together.
        tables: what tasks are about, by number; each with its name, for messages.
        payloads, payload_bytes: so far, and what this rank has sent to others in them.
        sheet: the memory of the rounds.
        spare: memory that every rank has for :data:`SPARE_IDS` ids.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        name: str,
        timeout: timedelta,
        payload: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranks = dist.get_process_group_ranks(process_group) if ranks is None else [*ranks]
        self.rank = self.ranks.index(dist.get_rank())
        self.pending: Pending | None = None
        self.failures = 0
        self.rounds = 0
        self.step = 0
        self.tables: Mapping[int, Any] = {}
        self._begun: Counter[object] = Counter()  # since the last round
        self._rounds_begun = -1
        self.payloads = 0
        self.payload_bytes = 0
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = connect(process_group, name, self.ranks, timeout)
        self._payload = payload
        self._task: Task | None = None
        self._is_in_call = False
        self._broken: str | None = None
        self._process = os.getpid()
        self.sheet = Sheet(len(self.ranks))
        with torch.inference_mode(False):
            self.spare = torch.empty(SPARE_IDS, dtype=torch.int64, device="cpu")  # takes no room until it is written

    @contextmanager
    def task(self, kind: Kind, about: int = ANYTHING, *, may_retry: bool = False) -> Iterator[Task]:
        """Surround work that all ranks do together; an exception inside becomes a PeerError of the others.

        A task inside of one that is under way is a part of it.

        Args:
            kind: of the work; the same on all ranks.
            about: the number of what is worked on; the same on all ranks.
            may_retry: whether running out of memory on one rank is a PeerOutOfMemory of the others, not the end.

        Raises:
            ThreadError: another thread is in a task. Nothing was sent.
            RanksError: this process was forked from one of the ranks, whose connections are not its own.
        """
        if os.getpid() != self._process and len(self.ranks) > 1:
            raise RanksError(
                f"{self.place(kind, about)} was begun in a process that was forked from rank {self.ranks[self.rank]}, "
                "such as a worker of a DataLoader; only the ranks themselves meet: let workers return ids, and look up "
                "in the training loop"
            )
        outer = self._task
        if outer is not None and not outer.is_over:
            if outer.thread != threading.get_ident():
                raise ThreadError(
                    f"{self.place(kind, about)} was begun while another thread of this process is in {outer.place}: "
                    "which comes first may differ between ranks; look up, read and step in one thread"
                )
            with outer.inner(kind, about):
                yield outer
            return
        task = self._task = Task(self, kind, about, may_retry=may_retry)
        try:
            yield task
        except BaseException as error:
            task.give_up(error)
            raise
        finally:
            if self._task is task:
                self._task = None

    def notes(self, kind: Kind, note: int, about: int = ANYTHING) -> list[int]:
        """Return the note of every rank, in a task of one round; arguments are those of :meth:`task`."""
        with self.task(kind, about) as task:
            return task.round(note=note).notes

    def share(self, kind: Kind, data: Any) -> list[Any]:
        """Return the data of all ranks, as :meth:`Task.share` does, in a task for that alone."""
        with self.task(kind) as task:
            return task.share(data)

    def place(self, kind: int, about: int) -> str:
        """Return in words what a task does."""
        if kind == Kind.AT_OWN_PACE:
            return self.place(about >> 32, ANYTHING)
        name = getattr(self.tables.get(about), "name", None)
        return KINDS[kind].text + ("" if name is None else f" in table {name!r}")

    def begin_step(self, sign: object) -> None:
        """Note a sign that this rank begins a step. The same sign again, without a round between: it has left one.

        Every rank gives the same signs, or it has come past the others; their next round tells.

        Args:
            sign: of one kind.
        """
        if self._rounds_begun != self.rounds:
            self._rounds_begun = self.rounds
            self._begun.clear()
        most = max(self._begun.values(), default=1)
        self._begun[sign] += 1
        self.step += self._begun[sign] > most

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround a call that all ranks make, from its arguments' checks on: an error becomes the others' PeerError.

        What fails in a task is told by the task, and a call within another one, or within a task, is a part of it.
        """
        if self._is_in_call or self._task is not None:
            yield
            return
        failures = self.failures
        try:
            self._is_in_call = True
            yield
        except BaseException as error:
            is_ours = os.getpid() == self._process and self._task is None  # not a fork's, nor another thread's
            if is_ours and self.failures == failures:
                Task(self, Kind.CALL, ANYTHING).give_up(error)
            raise
        finally:
            self._is_in_call = False

    def exchange_lines(self, line: Line, counts: Sequence[int] | None = None, ids: Tensor | None = None) -> list[Line]:
        """Send a line to every rank, with a count for each; return each rank's line.

        Args:
            line: but for the count.
            counts: for the ranks.
            ids: that go along, so many for each rank as its count.
        """
        lines = [line] * len(self.ranks) if counts is None else [line._replace(amount=count) for count in counts]
        if self._broken is None and len(lines) == 1:
            self.rounds += 1
            return lines
        if (agreed := self.sheet.agreed) is not None:
            self.payload_bytes += (sum(agreed.sent) - agreed.sent[self.rank]) * agreed.row_bytes
        into, out, received, sent = self.sheet.fill(lines, ids)
        self.rounds += 1
        self._exchange(self._group, into, out, received, sent)
        return self.sheet.lines()

    def is_staged(self, rows: Tensor) -> bool:
        """Return whether rows go through host memory instead of from GPU to GPU."""
        return rows.is_cuda and self._payload is None

    def exchange_rows(self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send rows to each rank, and take those of each; both are bytes, shape (n, bytes of a row)."""
        self.payloads += 1
        self.payload_bytes += (len(rows) - sent[self.rank]) * rows.shape[1]
        self._exchange(self._payload if rows.is_cuda else self._group, into, rows, list(received), list(sent))

    def _exchange(
        self, group: dist.ProcessGroup | None, into: Tensor, out: Tensor, received: list[int], sent: list[int]
    ) -> None:
        if self._broken is not None or group is None:
            raise PeerError(self._broken)
        try:
            with deferred_interrupts():
                group.alltoall_base(into, out, received, sent).wait()
                # Not before: a rank that fails until here sends a line of the agreed size.
                self.sheet.came, self.sheet.agreed = self.sheet.agreed, None
        except (RuntimeError, ValueError) as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        task = self._task
        here = "" if task is None else f", while this one, rank {self.ranks[self.rank]}, was at {task.place}"
        remedy = "" if task is None else task.kind.remedy
        if "timed out" in str(error).lower():
            why = (
                f"another rank did not come within {self._timeout.total_seconds():g} seconds{here}: every rank of the "
                f"group has to look up, read and step equally often, in the same order. {remedy}A longer time limit is "
                "the timeout of init_process_group. The ranks cannot go on together: start them again"
            )
        else:
            why = (
                f"another rank cannot be reached any more{here}; its log says why. The ranks cannot go on together: "
                "start them again, from the last checkpoint"
            )
        self.shut(why)
        raise PeerError(why) from error

    def shut(self, why: str) -> None:
        """Let every later use of the lane raise, here at once, and on the other ranks when they come."""
        if self._broken is None:
            self._broken = why
            self._group = None  # closes the connections, which the other ranks notice
            self.failures += 1
            if self.pending is not None:
                self.pending.drop()

    def close(self) -> None:
        """Close the connections before the process ends: Gloo's threads need Python to let go of what was sent.

        A lane on which another thread waits for other ranks is left alone: closing it would wait for them, too.
        """
        if self._task is None:
            self.shut("this process ends")


def connect(process_group: dist.ProcessGroup, name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return gloo connections between processes, each of which has to ask for them.

    A group of torch's would not do: ``dist.new_group`` hangs unless the whole job calls it, or the ranks belong to
    equally many groups.

    Args:
        process_group: whose store the processes find each other through.
        name: of the connections; the same ranks may ask for some of one name again.
        ranks: the processes, as torch.distributed numbers them.
        timeout: of a collective.
    """
    # A store may outlive its group, and then has the addresses of one before it that had the same name.
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    store = distributed_c10d._world.pg_map[process_group][1]
    store = distributed_c10d.PrefixStore(f"speedswap/{name}/{members}", store)
    number = store.add(f"made by {dist.get_rank()}", 1)
    store = distributed_c10d.PrefixStore(str(number), store)
    gloo = distributed_c10d.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    return cast(dist.ProcessGroup, gloo)
