"""Steps without a gradient whose effect on any row has a known form, so that any number of them is taken at once.

- Each column becomes a sum of multiples of the columns, so that a run of steps is one matrix.
- The weight may also move by momentum / (slope · x + flat), x being the root of the last column. The sum of these terms
  over many steps is a smooth function of y = x / (x + base), kept as coefficients of Chebyshev polynomials on 0 to 1.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.kernels import CURVE_TERMS, MissedSteps, take_missed_steps
from speedswap.tables.files.damage import require
from speedswap.tables.init import zeros
from speedswap.tables.record import Column

MOST_STEPS = 4096  # that rows can miss before all are brought up to date
_NONE_LEFT = 1e-18
# Chebyshev nodes from 0 to 1, and the coefficients of the polynomial through values there.
_ANGLES = np.pi * (np.arange(CURVE_TERMS) + 0.5) / CURVE_TERMS
_NODES = (np.cos(_ANGLES) + 1) / 2
_TO_TERMS = 2 / CURVE_TERMS * np.cos(np.outer(_ANGLES, np.arange(CURVE_TERMS)))
_TO_TERMS[:, 0] /= 2

_Array = NDArray[np.float64]


class Step(NamedTuple):
    """The effect of a step on any row without a gradient.

    Attributes:
        matrix: the factors ``[from, to]`` of the columns, weight first.
        bend: slope and flat, if the weight moves by momentum / (slope · x + flat) as well.
        center: the middle of the range in which a curve's base will move, relative to its beginning.
    """

    matrix: _Array
    bend: tuple[float, float] | None
    center: float


class ClosedSteps:
    """Steps of the known forms: any number of them costs a row as much as one.

    Args:
        names: the columns that they change, weight first; at least two if the weight bends.
        bends: True if steps may bend.
        dtype: the weight's.

    Attributes:
        count: the number of steps.
        names: the columns.
        bends: True if steps may bend.
    """

    def __init__(self, names: Sequence[str], dtype: torch.dtype, *, bends: bool) -> None:
        n = len(names)
        self.count = 0
        self.names, self.bends = [*names], bends
        numbers = np.zeros((MOST_STEPS + 1, n * n + (CURVE_TERMS + 1 if bends else 0)))
        self._missed = MissedSteps(torch.from_numpy(numbers), bends)
        self._maps = numbers[:, : n * n].reshape(-1, n, n)  # a view, as the next two are
        self._curves, self._bases = (numbers[:, n * n : -1], numbers[:, -1]) if bends else (numbers[:, n * n :],) * 2
        self._maps[0] = np.eye(n)
        self._taken = np.zeros((MOST_STEPS, n * n + 3))  # each step: its matrix, bend and center
        self._precision = 1e-13 if dtype == torch.float64 else 1e-9
        self._first = 0  # the first step whose rows still have momentum

    def take(self, columns: dict[str, Tensor], last: Tensor, before: int) -> None:
        """Take the steps that rows have missed, in place, as :class:`speedswap.tables.idle.Steps` says."""
        take_missed_steps([columns[name] for name in self.names], last, self.count, self._missed, before)

    def leave_initial(self, columns: dict[str, Column]) -> bool:
        """Return whether these steps, all of them, leave a row as it is that has its initial values."""
        moves = (self._maps[0] != np.eye(len(self.names))).any(axis=1)
        return all(columns[name].init == zeros() for name, moved in zip(self.names, moves, strict=True) if moved)

    def prepare(self, step: Step) -> Callable[[], None] | None:
        """Return a function that adds a step; None if it would not fit."""
        if self.count == MOST_STEPS:
            return None
        if step.bend is not None and (step.bend[0] <= 0 or step.bend[1] < 0):
            return None
        curves, bases = self._extended(step)
        if not bool((np.abs(curves[:, -2:]) <= self._precision * np.abs(curves[:, :1])).all()):
            return None
        return lambda: self._add(step, curves, bases)

    def _extended(self, step: Step) -> tuple[_Array, _Array]:
        """Return the curves and bases of steps whose rows have momentum, with one more step."""
        some = slice(self._first, self.count + 1)
        curves, bases = self._curves[some] * step.matrix[0, 0], self._bases[some]
        if step.bend is not None:
            slope, flat = step.bend
            momentum, root = self._maps[some, 1, 1], np.sqrt(self._maps[some, -1, -1])
            bases = np.where(bases == 0, flat / slope * step.center, bases)
            share = np.divide(flat, bases, out=np.full_like(bases, slope), where=bases > 0)
            values = momentum[:, None] / (np.outer(slope * root, _NODES) + np.outer(share, 1 - _NODES))
            curves += values @ _TO_TERMS
        return curves, bases

    def _add(self, step: Step, curves: _Array, bases: _Array) -> None:
        matrix, bend, center = step
        n, end, some = len(matrix), self.count + 1, slice(self._first, self.count + 1)
        if matrix[0, 0] != 1:
            self._curves[: self._first] *= matrix[0, 0]
        self._curves[some], self._bases[some] = curves, bases
        self._maps[:end] = (self._maps[:end].reshape(-1, n) @ matrix).reshape(-1, n, n)
        self._maps[end] = np.eye(n)
        self._taken[self.count] = [*matrix.flat, *(bend or (0, 0)), center]
        self.count = end
        if self.bends:
            maps = self._maps[some]
            moves = np.abs(maps[:, 1, 1]) > _NONE_LEFT * np.sqrt(maps[:, -1, -1]).clip(1e-12)
            self._first += int(moves.argmax()) if moves.any() else len(moves)

    # ------------------------------------------------------------------ with a table's commits

    def to_json(self) -> dict[str, Any]:
        """Return the steps as plain data: each number of all steps, or once if it is the same in all."""
        steps = [
            float(each[0]) if (each == each[0]).all() else base64.b85encode(each.tobytes()).decode()
            for each in self._taken[: self.count].T
        ]
        return {"names": self.names, "bends": self.bends, "count": self.count, "steps": steps}

    @classmethod
    def from_json(cls, data: dict[str, Any], columns: dict[str, Column]) -> ClosedSteps:
        """Return the steps that :meth:`to_json` described; for use under :func:`says_damaged`.

        Args:
            data: the description.
            columns: the columns of the rows that may have missed the steps.
        """
        names, count, n = data["names"], data["count"], len(data["names"])
        known = list(columns)[:1] == names[:1] and set(names) <= columns.keys() and len(set(names)) == n
        require(known and 0 < count <= MOST_STEPS and (n > 1 or not data["bends"]), "its idle steps are of other rows")
        taken = np.empty((n * n + 3, count))
        for into, each in zip(taken, data["steps"], strict=True):
            into[:] = np.frombuffer(base64.b85decode(each)) if isinstance(each, str) else each
        steps = cls(names, columns["weight"].dtype, bends=data["bends"])
        with np.errstate(all="ignore"):
            for numbers in taken.T:
                slope, flat, center = numbers[-3:].tolist()
                step = Step(numbers[:-3].reshape(n, n).copy(), (slope, flat) if slope else None, center)
                steps._add(step, *steps._extended(step))
        return steps
