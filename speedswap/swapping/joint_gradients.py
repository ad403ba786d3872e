"""Gradients of rows that other ranks own, on their way to the owners: of all tables at once, on all ranks at once.

The ranks exchange them when the first of these is looked at. A rank that is elsewhere by then, as it begins another
lookup, joins the exchange first: the round in which the ranks meet shows that it has lookups without a gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speedswap.collectives import ANYTHING, Kind, RankGroup, Task, packed, unpacked
from speedswap.errors import RanksError

if TYPE_CHECKING:
    from speedswap.swapping.sharded_step import ShardedStep

__all__ = ["COMPLETE", "HAS_GRADIENT", "HAS_ROWS", "KEEPS", "ONE_LOOKUP", "JointGradients"]

# A rank's gradients of a table: there are some; all lookups have one, or are none; there is one lookup alone; of rows;
# they are added to an earlier exchange's.
FLAGS = 5
HAS_GRADIENT, COMPLETE, ONE_LOOKUP, HAS_ROWS, KEEPS = (1 << flag for flag in range(FLAGS))
_DIGEST = (1 << 60) - 1


class JointGradients:
    """The gradients of a group's tables.

    Args:
        group: the ranks.
    """

    kind = Kind.GRADIENTS

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._numbers = itertools.count()
        self._steps: weakref.WeakValueDictionary[int, ShardedStep] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, group: RankGroup) -> JointGradients:
        """Return those of a group, the same each time."""
        if not isinstance(group.main.pending, JointGradients):
            group.main.pending = cls(group)
        return group.main.pending

    def add(self, step: ShardedStep) -> int:
        """Return the number of another table's training step, which it has on all ranks."""
        number = next(self._numbers)
        self._steps[number] = step
        return number

    def steps(self) -> list[ShardedStep]:
        """Return the training steps of the tables that are alive, in the order in which they were made."""
        return [step for _, step in sorted(self._steps.items())]

    def __len__(self) -> int:
        return sum(step.is_unsettled for step in self.steps())

    @contextmanager
    def task(self) -> Iterator[Task]:
        """Surround a part of a backward pass, whose failure ends it on all ranks."""
        with (
            self._dropped_on_error(),
            self._group.main.task(Kind.GRADIENTS, ANYTHING, "the exchange of gradients") as task,
        ):
            try:
                yield task
            except BaseException as error:
                task.give_up(error, drops=True)
                raise

    def settle(self) -> None:
        """Exchange the gradients of lookups since the last exchange, if there were any; every rank calls this."""
        if len(self):
            self.exchange()

    def exchange(self) -> None:
        """Send the gradients of all tables with lookups to the rows' owners; every rank calls this."""
        with self.task() as task:
            if not self._exchange_at_once(task):
                self.finish(task)
            task.finish()

    def _exchange_at_once(self, task: Task) -> bool:
        """Send the gradients of all tables in one message if each has one, of one lookup, on every rank.

        The first round of the exchange tells, and returns False on all ranks if not.
        """
        waiting = [step for step in self.steps() if step.is_unsettled]
        parcels = [parcel for step in waiting if (parcel := step.parcel()) is not None]
        letter, note = None, 0
        if len(parcels) == len(waiting) and len({parcel.rows.device for parcel in parcels}) == 1:
            letter = task.letter(*packed(parcels))
            which = (
                hash(tuple((step.number, step.keeps) for step in waiting)) & _DIGEST | 1
            )  # the same in every process
            note = which << 1 | all(step.standing & HAS_ROWS for step in waiting)
        with task.promised():
            notes = task.round(note=note).notes
            # Rows of each table on one rank are rows of each anywhere; else the tables have to be looked at.
            if letter is None or len({note >> 1 for note in notes}) > 1 or not any(note & 1 for note in notes):
                return False
            came = task.post(letter)
        for step, grads in zip(waiting, unpacked(came, parcels), strict=True):
            step.receive_grads(grads)
        return True

    def finish(self, task: Task, *, average: bool = True) -> None:
        with self._dropped_on_error():
            steps = {step.number: step for step in self.steps()}
            waiting = [number for number, step in steps.items() if step.is_unsettled]
            while True:
                # The first table that waits anywhere; it may be freed here, or its lookups have gradients nowhere.
                mine = (waiting[0] + 1, steps[waiting[0]].standing) if waiting else (0, COMPLETE)
                notes = task.round(note=mine[0] << FLAGS | mine[1]).notes
                first = min((note >> FLAGS for note in notes if note >> FLAGS), default=0)
                if not first:
                    return
                standings = [note & (1 << FLAGS) - 1 if note >> FLAGS == first else COMPLETE for note in notes]
                if any(standing & HAS_GRADIENT for standing in standings):
                    if first - 1 not in steps:
                        raise RanksError("other ranks train an embedding that is freed on this one; keep its module")
                    steps[first - 1].exchange(task, standings, average=average)
                waiting = [number for number in waiting if number >= first]

    def add_up_shares(self, *, average: bool) -> None:
        """Send the gradients of a batch that a splitter has gone through; every rank calls this.

        Args:
            average: divide the sum of the ranks' gradients, as after an ordinary pass.
        """
        with (
            self._dropped_on_error(),
            self._group.main.task(Kind.SHARES, ANYTHING, "the exchange of a split batch's gradients") as task,
        ):
            self.finish(task, average=average)
            task.finish()

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Drop the gradients of all tables, sent or not: other ranks have dropped theirs."""
        for step in self.steps():
            step.abandon()
