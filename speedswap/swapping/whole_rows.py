"""All rows of a table in a ``state_dict``, or left out of it for a checkpoint that saves them separately.

If ranks own a table, each rank's state_dict holds a part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

from speedswap._words import AVERAGE_OTHERS, warn_once
from speedswap.errors import TableTooLargeError
from speedswap.tables import Table


def read_all(table: Table, column: str = "weight", dtype: torch.dtype | None = None) -> Tensor:
    """Copy all rows of a column; if ranks own the table, every rank must call this and gets its part.

    Returns:
        Shape (num_embeddings, ...), in host memory, of the dtype; if ranks own the rows, a DTensor of the column's
        dtype, whose ``full_tensor()`` returns all rows.

    Raises:
        TableTooLargeError: they do not fit in free memory.
    """
    joint = table.joint
    return table.read(column=column, dtype=dtype) if joint is None else joint.read_part(column)


def write_all(table: Table, values: Tensor, column: str = "weight") -> None:
    """Overwrite all rows of a column, as part of a step; if ranks own the table, every rank must call this.

    Args:
        table: the table.
        values: shape (num_embeddings, ...), the whole column on every rank, or a DTensor.
        column: its name.
    """
    joint = table.joint
    if joint is not None and is_divided(values):
        joint.write_part(column, values)
        return
    whole = cast(Any, values).full_tensor() if is_divided(values) else values
    table.write(0, whole.detach().to(table.columns[column].dtype), column=column, commit=False)


class HandedOut:
    """A record of a copy of a table's rows in a state_dict; it keeps only the copy's count of in-place changes.

    In a torch layer, changing the state_dict's tensor changes the layer. Here the change is lost unless it is loaded.

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
                "SW402",
                f"rows of table {table.name!r} in a state_dict were changed in place. They are a copy, and the "
                "table is unchanged: load the state_dict, or write rows with embedding.table.write; if that was an "
                f"EMA, {AVERAGE_OTHERS}",
            )


class _InFilesPlain(Tensor):
    """A tensor that is pickled as a plain tensor, so files do not name its class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


class OneValue(_InFilesPlain):
    """One value in a table's shape, as returned by ``full_like(weight)``; takes memory for all rows once written to.

    It is state made by an optimizer's constructor; torch.distributed.checkpoint loads into it in place.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name, written = func.__name__, args[0] if args else None
            if isinstance(written, OneValue) and (name == "__setitem__" or (name[-1] == "_" and name[-2] != "_")):
                written.__get_tensor_shard__()
            return func(*args, **(kwargs or {}))

    def __get_tensor_shard__(self, _: object = None) -> Tensor:
        if not self.is_contiguous():
            self.data = self.contiguous()
        return self.as_subclass(Tensor)


class MapBytes(_InFilesPlain):
    """An id map in a state_dict; torch.distributed.checkpoint saves it as an object.

    As a tensor it could be loaded only into one of the same shape, but a map's size depends on its keys.
    """

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]


def is_divided(value: object) -> bool:
    """Return whether a value is a DTensor; this rank then holds a part of it."""
    return hasattr(value, "full_tensor")


_apart = ContextVar("rows_apart", default=False)


@contextmanager
def rows_apart() -> Iterator[None]:
    """Leave tables' rows out when modules and optimizers save and load a ``state_dict``.

    For training loops of other libraries, which write what ``state_dict`` returns. Within this context they save
    everything but the rows and the rows' optimizer state, so no table has to fit in memory; save the rows with
    :func:`save_checkpoint`, which also saves the rest. Loading ignores rows in a ``state_dict``. The context applies to
    the current thread.

    Example:
        >>> import torch, speedswap
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16), torch.nn.Linear(16, 1))
        >>> with speedswap.swapping.rows_apart():
        ...     list(model.state_dict())
        ['1.weight', '1.bias']
    """
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def rows_are_apart(table: Table | None = None) -> bool:
    """Return whether the rows of all tables, or of this one, are left out: its other rows are in a checkpoint."""
    return _apart.get() or (table is not None and bool(table.columns["weight"].init.bases))


@contextmanager
def says_checkpoint() -> Iterator[None]:
    """Add the remedy to the error for a table that is too large for a state_dict."""
    try:
        yield
    except TableTooLargeError as error:
        found = str(error).partition(";")[0]
        raise TableTooLargeError(
            f"{found}; a state_dict holds whole tables: use speedswap.save_checkpoint(path, model, optimizer) and "
            "speedswap.load_checkpoint(path, model, optimizer), which do not; and around a library's calls that save a "
            "state_dict, with speedswap.swapping.rows_apart():"
        ) from error
