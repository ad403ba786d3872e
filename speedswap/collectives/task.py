"""Tasks: work that ranks do together, in rounds that report each rank's position and failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from speedswap.collectives.levels import Levels
from speedswap.collectives.messages import (
    ANYTHING,
    ANYWHERE,
    CALLS,
    FAILED,
    IN_ANY_BATCH,
    KINDS,
    NO_COUNT,
    NUMBERED,
    OK,
    TORN,
    Connections,
    Kind,
    Line,
    Parcel,
    Round,
    Sheet,
    as_bytes,
    digest_of,
    packed,
    purpose_of,
    unpacked,
)
from speedswap.errors import PeerError
from speedswap.kernels import deferred_interrupts

R = TypeVar("R")
_WORD_BYTES = 8
_DROPS, _MEMORY = 1, 2  # a failed rank's note: it lost its part of the step; it is out of memory
_LOOKUPS = {Kind.LOOK_UP, Kind.GATHER}


class PeerOutOfMemory(MemoryError):
    """Another rank has run out of memory, so this one has abandoned its attempt too."""


class Pending(Protocol):
    """Work that every rank has begun and all must finish together: gradients to be exchanged.

    Attributes:
        kind: the kind of task that finishes it.
    """

    kind: Kind

    def __len__(self) -> int:
        """Return the amount of pending work on this rank."""

    def settle(self) -> None:
        """Finish the pending work, if any; every rank must call this."""

    def finish(self, task: Task) -> None:
        """Finish the work with the other ranks, after the task's first round."""

    def drop(self) -> None:
        """Drop the training step so far, as other ranks have done."""

    def add_up_shares(self, *, average: bool) -> None:
        """Finish the work left by the passes of a split batch; every rank must call this.

        Args:
            average: True to average over the ranks' losses; otherwise their gradients are summed.
        """


class Rounds(Connections, Protocol):
    """The part of a lane that a task needs; see :class:`speedswap.collectives.Lane`."""

    pending: Pending | None
    failures: int
    rounds: int
    changes: int
    met: int
    has_failed: bool
    tables: Mapping[int, Any]
    levels: Levels | None
    sheet: Sheet
    spare: Tensor

    @property
    def ordinal(self) -> int:
        """The number of this rank's current batch."""

    def place(self, kind: int, about: int) -> str:
        """Describe a task in words."""

    def exchange_lines(self, line: Line, counts: Sequence[int] | None = None, ids: Tensor | None = None) -> list[Line]:
        """Send a line to every rank; return each rank's line."""

    def shut(self, why: str) -> None:
        """Make every later round raise, on every rank."""

    def complete_step(self) -> None:
        """Count a step that all ranks have completed."""


