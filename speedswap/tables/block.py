"""A batch's rows on the compute device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.tables.record import Column

__all__ = ["Block", "fitting"]


class Block:
    """A batch's rows on the compute device: one contiguous tensor for each column, in the order of ``rows``.

    A block of :meth:`speedswap.Table.lease` is a lease: its table takes the same block back.

    Args:
        rows: ids, shape (n,).
        columns: by name, tensors of shape (n, ...).
        place: what the store notes of where the rows lie, for itself alone.
    """

    __slots__ = ("columns", "place", "rows")

    def __init__(self, rows: Tensor, columns: dict[str, Tensor], place: Any = None) -> None:
        self.rows = rows
        self.columns = columns
        self.place = place

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def weight(self) -> Tensor:
        """The rows' weights, shape (n, embedding_dim)."""
        return self.columns["weight"]


def fitting(
    values: Block | Tensor | Mapping[str, Tensor], columns: Mapping[str, Column], num_rows: int, table: str
) -> Mapping[str, Tensor]:
    """Return tensors by column name, once they are known to fit the columns.

    Raises:
        ValueError, TypeError: a column does not exist, or a tensor's shape or dtype is not the column's.
    """
    if isinstance(values, Block):
        values = values.columns
    elif isinstance(values, Tensor):
        values = {"weight": values}
    elif not isinstance(values, Mapping):
        raise TypeError(f"values is {a_kind(values)}; give a block, a tensor of weights, or tensors by column name")
    for name, tensor in values.items():
        if name not in columns:
            raise ValueError(f"column {name!r} is not in table {table!r}; it has {', '.join(columns)}")
        kernels.require_dense(tensor, f"values[{name!r}]")
        wanted = (num_rows, *columns[name].row_shape)
        if tensor.dtype != columns[name].dtype:
            raise TypeError(
                f"values of column {name!r} are {tensor.dtype}, the table's are {columns[name].dtype}; convert them"
            )
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"values of column {name!r} have shape {tuple(tensor.shape)}; they must have {wanted}")
    return values
