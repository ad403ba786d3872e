"""Groups of rows in a log whose bytes follow from (group, step, column), so that every stale or torn one is seen."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Shape", "State", "content"]

_WORD = 8


@dataclass(frozen=True)
class Shape:
    """The columns of a log's groups in every layout so far, the newest one last.

    Attributes:
        groups: their number.
        columns: bytes of each column.
        births: the layout since which each column's values count.
        layouts: the columns of each layout, in the order of their bytes.
    """

    groups: int
    columns: tuple[int, ...]
    births: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]

    @property
    def group_bytes(self) -> int:
        return self.bytes_of(len(self.layouts) - 1)

    def bytes_of(self, layout: int) -> int:
        return sum(self.columns[column] for column in self.layouts[layout])

    def offset(self, layout: int, column: int) -> int:
        order = self.layouts[layout]
        return sum(self.columns[before] for before in order[: order.index(column)])

    def moves(self, layout: int) -> list[tuple[int, int, int]]:
        """Return the (from, to, bytes) that take a group of a layout to the newest one."""
        newest = len(self.layouts) - 1
        return [
            (self.offset(layout, column), self.offset(newest, column), self.columns[column])
            for column in self.layouts[layout]
            if self.births[column] <= layout
        ]

    def grown(self, nbytes: int) -> Shape:
        """Return the shape with one more column, in front of the others."""
        added = len(self.columns)
        return Shape(
            self.groups,
            (*self.columns, nbytes),
            (*self.births, len(self.layouts)),
            (*self.layouts, (added, *self.layouts[-1])),
        )

    def reborn(self, column: int) -> Shape:
        """Return the shape in which a column has initial values again."""
        births = tuple(len(self.layouts) if i == column else birth for i, birth in enumerate(self.births))
        return Shape(self.groups, self.columns, births, (*self.layouts, self.layouts[-1]))


class State:
    """The step that each column of each group was last written in; 0 for its initial value.

    Args:
        steps: int64, shape (groups, columns).
        layout: the newest layout at that time.
    """

    def __init__(self, steps: NDArray[np.int64], layout: int) -> None:
        self.steps = steps
        self.layout = layout

    @classmethod
    def initial(cls, shape: Shape) -> State:
        return cls(np.zeros((shape.groups, len(shape.columns)), np.int64), len(shape.layouts) - 1)

    def in_shape(self, shape: Shape) -> State:
        """Return a copy after layouts were added: columns that were born since then have their initial values."""
        after = State.initial(shape)
        for column in range(self.steps.shape[1]):
            if shape.births[column] <= self.layout:
                after.steps[:, column] = self.steps[:, column]
        return after

    def content(self, shape: Shape) -> NDArray[np.uint8]:
        """Return every group's bytes, shape (groups, bytes of the newest layout)."""
        return content(shape, np.arange(shape.groups), self.steps)

    def drawn(self, draw: random.Random, most: int) -> NDArray[np.int64]:
        """Return some groups, neighbours or scattered ones, each once."""
        groups, count = len(self.steps), draw.randrange(1, most + 1)
        if draw.random() < 0.3:
            first = draw.randrange(groups)
            return np.arange(first, min(groups, first + count))
        return np.array(draw.sample(range(groups), min(count, groups)))


def content(shape: Shape, groups: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the bytes of groups, given the step of each of their columns."""
    parts = []
    for column in shape.layouts[-1]:
        words = shape.columns[column] // _WORD
        seed = groups.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        seed ^= steps[:, column].astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        seed ^= np.uint64(0xA24BAED4963EE407 * (column + 1) & 0xFFFFFFFFFFFFFFFF)
        parts.append((seed[:, None] + np.arange(words, dtype=np.uint64)).view(np.uint8))
    return np.concatenate(parts, axis=1)
