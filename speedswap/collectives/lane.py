"""Lanes: ordered rounds between the ranks of a group, and their connections."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from speedswap.collectives.levels import Levels
from speedswap.collectives.messages import ANYTHING, IN_A_STEP, NO_COUNT, NUMBERED, Kind, Line, Sheet, purpose_of
from speedswap.collectives.task import Pending, Task
from speedswap.errors import PeerError, RanksError, ThreadError
from speedswap.kernels import deferred_interrupts

SPARE_IDS = 1 << 20
_LEANS = 2  # after this many rounds without counts, the next round of the same kind is expected to have none
_NUMBER_BYTES = 8  # wider rows go to their ranks directly, unless they are merged
_ROOM_ON_HOSTS = 32  # numbers per line; merged ids are not sent with a round


class Lane:
    """An ordered sequence of rounds between some ranks, all of which take part in each.

    A lane has separate connections: its rounds neither interfere with the model's collectives nor wait for a GPU. All
    ranks know the size of the next round, whatever its purpose. So a rank that has failed or is at another point of the
    program still meets the others in their next round, where all ranks raise. No rank keeps waiting for a failed one.

    Args:
        process_group: the processes; each of them must create the lane. None for this process alone.
        name: the lane's name, unique within the group.
        timeout: the timeout of a round, after which the lane is unusable.
        payload: the process group that transfers rows between GPUs; by default they go through host memory.
        ranks: the members of the lane, as torch.distributed numbers them; by default all processes.

    Attributes:
        pending: work that all ranks must finish; a rank that starts another task first joins the ranks that finish this
            work.
        failures: number of tasks that failed on all ranks, or on this rank after informing the others.
        rounds: number of rounds so far, equal on all ranks at the same point of the program.
        changes: number of failures, and of rounds that may have changed rows, i.e. were not lookups.
        step: number of completed training steps, which all ranks complete together.
        met: number of rounds in which all ranks are in the same batch; equal on all ranks when they begin that batch.
        has_failed: True if a task has failed since this rank began its current batch.
        tables: the objects of tasks by number; each has a name for messages.
        payloads, payload_bytes: number of payloads so far, and bytes this rank has sent to others in them.
        levels: the ranks' hosts, if there are several and some host has several ranks.
        sheet: the rounds' memory.
        spare: memory on every rank for :data:`SPARE_IDS` ids.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        name: str,
        timeout: timedelta = timedelta(0),
        payload: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.ranks, self.rank = [0], 0
        self._group: dist.ProcessGroup | None = None
        if process_group is not None:
            self.ranks = dist.get_process_group_ranks(process_group) if ranks is None else [*ranks]
            self.rank = self.ranks.index(dist.get_rank())
            self._group = connect(process_group, name, self.ranks, timeout)
        self.pending: Pending | None = None
        self.failures = 0
        self.rounds = 0
        self.changes = 0
        self.step = 0
        self.met = 0
        self.has_failed = False
        self.tables: Mapping[int, Any] = {}
        self.levels: Levels | None = None
        self._batch: int | None = None  # the program's number, until the batch's step is completed
        self._left = 0  # batches begun and skipped since then
        self._signs: Counter[object] = Counter()  # signs that a batch begins, since the last round
        self._rounds_signed = -1
        self._signs_of_batch: set[object] = set()
        self.payloads = 0
        self.payload_bytes = 0
        self._timeout = timeout
        self._name = name
        self._payload = payload
        self._task: Task | None = None
        self._is_in_call = False
        self._broken: str | None = None
        self._process = os.getpid()
        self._leans: Counter[object] = Counter()  # consecutive rounds without counts, by what preceded them
        self._last: object = None  # the lines of the last round and the current one
        self._next: object = None
        self.sheet = Sheet(len(self.ranks))
        with torch.inference_mode(False):
            self.spare = torch.empty(SPARE_IDS, dtype=torch.int64, device="cpu")  # takes no memory until it is written

    @contextmanager
    def task(self, kind: Kind, about: int = ANYTHING, *, may_retry: bool = False) -> Iterator[Task]:
        """Surround work that all ranks do together; an exception inside becomes a PeerError on the others.

        A nested task is a part of the outer one.

        Args:
            kind: the kind of work, the same on all ranks.
            about: the number of its object, the same on all ranks.
            may_retry: True if running out of memory on one rank raises PeerOutOfMemory on the others and can be
                retried.

        Raises:
            ThreadError: another thread is in a task. Nothing was sent.
            RanksError: this process was forked from a rank and does not own its connections.
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
        if kind not in IN_A_STEP:
            self._begin_signed()
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
        """Exchange notes in a task of one round; return every rank's note. For other arguments see :meth:`task`."""
        with self.task(kind, about) as task:
            return task.round(note=note).notes

    def share(self, kind: Kind, data: Any) -> list[Any]:
        """Return the data of all ranks, as :meth:`Task.share` does, in a separate task."""
        with self.task(kind) as task:
            return task.share(data)

    def place(self, kind: int, about: int) -> str:
        """Describe a task in words."""
        name = getattr(self.tables.get(about), "name", None)
        return purpose_of(kind, about).text + ("" if name is None else f" in table {name!r}")

    @property
    def ordinal(self) -> int:
        """The number of this rank's current batch, which shows when ranks are in different batches.

        Batches that the program numbers come after those it does not.
        """
        return self.step + self._left if self._batch is None else NUMBERED + self._batch

    def begin_batch(self, number: int | None) -> None:
        """Begin a numbered batch; all ranks give the same number, and None after the last batch."""
        self._batch, self.has_failed = number, False
        self._signs.clear()
        self._signs_of_batch = set()

    def sign_batch(self, sign: object) -> None:
        """Record a sign that this rank may be about to begin a batch, such as ``zero_grad``.

        The same sign twice, without a round in between, means that this rank skipped a batch before its first lookup.
        """
        if self._rounds_signed != self.rounds:
            self._rounds_signed = self.rounds
            self._signs.clear()
        most = max(self._signs.values(), default=1)
        self._signs[sign] += 1
        self._left += self._signs[sign] > most and not self._signs_of_batch and not self.has_failed

    def _begin_signed(self) -> None:
        """Count a skipped batch if a new one begins: after a failure, or if this sign repeats."""
        signs = {*self._signs} if self._rounds_signed == self.rounds else set()
        if self.has_failed or not signs.isdisjoint(self._signs_of_batch):
            self._left += 1
            self._signs_of_batch, self.has_failed = set(), False
        self._signs_of_batch |= signs

    def complete_step(self) -> None:
        """Count a step that all ranks have completed."""
        self.step, self._left, self._batch, self._signs_of_batch = self.step + 1, 0, None, set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround a call that all ranks make, argument checks included: an error becomes a PeerError on the others.

        A task reports its own failures. A nested call is part of the outer call or task.
        """
        if self._is_in_call or self._task is not None:
            yield
            return
        failures = self.failures
        try:
            self._is_in_call = True
            yield
        except BaseException as error:
            is_ours = os.getpid() == self._process and self._task is None  # False in a fork, and in another thread
            if is_ours and self.failures == failures:
                self._begin_signed()  # as on the other ranks, whose calls have begun a task
                Task(self, Kind.CALL, ANYTHING).give_up(error)
            raise
        finally:
            self._is_in_call = False

    def exchange_lines(self, line: Line, counts: Sequence[int] | None = None, ids: Tensor | None = None) -> list[Line]:
        """Send a line to every rank, with a count for each; return each rank's line.

        Args:
            line: the line, without counts.
            counts: a count for each rank.
            ids: ids to send along, ``counts[rank]`` for each rank.
        """
        lines = [line] * len(self.ranks) if counts is None else [line._replace(amount=count) for count in counts]
        if self._broken is None and len(lines) == 1:
            self.rounds += 1
            return lines
        if (agreed := self.sheet.agreed) is not None:
            self.payload_bytes += (sum(agreed.sent) - agreed.sent[self.rank]) * agreed.row_bytes
        before = self._last
        is_lean = self._leans[before] >= _LEANS and self.levels is None and agreed is None
        memory = self.sheet.fill(lines, ids)
        self._next = line[:4]
        self.rounds += 1
        with self._unless_lean() if is_lean else nullcontext():
            found = self._gather(line._replace(amount=NO_COUNT if counts is None else 0)) if is_lean else None
            if found is None or any(each.amount != NO_COUNT for each in found):
                self._exchange(self._group, *memory)
                found = self.sheet.lines()
        self._leans[before] = 0 if any(each.amount != NO_COUNT for each in found) else self._leans[before] + 1
        if len({each[:4] for each in found}) > 1:
            self._leans.clear()
            self._last = None
        return found

    @contextmanager
    def _unless_lean(self) -> Iterator[None]:
        """Surround a round that may take two exchanges; a failure between them makes the lane unusable."""
        with deferred_interrupts():
            try:
                yield
            except BaseException as error:
                self.shut(f"a round was left unfinished ({error!r}); start the ranks again")
                raise

    def _gather(self, line: Line) -> list[Line]:
        """Send a line to every rank in log2(number of ranks) messages, rounded up.

        Each message passes on the lines received so far (Bruck et al. 1997, section 3).
        """
        size = len(self.ranks)
        lines = torch.tensor([line] * size, device="cpu")  # this rank's line, then those of the following ranks
        with self.connected() as group:
            held = 1
            while held < size:
                some = min(held, size - held)
                came = group.recv([lines[held : held + some]], (self.rank + held) % size, 0)
                group.send([lines[:some]], (self.rank - held) % size, 0).wait()
                came.wait()
                held += some
        self._last = self._next
        return [Line(*lines[(rank - self.rank) % size].tolist()) for rank in range(size)]

    def set_hosts(
        self, hosts: Sequence[Sequence[int]], process_group: dist.ProcessGroup, *, spreads: bool = False
    ) -> None:
        """Exchange in two levels from now on, if there are several hosts and one has several ranks; on every rank.

        Args:
            hosts: each host's ranks, as indices among the lane's, in the order of their first ranks.
            process_group: as for the lane.
            spreads: True if each rank has a network card, so all ranks carry rows between a few hosts.
        """
        if 1 < len(hosts) < len(self.ranks):
            mine = next(ranks for ranks in hosts if self.rank in ranks)
            members = [self.ranks[rank] for rank in mine]
            self.sheet = Sheet(len(self.ranks), _ROOM_ON_HOSTS)
            local = connect(process_group, f"{self._name} host", members, self._timeout)
            fewest = min(map(len, hosts))
            self.levels = Levels(self, hosts, local, fewest if spreads and len(hosts) <= fewest else 1)

    def is_staged(self, rows: Tensor) -> bool:
        """Return whether rows go through host memory instead of directly between GPUs."""
        return rows.is_cuda and self._payload is None

    def exchange_rows(self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send rows to each rank and receive rows from each; both are bytes, shape (n, row_bytes)."""
        self.payloads += 1
        self.payload_bytes += (len(rows) - sent[self.rank]) * rows.shape[1]
        self._exchange(self._payload if rows.is_cuda else self._group, into, rows, list(received), list(sent))

    def _exchange(
        self, group: dist.ProcessGroup | None, into: Tensor, out: Tensor, received: list[int], sent: list[int]
    ) -> None:
        with deferred_interrupts():
            levels = self.levels if group is self._group else None
            if levels is not None and (not received or out.shape[1] <= _NUMBER_BYTES):
                levels.exchange(into, out, received, sent)
                self._go_on()
            else:
                with self.connected():
                    assert group is not None
                    group.alltoall_base(into, out, received, sent).wait()
                    self._go_on()

    def _go_on(self) -> None:
        """Record an exchange right after it: a rank that fails before it still sends what the others expect."""
        self.sheet.came, self.sheet.agreed, self._last = self.sheet.agreed, None, self._next

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Provide the connections; any error in them means that another rank is unreachable."""
        if self._broken is not None:
            raise PeerError(self._broken)
        try:
            with deferred_interrupts():
                yield self._group
        except (RuntimeError, ValueError) as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        task = self._task
        here = "" if task is None else f", while this one, rank {self.ranks[self.rank]}, was at {task.place}"
        remedy = "" if task is None else task.purpose.remedy
        if "timed out" in str(error).lower():
            why = (
                f"another rank did not come within {self._timeout.total_seconds():g} seconds{here}: every rank of the "
                "group has to make the same lookups, reads and steps, in the same order. "
                f"{remedy}For a longer time limit, set the timeout of init_process_group. "
                "The ranks cannot continue: start them again"
            )
        else:
            why = (
                f"another rank cannot be reached any more{here}; its log says why. The ranks cannot continue: start "
                "them again, from the last checkpoint"
            )
        self.shut(why)
        raise PeerError(why) from error

    def shut(self, why: str) -> None:
        """Make every later use of the lane raise: here at once, and on the other ranks when they next use it."""
        if self._broken is None:
            self._broken = why
            self._group = self.levels = None  # closes the connections; the other ranks notice
            self.failures += 1
            if self.pending is not None:
                self.pending.drop()

    def close(self) -> None:
        """Close the connections before the process exits: Gloo's threads need Python to release sent memory.

        A lane on which another thread waits for other ranks is left open: closing it would also wait for them.
        """
        if self._task is None:
            self.shut("this process ends")


def connect(process_group: dist.ProcessGroup, name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return gloo connections between processes; each of them must call this.

    A torch process group does not work here: ``dist.new_group`` hangs unless the whole job calls it, or the ranks are
    in equally many groups.

    Args:
        process_group: the processes find each other through this group's store.
        name: the connections' name; the same ranks may reuse it.
        ranks: the processes, as torch.distributed numbers them.
        timeout: the timeout of a collective.
    """
    # A store may outlive its group and still hold the addresses of an earlier group with the same name.
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    store = distributed_c10d._world.pg_map[process_group][1]
    store = distributed_c10d.PrefixStore(f"speedswap/{name}/{members}", store)
    number = store.add(f"made by {dist.get_rank()}", 1)
    store = distributed_c10d.PrefixStore(str(number), store)
    gloo = distributed_c10d.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    return cast(dist.ProcessGroup, gloo)
