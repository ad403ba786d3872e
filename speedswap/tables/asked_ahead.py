"""Batches that an id map was asked for ahead of their turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speedswap.kernels import IdMapUndo, KeyMap
from speedswap.tables.keys import Keys

__all__ = ["AskedAhead", "BatchesAhead"]


@dataclass(eq=False)
class AskedAhead:
    """A batch whose rows were asked for ahead of its turn; :meth:`IdMap.ask` makes it.

    Attributes:
        keys: the batch's.
        rows: int64, of the keys' shape, in host memory. Another tensor takes its place if the map changes out of turn,
            so that these are not the rows any more.
        renewed: rows to reset when the batch's turn begins: int64, shape (n,), in host memory.
    """

    keys: Keys
    rows: Tensor
    renewed: Tensor
    undo: IdMapUndo = field(default_factory=IdMapUndo)


class BatchesAhead:
    """The batches that have not had their turn, in its order. Their keys are in the map, behind all others.

    A change out of turn goes before them: they leave the map, and are added again.

    Args:
        add: adds a batch to the map; returns False if rows are lacking.
    """

    def __init__(self, add: Callable[[AskedAhead], bool]) -> None:
        self._add = add
        self._batches: list[AskedAhead] = []

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, asked: AskedAhead) -> None:
        """Note the next batch, which is in the map."""
        self._batches.append(asked)

    def is_next(self, asked: AskedAhead) -> bool:
        """Return whether the map is as it is to be when this batch has had its turn, but for those after it."""
        return bool(self._batches) and self._batches[0] is asked and asked.undo.applied

    def remove(self, gone: Collection[AskedAhead]) -> None:
        """Leave batches out from now on; others stay in the map."""
        self._batches = [each for each in self._batches if each not in gone]

    @contextmanager
    def left_out(self, loops: KeyMap) -> Iterator[None]:
        """Take the map back to the present turn, for the length of a block."""
        for asked in reversed(self._batches):
            loops.undo(asked.undo)
        try:
            yield
        finally:
            self.bring_back()

    def bring_back(self) -> None:
        """Add the batches that are not in the map; they get the same rows again if it has not changed.

        One that finds no rows any more stays out, and raises when its turn comes.
        """
        for asked in self._batches:
            if not asked.undo.applied:
                before = asked.rows
                self._add(asked)
                if torch.equal(asked.rows, before):
                    asked.rows = before
