"""All rows of a table in a ``state_dict``, or left out of it for a checkpoint, which has them apart.

Of a table that ranks own, a state_dict holds a part on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

from speedswap._warnings import warn_once
from speedswap._words import AVERAGE_OTHERS
from speedswap.errors import TableTooLargeError
from speedswap.tables import Table


def read_all(table: Table, column: str = "weight") -> Tensor:
    """Copy all rows of a column; of a table that ranks own, every rank calls this and gets its part.

    Returns:
        Shape (num_embeddings, ...), in host memory; a DTensor where ranks own the rows, which ``full_tensor()`` makes
        whole.

    Raises:
        TableTooLargeError: they do not fit into free memory.
    """
    joint = table.store.joint
    return table.read(column=column) if joint is None else joint.read_part(column)


def write_all(table: Table, values: Tensor, column: str = "weight") -> None:
    """Overwrite all rows of a column, as a part of a step; of a table that ranks own, every rank calls this.

    Args:
        table: the table.
        values: shape (num_embeddings, ...), whole on every rank, or a DTensor.
        column: its name.
    """
    joint = table.store.joint
    if joint is not None and is_divided(values):
        joint.write_part(column, values)
        return
    whole = cast(Any, values).full_tensor() if is_divided(values) else values
    table.write(0, whole.detach().to(table.columns[column].dtype), column=column, commit=False)


class HandedOut:
    """A copy of a table's rows in a state_dict, of which only the count of its changes in place is kept.

    With torch's layers such a change is one of the layer. Here it is lost, unless it is loaded.

    Args:
        rows: the copy.
    """

    def __init__(self, rows: Tensor) -> None:
        self._counter = rows.detach()
        self._counter.data = torch.empty(0, dtype=rows.dtype)  # the rows are not kept
        self._seen = self._counter._version

    def warn_if_changed(self, table: Table) -> None:
        """Warn once if the copy was changed."""
        if self._counter._version != self._seen:
            warn_once(
                f"SW402: rows of table {table.name!r} in a state_dict were changed in place. They are a copy, and the "
                "table is as before: load the state_dict, or write rows with embedding.table.write; if that was an "
                f"EMA, {AVERAGE_OTHERS}"
            )


class MapBytes(Tensor):
    """An id map in a state_dict, which torch.distributed.checkpoint saves as an object.

    It loads a tensor only where one of the same shape is, but a map's bytes are as many as its keys take.
    """

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)  # so that files do not name this class
        return plain.__reduce_ex__(protocol)


def is_divided(value: object) -> bool:
    """Return whether a value is a DTensor, of which this rank has a part."""
    return hasattr(value, "full_tensor")


_apart = ContextVar("rows_apart", default=False)


@contextmanager
def rows_apart() -> Iterator[None]:
    """Let modules and optimizers leave out the rows of their tables as they save and load a state_dict."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def rows_are_apart() -> bool:
    """Return whether the rows of tables are left out."""
    return _apart.get()


@contextmanager
def says_checkpoint() -> Iterator[None]:
    """Name the remedy where a table is too large for a state_dict."""
    try:
        yield
    except TableTooLargeError as error:
        found = str(error).partition(";")[0]
        raise TableTooLargeError(
            f"{found}; a state_dict holds whole tables: use speedswap.save_checkpoint(path, model, optimizer) and "
            "speedswap.load_checkpoint(path, model, optimizer), which do not"
        ) from error
