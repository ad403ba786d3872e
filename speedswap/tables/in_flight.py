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
    """A gather that is under way."""

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
    """

    def __init__(self, gathering: Gathering, version: int, writes: Iterable[Write]) -> None:
        self.version = version
        self.taken = False
        self._gathering = gathering
        self._writes = list(writes)

    def follow(self, write: Write, version: int) -> None:
        """Take note of a write that brought the table to ``version``."""
        if self.version == version - 1:
            self.version = version
            self._writes.append(write)

    def take(self, version: int) -> Found | None:
        """The rows as the table of that version has them, and each id's place among them. Once only.

        Returns:
            None where the table itself has to be asked: something else than a step has changed it since, or an id is
            out of range.
        """
        self.taken = True
        if self.version != version:
            return None
        found = self._gathering.result()
        if found is not None:
            for write in self._writes:
                write.hand_over(found[0])
        self._writes = []
        return found


class InFlight:
    """What is on its way to and from one table."""

    def __init__(self) -> None:
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

    def asked(self, ahead: Ahead) -> None:
        """Take note of rows that were asked for."""
        self._ahead = [reference for reference in self._ahead if _waits(reference())]
        self._ahead.append(weakref.ref(ahead))

    def land(self) -> None:
        """Return when every write has arrived: the table may be read and written by whoever calls."""
        writes, self._writes = self._writes, []
        for write in writes:
            if write.job is not None:
                write.job.wait()


def _waits(ahead: Ahead | None) -> bool:
    return ahead is not None and not ahead.taken


class EngineGathering:
    """A gather by the engine's background thread: host memory to host memory.

    Args:
        job: the engine's.
        names: of the columns, in the job's order.
    """

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
        aside: brings it; None for an id out of range, which the lookup itself will say, where it is asked for.
    """

    def __init__(self, aside: kernels.Aside[Found | None]) -> None:
        self._aside = aside

    def result(self) -> Found | None:
        found = self._aside.result()
        if found is not None:
            block, local = found
            kernels.used_here([local, block.rows, *block.columns.values()])
        return found
