"""Rows that ranks own, read by the first of them alone, such as to write a file: the others serve it meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap.collectives import Kind, Task
from speedswap.tables.block import Block
from speedswap.tables.store import RowStore, WrappedStore

if TYPE_CHECKING:
    from speedswap.ranks.sharded import ShardedStore

__all__ = ["alone"]

_DONE = 0


class _Alone(WrappedStore):
    """A store that one rank reads by itself.

    Args:
        inner: the rows.
        task: in which the other ranks serve it.
    """

    def __init__(self, inner: RowStore, task: Task) -> None:
        super().__init__(inner)
        self.group = None
        self._task = task

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        found: dict[str, Tensor] = {}
        for column in columns or self.columns:
            self._task.round(note=-self._number(column))
            into = {column: out[column]} if out and column in out else None
            found |= self.inner.gather(rows, [column], device, into).columns
        return Block(rows, found)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        self._task.round(note=self._number(column))
        return self.inner.read(column, start, stop, device)

    def _number(self, column: str) -> int:
        """Return the number by which the other ranks know a column: as it is for a range, negative for ids."""
        return 1 + [*self.columns].index(column)

    def flush_at_end(self) -> None:
        return None  # the table of these rows does


@contextmanager
def alone(joint: ShardedStore, outer: RowStore) -> Iterator[RowStore | None]:
    """Provide the first rank with a store that it reads by itself, and the others, which serve it, with None.

    Args:
        joint: the rows that ranks own. Every rank calls this.
        outer: the same, or a store in front of it, which is to be read.

    Raises:
        PeerError: the first rank has failed.
    """
    with joint.group.main.task(Kind.ALONE, joint.number) as task:
        if joint.group.rank == 0:
            yield _Alone(outer, task)
            task.round(note=_DONE)
        else:
            while (wanted := task.round().notes[0]) != _DONE:
                column = [*joint.columns][abs(wanted) - 1]
                if wanted > 0:
                    joint.read(column, 0, 0)
                else:
                    joint.gather(torch.empty(0, dtype=torch.int64), [column], torch.device("cpu"))
            yield None
        task.finish()
