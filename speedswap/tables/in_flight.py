"""Rows on their way: gathered before they are asked for, and written after the step that changed them.

A gather that runs ahead may read rows that a write changes at the same time or later. So every write that may not have
been there when a gather began is handed over to it: the rows both have are copied from the written block to the
gathered one. What comes out is, bit for bit, what the table holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speedswap import kernels
from speedswap.tables.block import Block

__all__ = ["Ahead", "EngineGathering", "Found", "Gathering", "InFlight", "SideGathering", "Write"]

Found = tuple[Block, Tensor]
"""A batch's rows, and each id's place among them."""


class _Job(Protocol):
    def wait(self) -> None: ...
    def done(self) -> bool: ...


class Gathering(Protocol):
    """A gather that is under way.

    Attributes:
        awaited: once there is a result: the rows that were left to the write of the lookup before, if any were.
    """

    awaited: Tensor | None

    def result(self) -> Found | None:
        """Wait for it: the block and each id's place in it; None if an id is out of range."""


@dataclass(frozen=True)
class Write:
    """A step's rows on their way into the table.

    Attributes:
        rows: int64, ascending, shape (n,).
        values: the columns' blocks, which nobody changes until they have arrived.
        forms: how the table stores the columns, and so what it makes of the values; None for as they are.
        job: of the writing.
    """

    rows: Tensor
    values: Mapping[str, Tensor]
    forms: Mapping[str, kernels.Stored | None]
    job: _Job | None

    def done(self) -> bool:
        """Whether the rows are in the table."""
        return self.job is None or self.job.done()

    def has(self, columns: Iterable[str]) -> bool:
        """Whether these columns are all written: a block that has no others can take its rows from here alone."""
        return all(name in self.values for name in columns)

    def hand_over(self, block: Block) -> None:
        """Give a block the rows that it shares with these."""
        names = [name for name in block.columns if name in self.values]
        kernels.hand_over(
            self.rows.to(block.rows.device),
            [self.values[name] for name in names],
            block.rows,
            [block.columns[name] for name in names],
            [self.forms[name] for name in names],
        )


class Ahead:
    """A batch's rows, asked for before the steps in between are done.

    Args:
        gathering: what fetches them.
        version: the table's, when that began.
        writes: those that the gathering may have overtaken.
        flight: the table's.
    """

    def __init__(self, gathering: Gathering, version: int, writes: Iterable[Write], flight: InFlight) -> None:
        self.version = version
        self.taken = False
        self._taken: tuple[Tensor, list[str]] | None = None
        self.gathering = gathering
        self._writes = list(writes)
        self._flight = flight

    def follow(self, write: Write, version: int) -> None:
        """Take note of a write that brought the table to ``version``."""
        if self.version == version - 1:
            self.version = version
            self._writes.append(write)

    def take(self, version: int) -> Found | None:
        """The rows as the table of that version has them, and each id's place among them. Once only.

        Returns:
            None where the table itself has to be asked: something else than a step has changed it since, an id is out
            of range, or rows were left to a write that did not come.
        """
        self.taken = True
        if self.version != version:
            return None
        found = self.gathering.result()
        writes, self._writes = self._writes, []
        if found is None:
            return None
        if not self._all_came(found[0], writes):
            self._flight.steady = False
            return None
        for write in writes:
            write.hand_over(found[0])
        self._taken = found[0].rows, list(found[0].columns)
        return found

    def is_all_of(self, write: Write) -> bool:
        """Whether a step has written the very rows that were taken, in every column."""
        return self._taken is not None and self._taken[0] is write.rows and write.has(self._taken[1])

    def _all_came(self, block: Block, writes: Iterable[Write]) -> bool:
        awaited = self.gathering.awaited
        return awaited is None or any(write.rows is awaited and write.has(block.columns) for write in writes)


class InFlight:
    """What is on its way to and from one table.

    Attributes:
        steady: whether steps write the very rows that were looked up for them, as the last ones did.
    """

    def __init__(self) -> None:
        self.steady = False
        self._writes: list[Write] = []
        self._ahead: list[weakref.ref[Ahead]] = []

    def unwritten(self) -> list[Write]:
        """The writes that may not have arrived yet."""
        self._writes = [write for write in self._writes if not write.done()]
        return self._writes

    def wrote(self, write: Write, version: int) -> None:
        """Take note of a write that brought the table to ``version``."""
        self.unwritten().append(write)
        for reference in self._ahead:
            ahead = reference()
            if ahead is not None:
                ahead.follow(write, version)
                if ahead.is_all_of(write):
                    self.steady = True

    def asked(self, ahead: Ahead) -> None:
        """Take note of rows that were asked for."""
        self._ahead = [reference for reference in self._ahead if _waits(reference())]
        self._ahead.append(weakref.ref(ahead))

    def before(self) -> Ahead | None:
        """The rows that were asked for last, if their step can be expected to write them."""
        last = self._ahead[-1]() if self._ahead else None
        return last if self.steady and _waits(last) else None

    def let_gathers_end(self) -> None:
        """Return when no gather that runs ahead reads the table's memory; what it has read is asked for again."""
        if any(_waits(reference()) for reference in self._ahead):
            kernels.finish_jobs()

    def land(self) -> None:
        """Return when every write has arrived: the table may be read and written by whoever calls."""
        failure: Exception | None = None
        while self._writes:
            job = self._writes[0].job
            try:
                if job is not None:
                    job.wait()  # interrupted, it is waited for again
            except Exception as error:
                failure = failure or error
            del self._writes[0]
        if failure is not None:
            raise failure


def _waits(ahead: Ahead | None) -> bool:
    return ahead is not None and not ahead.taken


class EngineGathering:
    """A gather by the engine's background thread: host memory to host memory.

    Args:
        job: the engine's.
        names: of the columns, in the job's order.
    """

    awaited: Tensor | None = None

    def __init__(self, job: kernels.AheadJob, names: list[str]) -> None:
        self._job = job
        self._names = names

    def result(self) -> Found | None:
        found = self._job.take()
        if found is None:
            return None
        return Block(found.rows, dict(zip(self._names, found.blocks, strict=True))), found.local


class SideGathering:
    """A gather beside a GPU's computation.

    Args:
        aside: brings it, with the rows that were left to the write of the lookup before; None for an id out of range,
            which the lookup itself will say, where it is asked for.
    """

    awaited: Tensor | None = None

    def __init__(self, aside: kernels.Aside[tuple[Found, Tensor | None] | None]) -> None:
        self._aside = aside

    def result(self) -> Found | None:
        brought = self._aside.result()
        if brought is None:
            return None
        found, self.awaited = brought
        block, local = found
        kernels.used_here([local, block.rows, *block.columns.values()])
        return found

    def rows(self) -> Tensor | None:
        """The rows, for work that was given to the same thread and stream later; None where there are none."""
        brought = self._aside.brought()
        return None if brought is None else brought[0][0].rows
