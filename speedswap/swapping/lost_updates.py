"""The check for training steps that did not reach the table.

Two signs give one away: the version counter of the rows on the device, which every in-place change by torch raises;
and a step of some optimizer, which torch's hooks report, while no optimizer holds the weight. A change that raises no
counter (C++ code that writes through a raw pointer, or through an alias with a counter of its own) is not found.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from speedswap.swapping.optimizers import holds
from speedswap.swapping.weight import TableWeight, as_plain
from speedswap.tables import Table

__all__ = ["LostUpdates"]


class LostUpdates:
    """The versions of a batch's rows and gradient that are accounted for; later ones are changes from outside.

    The weight is an ordinary parameter with the batch's rows while a method runs.

    Args:
        table: the full rows.
        weight: the parameter that stands for them.
    """

    steps_anywhere: ClassVar[int] = 0  # of any optimizer in this process

    def __init__(self, table: Table, weight: TableWeight) -> None:
        self._table = table
        self._weight = weight
        self._weight_version = 0
        self._grad_version = 0
        self._steps_seen = 0

    def accept(self) -> None:
        """Account for rows and gradient as they are now."""
        self._weight_version = self._weight._version
        if self._weight.grad is not None:
            self._grad_version = self._weight.grad._version

    def accept_gradient(self, steps: int | None = None) -> None:
        """Account for every optimizer step so far: none of them has missed the gradient that has come.

        Args:
            steps: by then, if the gradient has come earlier.
        """
        self._steps_seen = LostUpdates.steps_anywhere if steps is None else steps

    def is_zeroed(self, grad: Tensor) -> bool:
        """Return whether ``zero_grad(set_to_none=False)`` has zeroed a gradient: its rows have left the step."""
        with as_plain():  # this rank's rows, where ranks own them
            return grad._version != self._grad_version and not bool(grad.any())

    def after_step(self) -> str | None:
        """Return the error for rows that were changed after the optimizer's step; None if they were not."""
        if self._weight._version == self._weight_version:
            return None
        return (
            f"the rows of table {self._table.name!r} were changed on the device after the optimizer's step, which does "
            "not reach the table; change them there, with table.gather and table.scatter"
        )

    def before_step(self, attached: Optimizer | None) -> str | None:
        """Return the error for a gradient that no step has brought to the table, and none will; None if one may.

        Args:
            attached: the optimizer whose state is in the table.
        """
        if self._weight._version != self._weight_version:
            return (
                f"the rows of table {self._table.name!r} were changed on the device without the optimizer's hooks, so "
                "the update did not reach the table; step with one of torch.optim, or with a subclass of "
                "torch.optim.Optimizer that calls super().__init__"
            )
        if LostUpdates.steps_anywhere == self._steps_seen:
            return None
        if self.are_to_come(attached):
            return None
        return (
            f"the weight of the embedding over table {self._table.name!r} is in no optimizer, so its gradient reaches "
            "no table; pass model.parameters() to the optimizer (one that has it from elsewhere, as a copied optimizer "
            "has, needs speedswap.attach(optimizer, model) before others step), or freeze it with "
            "embedding.weight.requires_grad_(False)"
        )

    def are_to_come(self, attached: Optimizer | None) -> bool:
        """Return whether an optimizer holds the weight, so that its step is still to come."""
        known = (attached, *self._weight.taken_by)
        return any(optimizer is not None and holds(optimizer, self._weight) for optimizer in known)

    def save(self) -> tuple[bool, bool, int]:
        """Return what :meth:`restore` takes, before a backward pass that may have to be undone."""
        grad = self._weight.grad
        was_changed = self._weight._version != self._weight_version
        return was_changed, grad is not None and grad._version != self._grad_version, self._steps_seen

    def restore(self, saved: tuple[bool, bool, int]) -> None:
        """Account for rows and gradient that were put back; changes from before the save still count as such."""
        was_changed, was_zeroed, self._steps_seen = saved
        grad = self._weight.grad
        self._weight_version = self._weight._version - was_changed
        self._grad_version = 0 if grad is None else grad._version - was_zeroed
