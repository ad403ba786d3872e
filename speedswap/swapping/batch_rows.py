"""The rows of a batch that an embedding's weight stands for, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from speedswap import kernels
from speedswap.swapping.lost_updates import LostUpdates
from speedswap.swapping.weight import TableWeight, as_plain
from speedswap.tables import Block, Table

__all__ = ["BatchRows"]


class BatchRows:
    """Rows from one or more lookups, in a weight that is otherwise a placeholder of one row.

    The weight is :meth:`opened` around every call but :meth:`save`.

    Args:
        table: the full rows.
        weight: the parameter that an optimizer holds for them.

    Attributes:
        block: the rows as they were gathered; without their state, once that is in the table; None for a placeholder.
        updates: the changes that are accounted for.
    """

    def __init__(self, table: Table, weight: TableWeight) -> None:
        self._table = table
        self._weight = weight
        self.block: Block | None = None
        self._version = 0  # the table's, when the rows were gathered
        self.updates = LostUpdates(table, weight)
        with as_plain():
            self._placeholder = weight.detach()

    @property
    def are_current(self) -> bool:
        """True if the table has not changed since the rows were gathered."""
        return self._version == self._table.version

    def open(self) -> None:
        """Let the weight be the tensor behind it: an ordinary parameter."""
        self._weight.__class__ = nn.Parameter  # type: ignore[assignment]

    def close(self) -> None:
        """Let the weight stand for the whole table."""
        self._weight.__class__ = TableWeight

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the weight for the length of a block."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def add(self, block: Block, version: int, grad: Tensor, *, keeps: bool | None = None) -> None:
        """Add the rows and the gradient of a lookup to those of the lookups before.

        Args:
            block: the rows that the lookup gathered.
            version: the table's, when it did.
            grad: the rows' gradient.
            keeps: whether the gradient of the lookups before stays; by default if it was not zeroed.
        """
        before = self._weight.grad
        if keeps is None:
            keeps = before is not None and not self.updates.is_zeroed(before)
        if self.block is not None and before is not None and keeps:
            block, grad = self._merged(self.block, before, block, version, grad)
        elif version != self._table.version:
            block = self._gather(block.rows, grad.device)  # other steps were taken since the forward pass
        self._adopt(block, grad)

    def _merged(
        self, block: Block, grad: Tensor, new: Block, new_version: int, new_grad: Tensor
    ) -> tuple[Block, Tensor]:
        """Return the union of the rows of two blocks, with the sum of their gradients."""
        device = new_grad.device
        union, places = kernels.unique(torch.cat([block.rows.to(new.rows.device), new.rows]))
        old_places, new_places = places[: len(block.rows)], places[len(block.rows) :]
        total = torch.zeros(len(union), new_grad.shape[1], dtype=new_grad.dtype, device=device)
        total.index_copy_(0, old_places, grad.to(device))
        total.index_copy_(0, new_places, total.index_select(0, new_places) + new_grad)
        are_current = self._version == new_version == self._table.version
        has_state = block.columns.keys() == new.columns.keys()  # else a step without rows has dropped it
        if not are_current or not has_state or self._weight.device != device:
            return self._gather(union, device), total
        columns = {}
        for name, values in new.columns.items():
            columns[name] = values.new_empty(len(union), *values.shape[1:])
            columns[name].index_copy_(0, new_places, values.detach())
            columns[name].index_copy_(0, old_places, self._weight.data if name == "weight" else block[name])
        return Block(union, columns), total

    def renew(self, grad: Tensor) -> None:
        """Gather the rows again, for another step with this gradient."""
        assert self.block is not None
        self._adopt(self._gather(self.block.rows, grad.device), grad)

    def _gather(self, rows: Tensor, device: torch.device) -> Block:
        return self._table.lease(rows, device=device)

    def _adopt(self, block: Block, grad: Tensor) -> None:
        """Let the weight stand for these rows."""
        self.block = block
        self._version = self._table.version
        self._weight.grad = None  # a gradient of another shape would not let the data change
        self._weight.data = block.weight.detach()
        self._weight.grad = grad
        self.updates.accept()

    def drop_state(self) -> None:
        """Note that weight and state are in the table now; rows and gradient may still be looked at."""
        assert self.block is not None
        self.block = Block(self.block.rows, {"weight": self.block.weight})
        self.updates.accept()

    def release(self) -> None:
        """Drop rows and gradient: the weight is a placeholder of one row."""
        self.block = None
        self._weight.grad = None
        if self._placeholder.device != self._weight.device:
            self._placeholder = self._weight.data.new_zeros(1, self._table.embedding_dim)
        self._weight.data = self._placeholder

    def save(self) -> Callable[[], None]:
        """Return a function that gives the weight its present rows and gradient again."""
        with as_plain():
            data, grad = self._weight.data, self._weight.grad
            values = None if grad is None else grad.detach().clone()
            block, version, updates = self.block, self._version, self.updates.save()

        @torch.no_grad()
        def restore() -> None:
            self._weight.grad = None  # or the data could not change its shape
            self._weight.data = data
            if grad is not None and values is not None:
                self._weight.grad = grad.copy_(values)
            self.block, self._version = block, version
            self.updates.restore(updates)

        return restore

    def contain(self, value: Tensor) -> bool:
        """Return whether a tensor lies in the memory that the rows came in."""
        assert self.block is not None
        memory = value.untyped_storage().data_ptr()
        return any(column.untyped_storage().data_ptr() == memory for column in self.block.columns.values())
