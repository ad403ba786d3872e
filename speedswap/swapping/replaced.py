"""Weights that ``convert`` has replaced while an optimizer may still hold them: its steps train nothing."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap.errors import LostUpdateError
from speedswap.swapping.optimizers import holds, parameters_of
from speedswap.swapping.row_step import RowStep


class _Replacement(Protocol):
    def require_held(self, optimizer: Optimizer) -> None:
        """Raise LostUpdateError if an optimizer holds the weight, and what replaced it awaits a step of no other."""


# By the replaced weight's id; empty in nearly every program.
replaced_weights: dict[int, _Replacement] = {}


def _note(weight: Tensor, replacement: _Replacement) -> weakref.ref[Tensor]:
    """Keep what replaced a weight for as long as the weight lives; return a reference to the weight."""
    key = id(weight)
    replaced_weights[key] = replacement
    return weakref.ref(weight, lambda _: replaced_weights.pop(key, None))


class ReplacedByPlain:
    """A table's weight that a plain parameter has replaced.

    Args:
        weight: the table's weight.
        plain: the parameter.
        table: the table's name.
    """

    def __init__(self, weight: Tensor, plain: nn.Parameter, table: str) -> None:
        self._weight, self._plain, self._table = _note(weight, self), weakref.ref(plain), table

    def require_held(self, optimizer: Optimizer) -> None:
        plain = self._plain()
        if plain is not None and plain.grad is not None and not holds(optimizer, plain):
            raise LostUpdateError(
                f"this {type(optimizer).__name__} holds the weight of table {self._table!r}, which a plain embedding "
                "has replaced, so it does not train the new weight; make the optimizer after speedswap.convert"
            )


class ReplacedByTable:
    """A plain parameter that a table's rows have replaced.

    Args:
        weight: the parameter.
        step: the rows' training step.
    """

    def __init__(self, weight: Tensor, step: RowStep) -> None:
        self._weight, self._step = _note(weight, self), weakref.ref(step)

    def require_held(self, optimizer: Optimizer) -> None:
        step = self._step()
        if step is not None and step.awaits_nobody:
            raise LostUpdateError(
                f"this {type(optimizer).__name__} holds the weight that table {step.table.name!r} has replaced, and no "
                "optimizer holds the new one, so the rows' gradient reaches no table; make the optimizer after "
                "speedswap.convert"
            )


def require_no_replaced(optimizer: Optimizer) -> None:
    """Raise LostUpdateError if an optimizer holds a weight whose replacement awaits a step of no optimizer."""
    for parameter in parameters_of(optimizer):
        if (replacement := replaced_weights.get(id(parameter))) is not None:
            replacement.require_held(optimizer)
