"""The part of an id map that a commit saves: what has changed since the one before, and some of the rest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from speedswap import kernels

__all__ = ["Sweep"]

_LEAST_CELLS = 4096


class Sweep(NamedTuple):
    """The state of a map when some of it was saved, and how far a sweep over all of its cells has come.

    Cells are the map's rows, and its places on probation. With each commit the sweep saves a few that have not changed,
    so that in the end the pieces since its beginning are the whole map, and earlier ones are not needed any more. It
    passes two cells for each that was saved again since it had changed: the pieces of one sweep are then at most half
    as large again as the map.

    Attributes:
        token: of the map.
        cursor: the map's counters.
        passed: rows, and places, that the sweep has passed.
        until: those that it passes: what the map had when it began.
        rewritten: changed cells of the last piece that had been saved before.
    """

    token: object
    cursor: kernels.Cursor
    passed: tuple[int, int]
    until: tuple[int, int]
    rewritten: int = 0

    @classmethod
    def whole(cls, token: object, cursor: kernels.Cursor) -> Sweep:
        """Return the state of a map that was saved as a whole."""
        return cls(token, cursor, (cursor.used, cursor.probation_used), (cursor.used, cursor.probation_used))

    @property
    def is_complete(self) -> bool:
        """True if the next step begins another sweep, and what was saved before this one is not needed any more."""
        return self.passed == self.until

    def is_before(self, token: object, now: kernels.Cursor) -> bool:
        """Return whether changes since then can be told: of the same map, whose clock has not begun anew."""
        return self.token is token and self.cursor.clock <= now.clock

    def step(self, loops: kernels.KeyMap) -> tuple[Sweep, tuple[Tensor, Tensor]]:
        """Return the state now, and the cells to save: those that have changed, and the next ones of the sweep.

        Args:
            loops: the map.
        """
        had = self.cursor.used, self.cursor.probation_used
        begin, until = ((0, 0), had) if self.is_complete else (self.passed, self.until)
        room = _LEAST_CELLS + 2 * self.rewritten
        rows = min(begin[0] + room, until[0])
        places = min(begin[1] + room - (rows - begin[0]), until[1])
        cells = (
            loops.changed(False, self.cursor, range(begin[0] + 1, rows + 1)),
            loops.changed(True, self.cursor, range(begin[1] + 1, places + 1)),
        )
        again = sum(int((some <= most).sum()) for some, most in zip(cells, had, strict=True))
        rewritten = max(0, again - (rows + places - sum(begin)))
        return Sweep(self.token, loops.cursor, (rows, places), until, rewritten), cells
