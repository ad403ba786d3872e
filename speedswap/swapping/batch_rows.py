"""A batch's rows and their gradient, padding, and the detection of external changes.

Two signs show that a training step did not reach the table: the version counter of the rows on the device, which every
in-place change by torch increments; and a step of some optimizer, reported by torch's hooks, while no optimizer holds
the weight. A change that increments no counter (C++ code that writes through a raw pointer, or through an alias with a
separate counter) goes undetected. Ordinary code changes gradients in this way (GradScaler, ``grad.data.zero_()``), so
gradients are compared by value where a decision depends on it and a step can afford it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap import kernels
from speedswap.errors import LostUpdateError
from speedswap.swapping.optimizers import holds
from speedswap.swapping.weight import TableWeight, as_plain, in_memory
from speedswap.tables import Block, Table

_UNKNOWN = -1  # stands for a version that is not known

# Number of other optimizers' steps to wait for the first step of an optimizer that may hold a weight.
PATIENCE = 100


class Padding:
    """The padding rows of a table: none, one, or one per table if it consists of several.

    Args:
        rows: their numbers.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = tuple(sorted(set(rows)))
        self._on: dict[torch.device, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.rows)

    def among(self, ids: Tensor) -> Tensor:
        """Return a mask of the ids, of any shape on any device, that are padding rows."""
        if len(self.rows) == 1:
            return ids == self.rows[0]
        rows = self._rows(ids.device)
        return rows[torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)] == ids

    def zero(self, grad: Tensor, rows: Tensor) -> None:
        """Zero the gradients of padding rows, in place.

        Args:
            grad: shape (n, dim).
            rows: the gradients' rows, int64, ascending without duplicates, shape (n,), on any device.
        """
        if grad.device.type != "cpu" or rows.device.type != "cpu":
            grad.masked_fill_(self.among(rows).to(grad.device).unsqueeze(1), 0)
        elif len(rows):
            places = kernels.places_among(rows, self._rows(rows.device))
            grad.index_fill_(0, places[places >= 0], 0)

    def _rows(self, device: torch.device) -> Tensor:
        rows = self._on.get(device)
        if rows is None:
            with torch.inference_mode(False):  # the tensor is used later in other modes
                rows = torch.tensor(self.rows, dtype=torch.int64, device=device)
            if kernels.has_memory(rows):  # False under FakeTensorMode
                self._on[device] = rows
        return rows


@dataclass
class GradientOfAll:
    """A gradient of every row of a table, or of one of the tables in it, computed for some rows at a time.

    Attributes:
        rows: these rows.
        of: returns the gradient of rows, shape (n, dim), given their ids, int64, shape (n,), relative to the first of
            ``rows``, and their weights.
        chunk: the maximum number of rows at a time.
        version: the version of the table for which the gradient holds.
    """

    rows: range
    of: Callable[[Tensor, Tensor], Tensor]
    chunk: int
    version: int

    def add_to(self, total: Tensor, ids: Tensor, weight: Tensor) -> None:
        """Add to the gradient of some of the table's rows, of any order, shape (n, dim)."""
        own = ((ids >= self.rows.start) & (ids < self.rows.stop)).nonzero()[:, 0]
        if len(own) == len(ids):
            total.add_(self.of(ids - self.rows.start, weight))
        elif len(own):
            total.index_add_(0, own, self.of(ids[own] - self.rows.start, weight[own]))


