"""What training of a table's rows must give, computed with torch alone.

Every row's weight and state lie in plain tensors. A step makes a parameter of the rows that have a gradient, gives
torch's own optimizer their state, and puts back what it made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["RowsAlone", "step_rows"]


class RowsAlone:
    """The rows of one table as plain tensors.

    Args:
        weight: every row as it is now.
        initial: what rows that have not been trained yet have as state, by name; 0 where it is not named.
        stored: in what the weights are held between steps, rounded to nearest.
        state_stored: the same for float32 state with several numbers per row.
    """

    def __init__(
        self,
        weight: Tensor,
        initial: Mapping[str, float],
        stored: torch.dtype | None = None,
        state_stored: torch.dtype | None = None,
    ) -> None:
        self.weight = weight.clone()
        self.initial = initial
        self.stored = stored
        self.state_stored = state_stored
        self.columns: dict[str, Tensor] = {}
        self.scalars: dict[str, Any] = {}
        self.grad = torch.zeros_like(weight)
        self.has_grad = torch.zeros(len(weight), dtype=torch.bool)
        self.placeholder = nn.Parameter(torch.zeros_like(weight[:1]))
        self.parameter: nn.Parameter | None = None

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct rows, a leaf of their weights, and each id's place among them."""
        rows, local = torch.unique(ids, return_inverse=True)
        return rows, self.weight[rows].requires_grad_(), local

    def collect(self, rows: Tensor, grad: Tensor | None) -> None:
        """Add a backward pass's gradient to that of the window."""
        if grad is not None:
            old = torch.where(self.has_grad[rows].unsqueeze(1), self.grad[rows] + grad, grad)
            self.grad[rows] = old
            self.has_grad[rows] = True

    def zero_grad(self) -> None:
        """Forget the window's gradient: its rows have no part in the next step."""
        self.has_grad[:] = False

    def prepare(self) -> list[nn.Parameter]:
        """Make the parameter that the optimizer will step on; none where no row has a gradient."""
        if not bool(self.has_grad.any()):
            self.parameter = None
            return []
        self.parameter = nn.Parameter(self.weight[self.has_grad])
        self.parameter.grad = self.grad[self.has_grad]
        return [self.parameter]

    def put_into(self, optimizer: Optimizer) -> None:
        """Let the optimizer hold the parameter, with its rows' state, in place of the placeholder."""
        if self.parameter is None:
            return
        _replace(optimizer, self.placeholder, self.parameter)
        if not self.columns and not self.scalars:
            made = optimizer.state.pop(self.placeholder, {})  # Adagrad makes its state when it is constructed
            self.scalars = {key: value for key, value in made.items() if not _is_by_row(value)}
            for key in made.keys() - self.scalars.keys():
                self._begin(key, made[key].dtype, self.weight.shape[1:])
        if self.columns or self.scalars:
            columns = {key: values[self.has_grad] for key, values in self.columns.items()}
            optimizer.state[self.parameter] = {**{k: _copied(v) for k, v in self.scalars.items()}, **columns}

    def take_from(self, optimizer: Optimizer) -> None:
        """Put back what a step has made of weight, gradient and state."""
        if self.parameter is None:
            return
        _replace(optimizer, self.parameter, self.placeholder)
        for key, value in optimizer.state.pop(self.parameter, {}).items():
            if _is_by_row(value):
                if key not in self.columns:
                    self._begin(key, value.dtype, value.shape[1:])
                self.columns[key][self.has_grad] = self._held(
                    value, self.state_stored if value[0].numel() > 1 else None
                )
            else:
                self.scalars[key] = value
        self.weight[self.has_grad] = self._held(self.parameter.detach(), self.stored)
        assert self.parameter.grad is not None
        self.grad[self.has_grad] = self.parameter.grad
        self.parameter = None

    def _begin(self, key: str, dtype: torch.dtype, row_shape: Iterable[int]) -> None:
        first = torch.full((len(self.weight), *row_shape), self.initial.get(key, 0.0), dtype=dtype)
        self.columns[key] = self._held(first, self.state_stored if first[0].numel() > 1 else None)

    @staticmethod
    def _held(values: Tensor, stored: torch.dtype | None) -> Tensor:
        return values if stored is None or values.dtype != torch.float32 else values.to(stored).to(values.dtype)


def step_rows(optimizer: Optimizer, tables: Iterable[RowsAlone]) -> None:
    """Step on the rows of all tables that are prepared, and on whatever else the optimizer holds."""
    tables = list(tables)
    for table in tables:
        table.put_into(optimizer)
    optimizer.step()
    for table in tables:
        table.take_from(optimizer)


def _replace(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]


def _is_by_row(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
