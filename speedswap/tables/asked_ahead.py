"""Batches that an id map was asked for ahead of their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speedswap.kernels import KeyMap
from speedswap.tables.keys import Keys

__all__ = ["AskedAhead", "BatchesAhead"]


@dataclass(eq=False)
class AskedAhead:
    """A batch whose rows were asked for ahead of its turn; :meth:`IdMap.ask` makes it.

    Attributes:
        keys: the batch's.
        rows: int64, of the keys' shape, on their device.
        renewed: rows to reset when the batch's turn begins: int64, shape (n,), in host memory.
    """

    keys: Keys
    rows: Tensor
    renewed: Tensor
    undo: Any  # the way back; None once there is none


class BatchesAhead:
    """The batches that have not had their turn, in the order of their turns. Their keys are in the map already."""

    def __init__(self) -> None:
        self._batches: deque[AskedAhead] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, asked: AskedAhead) -> None:
        """Add the next batch."""
        self._batches.append(asked)

    def begin(self, asked: AskedAhead) -> bool:
        """Let a batch have its turn; return False if it has had it."""
        if asked not in self._batches:
            return False
        self._batches.remove(asked)
        asked.undo = None
        return True

    def settle(self) -> None:
        """Keep all of them for good: something has come that they were not asked for ahead of."""
        for asked in self._batches:
            asked.undo = None

    def take_back(self, loops: KeyMap) -> list[Tensor]:
        """Forget all of them, as if they had not come; return the rows that those that stay have renewed."""
        renewed = []
        while self._batches:
            asked = self._batches.pop()
            if asked.undo is not None:
                loops.undo(asked.undo)
            else:
                renewed.append(asked.renewed)
        return renewed

    def renewed(self) -> list[Tensor]:
        """Return the rows of batches that stay and are still to start anew."""
        return [asked.renewed for asked in self._batches if asked.undo is None]

    @contextmanager
    def left_out(self, loops: KeyMap) -> Iterator[None]:
        """Take the map's loops back to the present turn, for the length of a block."""
        batches = [asked for asked in self._batches if asked.undo is not None]
        for asked in reversed(batches):
            loops.undo(asked.undo)
        try:
            yield
        finally:
            for asked in batches:  # which gives them the same rows again
                found = loops.add(asked.keys.numbers, asked.keys.texts, undoable=True)
                assert found is not None
                asked.undo = found[2]