class Task:
    """Work that all ranks do together, in stages; each stage begins with a round.

    Attributes:
        kind: the kind of work.
        thread: the thread that does the work in this process.
        is_over: True once failures no longer concern the other ranks.
        calls: True if it is a lookup that the other ranks may not come to: they serve it where they meet next.
    """

    def __init__(self, lane: Rounds, kind: Kind, about: int, stage: int = 0, *, may_retry: bool = False) -> None:
        self.lane = lane
        self.thread = threading.get_ident()
        self.is_over = False
        self.calls = False
        self.kind, self._about, self._stage = kind, about, stage
        self._may_retry = may_retry
        self._part = 0  # the innermost nested task
        self._join: Callable[[], None] | None = None  # what the last round requires before the next

    @property
    def purpose(self) -> Kind:
        """The task's purpose; see :func:`purpose_of`."""
        return purpose_of(self.kind, self._about)

    @property
    def place(self) -> str:
        """This rank's position in the program, in words."""
        return self._place_of(self._line(self._stage, OK, 0))

    def _place_of(self, line: Line) -> str:
        """Describe a rank's position in the program."""
        which = f"step {line.step}" if line.step < NUMBERED else f"batch {line.step - NUMBERED}"
        return f"{self.lane.place(line.kind, line.about)} of {which}"

    def round(self, counts: Sequence[int] | None = None, *, note: int = 0, ids: Tensor | None = None) -> Round:
        """Tell the other ranks that this rank has reached this point, and wait for them.

        Args:
            counts: a number for each rank.
            note: a number for all.
            ids: ids to send along, as for :meth:`Lane.exchange_lines`.

        Raises:
            PeerError: a rank has failed, is at another point of the program, or is unreachable.
        """
        while True:
            with deferred_interrupts():  # otherwise Ctrl-C could hide what the others were told
                lines = self._meet(counts, note, ids)
            if lines is not None:
                # If a rank joins from another task, its note refers to that task.
                return Round([line.amount for line in lines], [line.note * (line.kind == self.kind) for line in lines])
            if (join := self._join) is not None:
                join()

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to the ranks, and return those sent here.

        Args:
            rows: shape (n, …) of any dtype, in the order of the destination ranks.
            sent: how many go to each rank.
            received: how many come from each rank.

        Returns:
            Rows of the same row shape and dtype, on the same device, in the order of the source ranks.
        """
        return self._posted(self.prepared(rows, sent, received))

    def _posted(self, post: Callable[[], R]) -> R:
        """Send what was prepared, once every rank has reported that it has the memory for it."""
        if len(self.lane.ranks) == 1:
            return post()
        with self.promised():
            self.round()
            return post()

    def send_parcels(self, parcels: Sequence[Parcel]) -> list[Tensor]:
        """Send parcels merged by kind of device, as :meth:`send` does; return the received rows of each."""
        came: dict[int, Tensor] = {}
        for kind in sorted({parcel.rows.device.type for parcel in parcels}):
            places = [place for place, parcel in enumerate(parcels) if parcel.rows.device.type == kind]
            post = self.prepared_parcels([parcels[place] for place in places])
            came |= zip(places, self._posted(post), strict=True)
        return [came[place] for place in range(len(parcels))]

    def share_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return all ranks' numbers in rank order, on every rank; all must call this together.

        A few numbers take one round; more numbers take two more rounds.

        Args:
            numbers: this rank's numbers, 8 bytes each, shape (n,).
        """
        sent = numbers.view(torch.int64).repeat(len(self.lane.ranks))
        counts = self.round([len(numbers)] * len(self.lane.ranks), ids=sent).counts
        return [each.view(numbers.dtype) for each in self.numbers_that_came(sent, counts)]

    def numbers_that_came(self, sent: Tensor, counts: list[int]) -> Sequence[Tensor]:
        """Return each rank's numbers after a round in which every rank sent their count to all.

        Args:
            sent: this rank's numbers, int64.
            counts: the number of numbers from each rank.
        """
        size, sheet = len(self.lane.ranks), self.lane.sheet
        if size > 1 and max(counts) <= sheet.room:
            return torch.split(sheet.ids_that_came(counts), counts)
        return torch.split(self.send(sent, [len(sent) // size] * size, counts), counts)

    def share(self, data: Any) -> list[Any]:
        """Return the data of all ranks, as JSON, like :meth:`share_numbers`."""
        content = json.dumps(data).encode()
        words = content.ljust(-(-len(content) // _WORD_BYTES) * _WORD_BYTES)
        found = self.share_numbers(torch.frombuffer(bytearray(words), dtype=torch.int64))
        return [json.loads(each.numpy().tobytes()) for each in found]

    def difference_of(self, settings: Mapping[str, Mapping[str, str]], begin: str = "") -> tuple[str, str] | None:
        """Compare the ranks' settings, in one round, or in more if they differ.

        Args:
            settings: for each object, its settings as text, by name.
            begin: text to put before the settings of either rank.

        Returns:
            The first object whose settings differ, and a description of its settings on the first rank and on another;
            None if all ranks have the same. If the setting "optimizer" (its class) differs, the others are left out.
        """
        if len({*self.round(note=digest_of(settings)).notes}) == 1:
            return None
        first, *others = self.share(settings)
        place, other = next((place, each) for place, each in enumerate(others, 1) if each != first)
        name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
        both = first.get(name, {}), other.get(name, {})
        names = [each for each in {**both[0], **both[1]} if both[0].get(each) != both[1].get(each)]
        names = ["optimizer"] if "optimizer" in names else names
        sides = (", ".join(f"{each} {side.get(each, 'none')}" for each in names) for side in both)
        ranks = self.lane.ranks[0], self.lane.ranks[place]
        return name, ", but ".join(f"{begin}{side} on rank {rank}" for side, rank in zip(sides, ranks, strict=True))

    @contextmanager
    def promised(self) -> Iterator[None]:
        """Surround a round and the rows that every rank sends after it; a failure in between shuts the lane."""
        rounds = self.lane.rounds
        with deferred_interrupts():
            try:
                yield
            except BaseException as error:
                if not self.is_over and self.lane.rounds > rounds:  # the others would read a line as rows
                    self.is_over = True
                    self.lane.shut(f"rows could not be sent to other ranks ({error!r}); start the ranks again")
                raise

    def prepared(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], into: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Return a function that sends rows as :meth:`send` does and does not fail, once all ranks are ready.

        All ranks must call that function together, inside :meth:`promised`.

        Args:
            rows, sent, received: as for :meth:`send`.
            into: contiguous memory for the received rows; allocated by default.
        """
        given, lane = rows.detach().contiguous(), self.lane
        if len(lane.ranks) == 1:
            return lambda: given
        found = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
        source, target = as_bytes(given), as_bytes(found)
        staged = target
        if lane.is_staged(rows):
            source, staged = (torch.empty_like(each, device="cpu", pin_memory=True) for each in (source, target))
            source.copy_(as_bytes(given))

        def post() -> Tensor:
            lane.exchange_rows(staged, source, received, sent)
            if staged is not target:
                target.copy_(staged, non_blocking=True)
            return found

        return post

    def prepared_parcels(self, parcels: Sequence[Parcel]) -> Callable[[], list[Tensor]]:
        """Return a function that sends parcels on one type of device in one message; see :meth:`prepared`."""
        if self.lane.levels is not None and parcels[0].way is not None:
            return self.lane.levels.prepared(parcels)
        post = self.prepared(*packed(parcels)[:3])
        return lambda: unpacked(post(), parcels)

    @contextmanager
    def inner(self, kind: Kind, about: int) -> Iterator[None]:
        """Surround a part of the task; lines report it, so ranks notice if an interrupt left it open on one of them.

        Args:
            kind, about: as for :meth:`Lane.task`.
        """
        before, self._part = self._part, kind << 32 | about + 1
        try:
            yield
        finally:
            self._part = before

    def finish(self) -> None:
        """Mark this rank's share as done: later failures do not concern the others. Not for nested parts."""
        self.is_over = self.is_over or not self._part

    def give_up(self, error: BaseException | None = None, *, drops: bool = False) -> None:
        """Make the other ranks raise in their next round.

        Args:
            error: the error that this rank raises.
            drops: True if this rank has lost its part of the training step, so the others must drop theirs.
        """
        if not self.is_over:
            self.is_over = True
            with suppress(PeerError):  # this rank's own error is more specific
                note = _DROPS * drops | _MEMORY * isinstance(error, (MemoryError, torch.OutOfMemoryError))
                self._failure(self.lane.exchange_lines(self._line(ANYWHERE, FAILED, note)))

    def tear(self, why: str) -> None:
        """Make the lane unusable on every rank, since their tables are at different steps."""
        self.is_over = True
        with suppress(PeerError):
            self.lane.exchange_lines(self._line(ANYWHERE, TORN, 0))
        self.lane.shut(why)

    def _line(self, stage: int, status: int, note: int) -> Line:
        pending = 0 if self.lane.pending is None else len(self.lane.pending)
        return Line(self.kind, self._about, self._part, stage, status, self.lane.ordinal, NO_COUNT, note, pending)

    def _meet(self, counts: Sequence[int] | None, note: int, ids: Tensor | None = None) -> list[Line] | None:
        """Run one round; return its lines, or None if :attr:`_join` and another round must follow."""
        status = CALLS if self.calls and self._stage == 0 else OK
        try:
            lines = self.lane.exchange_lines(self._line(self._stage, status, note), counts, ids)
        except PeerError:
            self.is_over = True
            raise
        steps = [line.step for line in lines]
        if self.kind == Kind.MEET or (len({*steps}) == 1 and any(line.kind == Kind.MEET for line in lines)):
            self.lane.changes += 1
            return lines if self.kind == Kind.MEET and min(steps) == self.lane.ordinal else None
        if len({*steps}) > 1:
            if self.kind in IN_ANY_BATCH and len({line[:5] for line in lines}) == 1:
                lines = [line._replace(step=self.lane.ordinal) for line in lines]
            elif self._waits(lines):
                self.lane.changes += 1
                return None
        call = self._call_among(lines)
        self.lane.changes += call is None and not {line.kind for line in lines} <= _LOOKUPS
        if call is not None:
            if lines[self.lane.rank][:6] == call[:6]:
                self._join, self._stage = None, 1  # the others come to that round next
            else:
                self._join = partial(self._serve, call)
            return None
        if (ahead := self._ahead(lines)) is not None:
            if self.kind != ahead:
                self._join = self._finish_pending
                return None
        elif len({line[:6] for line in lines}) > 1 or lines[0].status not in (OK, CALLS):
            self.is_over = True
            raise self._failure(lines)
        self._stage += 1
        self.lane.met += self.kind == Kind.BEGIN or self.kind not in IN_ANY_BATCH
        return lines

    def _waits(self, lines: Sequence[Line]) -> bool:
        """Return whether this rank waits for others that skipped fewer batches: they raise until they come here."""
        first = max(line.step for line in lines)
        mine = lines[self.lane.rank]
        is_free = (mine.step, mine.stage, mine.pending) == (first, 0, 0)
        return is_free and all(line.status in (OK, CALLS, FAILED if line.step < first else OK) for line in lines)

    def _ahead(self, lines: Sequence[Line]) -> int | None:
        """Return the kind of task that finishes pending work, if some ranks begin it and the others can join them."""
        if self.lane.pending is None or len({line.step for line in lines}) > 1:
            return None
        kind = self.lane.pending.kind
        begun = [line.kind == kind for line in lines]
        can_join = all((line.stage, line.status) == (0, OK) and line.pending > 0 for line in lines)
        can_join = can_join and not any(line.part for line in lines if line.kind == kind)
        return kind if can_join and any(begun) and not all(begun) else None

    def _call_among(self, lines: Sequence[Line]) -> Line | None:
        """Return the line of a lookup that some ranks call for, if the other ranks can join it."""
        can_come = all(line.stage == 0 and line.status in (OK, CALLS) and line.step == lines[0].step for line in lines)
        calls = [line for line in lines if line.status == CALLS]
        return min(calls) if calls and can_come and len({line[:6] for line in lines}) > 1 else None

    def _serve(self, call: Line) -> None:
        """Take part in a lookup that another rank calls for."""
        joined = Task(self.lane, KINDS[call.kind], call.about, 1)
        joined._part = call.part
        try:
            self.lane.tables[call.about].serve_call(joined)
        except BaseException as error:
            self.is_over = True
            joined.give_up(error)
            raise

    def _finish_pending(self) -> None:
        """Finish pending work with the other ranks."""
        assert self.lane.pending is not None
        joined = Task(self.lane, self.lane.pending.kind, ANYTHING, 1)
        try:
            self.lane.pending.finish(joined)
        except BaseException as error:
            self.is_over = True
            joined.give_up(error)
            self.lane.pending.drop()
            raise

    def _failure(self, lines: Sequence[Line]) -> PeerError | PeerOutOfMemory:
        """Record that the task has failed on all ranks; return this rank's error."""
        lane = self.lane
        status = dict(zip(lane.ranks, (line.status for line in lines), strict=True))
        torn = [rank for rank in lane.ranks if status[rank] == TORN]
        failed = [rank for rank in lane.ranks if status[rank] == FAILED]
        # A call that failed before its task began counts as at the same point as the others.
        are_apart = len({(line.step, *line[:2]) for line in lines if line.kind != Kind.CALL}) > 1
        are_apart = are_apart or len({line[2:4] for line in lines if line.status == OK}) > 1
        if torn:
            why = (
                f"rank {torn[0]} could not write its part of a step that the other ranks have written; its own error "
                "says why. The ranks cannot continue: start them again, from the last checkpoint"
            )
            lane.shut(why)
            return PeerError(why)
        if self._may_retry and not are_apart and all(line.note & _MEMORY for line in lines if line.status):
            return PeerOutOfMemory(f"rank {failed[0]} has run out of memory")
        lane.failures, lane.changes = lane.failures + 1, lane.changes + 1
        lane.has_failed, mine = True, lines[lane.rank]
        if lane.pending is not None and (are_apart or any(line.note & _DROPS for line in lines if line.status)):
            lane.pending.drop()
        apart = (place for place, line in enumerate(lines) if line[:6] != mine[:6])
        other = lane.ranks.index(failed[0]) if failed else next(apart)
        here, there = (self._place_of(line) for line in (mine, lines[other]))
        if here == there and not failed:  # e.g. after an interrupt
            here, there = (f"{here}, part {line.part:x} and stage {line.stage}" for line in (mine, lines[other]))
        may_go_on = "After zero_grad, all ranks can continue with the next batch"
        may_go_on = f"No table has changed: a{may_go_on[1:]}" if lane.tables else may_go_on
        if failed:
            where = here if lines[other].kind == Kind.CALL or there == here else f"{there}, while this one is at {here}"
            return PeerError(
                f"rank {failed[0]} failed in the same step, at {where}; its own error says why. {may_go_on}"
            )
        return PeerError(
            f"rank {lane.ranks[other]} is at {there}, but rank {lane.ranks[lane.rank]} at {here}: every rank of the "
            "group has to make the same lookups, reads and steps, in the same order; a rank that catches an exception "
            f"misses its batch. {purpose_of(*lines[other][:2]).remedy or self.purpose.remedy}{may_go_on}"
        )