class BatchRows:
    """The rows of one or more lookups as a parameter; without rows, a one-row placeholder.

    It records the known versions of rows and gradient; later versions are external changes. The weight shares the rows'
    memory, for code that takes its memory directly.

    Args:
        table: the full rows.
        weight: the parameter that an optimizer holds for them between its steps.

    Attributes:
        batch: the rows and their gradient, which an optimizer holds during its step.
        block: the gathered rows, without their state once the state is in the table; None for a placeholder.
        version: the table's version when they were gathered.
        steps_seen: the number of steps, of any optimizer, before the last gradient arrived.
        steps_before: the same for the first gradient that still awaits a step.
        of_all: gradients of every row; the batch's own gradient is added to them.
    """

    steps_anywhere: ClassVar[int] = 0  # steps of any optimizer in this process

    def __init__(self, table: Table, weight: TableWeight) -> None:
        self._table = table
        self._weight = weight
        self.block: Block | None = None
        self.version = 0
        self._rows_version = 0
        self._grad_version = 0
        self.steps_seen = self.steps_before = 0
        self.of_all: list[GradientOfAll] = []
        self._own: tuple[Tensor, Tensor] | None = None  # with gradients of all rows: the batch's own, and a copy
        with as_plain(), in_memory():
            self._placeholder = weight.detach()
        self.batch = nn.Parameter(self._placeholder, weight.requires_grad)  # with the weight's version counter
        self.batch.stands_for = weight  # type: ignore[attr-defined]

    def _hold(self, values: Tensor | None) -> None:
        """Make the parameter and the weight's memory these rows, or the placeholder, and drop the gradient."""
        self.batch.grad = None  # a gradient of another shape prevents changing the data
        with as_plain():
            if values is None:
                if self._placeholder.device != self._weight.device:
                    self._placeholder = torch.zeros_like(self._placeholder, device=self._weight.device)
                values = self._placeholder
            self._weight.data = values
        self.batch.data = values
        self._rows_version = self.batch._version

    # ------------------------------------------------------------------ rows and gradient

    def add(self, block: Block, version: int, grad: Tensor, *, keeps: bool | None = None) -> None:
        """Add a lookup's rows and gradient to those of earlier lookups.

        Args:
            block: the rows that the lookup gathered.
            version: the table's version at that time.
            grad: the rows' gradient.
            keeps: True to keep the gradient of earlier lookups; by default it is kept unless zeroed.
        """
        before, current = self.batch.grad, self._table.store.notes.version  # other threads may write from here on
        was_changed = before is not None and self._own_was_changed(before)
        if keeps is None:
            keeps = before is not None and not self.is_zeroed(before)
        if not keeps:
            self.of_all = []
        if self.block is not None and before is not None and keeps:
            block, grad = self._merged(self.block, before, block, version, grad)
        elif version != current:
            block = self._table.lease(block.rows, device=grad.device)  # the table has changed since the forward pass
        self.block, self.version = block, current
        self._hold(block.columns["weight"])
        self.batch.grad, self._grad_version = grad, grad._version
        self._own = (grad, grad.clone()) if self.of_all and not was_changed else None

    def add_of_all(self, gradient: GradientOfAll) -> None:
        """Add a gradient of every row to the one just added."""
        grad, was_changed = self.batch.grad, self.of_all != [] and self._own is None
        self.of_all.append(gradient)
        self._own = None if was_changed or grad is None else (grad, grad.clone())

    def gradient_of_all(self, block: Block) -> Tensor:
        """Return the gradient of some rows from the gradients of every row."""
        weight = block.columns["weight"].detach()
        ids = block.rows.to(weight.device)
        total = torch.zeros_like(weight)
        for each in self.of_all:
            each.add_to(total, ids, weight)
        return total

    def require_of_all(self, grad: Tensor) -> None:
        """Raise LostUpdateError if gradients of every row do not belong to the current rows and gradient.

        Args:
            grad: the weight's gradient; if it was zeroed, so were those of every row.
        """
        if self.of_all and self.is_zeroed(grad):
            self.of_all = []
        name = self._table.name
        if any(each.version != self._table.version for each in self.of_all):
            raise LostUpdateError(
                f"table {name!r} has changed since the backward pass: gradients of all rows (full_softmax) are valid "
                "for one step right after it; call zero_grad() and compute the loss again"
            )
        if self._own_was_changed(grad):
            raise LostUpdateError(
                f"the gradient of the embedding over table {name!r} was changed after the backward pass, as clipping "
                "and GradScaler do, but it covers all rows (full_softmax), and most of it is computed in the step; "
                "clip only the other parameters, and scale the loss"
            )

    def _own_was_changed(self, grad: Tensor) -> bool:
        """Return whether the batch's own gradient has changed since the backward pass, if all rows have gradients."""
        if not self.of_all:
            return False
        if self._own is None or grad is not self._own[0] or grad._version != self._grad_version:
            return True
        return not kernels.have_same_bits(*self._own)

    def restore_own(self) -> None:
        """Restore the batch's own gradient after a step that did not reach the table."""
        if self._own is not None:
            self.batch.grad = self._own[0]

    def _merged(
        self, block: Block, grad: Tensor, new: Block, new_version: int, new_grad: Tensor
    ) -> tuple[Block, Tensor]:
        """Return the union of two blocks' rows, with summed gradients."""
        device = new_grad.device
        union, total, old_places, new_places = merged(block.rows, grad, new.rows, new_grad)
        are_current = self.version == new_version == self._table.store.notes.version
        has_state = block.columns.keys() == new.columns.keys()  # False after a step without rows, which drops it
        if not are_current or not has_state or self._weight.device != device:
            return self._table.lease(union, device=device), total
        columns = {}
        for name, values in new.columns.items():
            columns[name] = values.new_empty(len(union), *values.shape[1:])
            columns[name].index_copy_(0, new_places, values.detach())
            columns[name].index_copy_(0, old_places, self.batch.data if name == "weight" else block[name])
        return Block(union, columns), total

    def renew(self, grad: Tensor) -> None:
        """Gather the rows again, for a second step with this gradient."""
        assert self.block is not None
        of_all, own = self.of_all, self._own
        self.add(self.block, -1, grad, keeps=False)
        self.of_all, self._own = of_all, own

    def drop_state(self) -> None:
        """Record that weight and state are in the table; rows and gradient may still be read."""
        assert self.block is not None
        self.block = Block(self.block.rows, {"weight": self.block.columns["weight"]})
        self._rows_version = self.batch._version
        self._grad_version = _UNKNOWN

    def release(self) -> None:
        """Drop rows and gradient: the weight becomes a one-row placeholder."""
        self.block = None
        self.of_all, self._own = [], None
        self._hold(None)

    def save(self) -> Callable[[], None]:
        """Return a function that restores the current rows and gradient, before a pass that may fail.

        External changes made before the save still count.
        """
        data, grad, was_changed = self.batch.data, self.batch.grad, self.batch._version != self._rows_version
        with as_plain():  # this rank's rows, if ranks own them
            values = None if grad is None else grad.detach().clone()
        was_zeroed = grad is not None and grad._version != self._grad_version
        block, version, steps = self.block, self.version, (self.steps_seen, self.steps_before)
        of_all, own = [*self.of_all], self._own

        @torch.no_grad()
        def restore() -> None:
            self._hold(data)
            self._rows_version -= was_changed
            if grad is not None and values is not None:
                self.batch.grad = grad.copy_(values)
                self._grad_version = grad._version - was_zeroed
            self.block, self.version, (self.steps_seen, self.steps_before) = block, version, steps
            self.of_all, self._own = of_all, own

        return restore

    def contain(self, value: Tensor) -> bool:
        """Return whether a tensor is in the memory of the gathered rows."""
        assert self.block is not None
        memory = value.untyped_storage().data_ptr()
        return any(column.untyped_storage().data_ptr() == memory for column in self.block.columns.values())

    # ------------------------------------------------------------------ external changes

    def accept(self) -> None:
        """Accept the current rows and gradient as known."""
        self._rows_version = self.batch._version
        if (grad := self.batch.grad) is not None:
            self._grad_version = grad._version

    def drop(self, rows: Tensor) -> None:
        """Set the gradient of some rows to zero, without counting as an external change."""
        grad, version = self.batch.grad, self._grad_version
        if grad is not None and self.block is not None:
            before = grad._version
            drop(grad, self.block.rows, rows)
            self._grad_version = version + grad._version - before

    def is_zeroed(self, grad: Tensor) -> bool:
        """Return whether ``zero_grad(set_to_none=False)`` zeroed a gradient, so its rows have left the step.

        Before the step the version shows it, since a batch's gradient may happen to be zero; after it, the values do.
        """
        if grad._version == self._grad_version:
            return False
        with as_plain():  # this rank's rows, if ranks own them
            return not bool(grad.any())

    @property
    def are_moved(self) -> bool:
        """True if the rows were changed in place since they were gathered, or written to the table."""
        return self.batch._version != self._rows_version

    def lost_after_step(self) -> str | None:
        """Return the error for rows changed after the optimizer's step; None if they were not."""
        if not self.are_moved:
            return None
        return (
            f"the rows of table {self._table.name!r} were changed on the device after the optimizer's step, but the "
            "change does not reach the table; change them in the table, with table.gather and table.scatter"
        )

    def lost_before_step(self, attached: Optimizer | None) -> str | None:
        """Return the error for a gradient that no step has applied or ever will; None if a step still may.

        Args:
            attached: the optimizer whose state is in the table.
        """
        if self.are_moved:
            return (
                f"the rows of table {self._table.name!r} were changed on the device without the optimizer's hooks, so "
                "the update did not reach the table; step with one of torch.optim, or with a subclass of "
                "torch.optim.Optimizer that calls super().__init__"
            )
        if BatchRows.steps_anywhere == self.steps_seen or self.may_be_stepped(attached):
            return None
        return (
            f"the weight of the embedding over table {self._table.name!r} is in no optimizer, so its gradient reaches "
            "no table; pass model.parameters() to the optimizer (an optimizer that got it otherwise, as a copied one "
            "did, needs speedswap.attach(optimizer, model) before others step), or freeze it with "
            "embedding.weight.requires_grad_(False)"
        )

    def may_be_stepped(self, attached: Optimizer | None) -> bool:
        """Return whether an optimizer's step with the gradient may still come.

        An optimizer that has not stepped is known only by a query of the weight of the kind that optimizers make: wait
        for its first step until others have taken :data:`PATIENCE` steps.
        """
        if attached is not None and holds(attached, self._weight):
            return True
        return self._weight.may_be_taken and BatchRows.steps_anywhere - self.steps_before < PATIENCE


def merged(rows: Tensor, grad: Tensor, more: Tensor, more_grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the union of two sets of rows, with summed gradients, and the place of each row of either set in it."""
    device = more_grad.device
    union, places = kernels.unique(torch.cat([rows.to(more.device), more]))
    old, new = places.to(device).tensor_split([len(rows)])
    total = torch.zeros(len(union), more_grad.shape[1], dtype=more_grad.dtype, device=device)
    total.index_copy_(0, old, grad.to(device))
    total.index_copy_(0, new, total.index_select(0, new) + more_grad)
    return union, total, old, new


def drop(grad: Tensor, rows: Tensor, dropped: Tensor) -> None:
    """Set the gradient of some rows to zero."""
    grad.masked_fill_(torch.isin(rows, dropped.to(rows.device)).unsqueeze(1), 0)
