"""Whole columns of a table, or ranges of their rows: read, written, viewed, added, reset and reserved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.tables import whole_table
from speedswap.tables.block import fitting
from speedswap.tables.initial import require_sources
from speedswap.tables.record import Column, whole_number

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = [
    "add_columns",
    "put",
    "read",
    "require_alike",
    "require_zero_row",
    "reserve",
    "reset_columns",
    "rows_between",
    "view",
    "write",
]


def read(table: Table, start: int = 0, stop: int | None = None, *, column: str = "weight") -> Tensor:
    """Copy rows ``start`` to ``stop`` of a column into ordinary memory.

    Raises:
        TableTooLargeError: they do not fit into free memory; read fewer rows, or use :meth:`save`.
        TypeError: ids were given.
    """
    for name, bound in (("start", start), ("stop", stop)):
        if getattr(bound, "shape", ()) or isinstance(bound, list | tuple):
            raise TypeError(
                f"{name} is {a_kind(bound)}, but Table.read copies the rows between two numbers; for ids call "
                "Embedding.read(ids) or Table.gather(ids)"
            )
    start, stop, _ = slice(start, stop).indices(table.num_embeddings)
    stop = max(start, stop)
    with table.lock:
        table.check_open()
        found = column_of(table, column)
        whole_table.require_memory(
            (stop - start) * found.width * found.dtype.itemsize,
            f"rows {start} to {stop - 1} of column {column!r} of table {table.name!r}",
        )
        is_copy = found.compact or table.store.reads_copies
        return table.store.read(column, start, stop).to("cpu", copy=not is_copy).contiguous()


@contextmanager
def rows_between(table: Table, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
    """Provide the weights of rows ``start`` to ``stop`` on a device, to be read inside the block and not changed.

    Yields:
        Shape (stop - start, embedding_dim): a view of the table's memory if that is on the device and holds them
        in this dtype; else a copy.
    """
    with table.lock:
        table.check_open()
        yield table.store.read("weight", start, stop, device)


def write(table: Table, start: int, values: Tensor, *, column: str = "weight", commit: bool = True) -> None:
    """Overwrite rows of a column from ``start`` on.

    Args:
        start: the first row.
        values: shape (n, ...), of the column's dtype and row shape, on any device; rounded to nearest where the
            column is stored in fewer bytes.
        column: its name.
        commit: True for a step of its own, after which a table on disk may commit; False for a part of one.

    Raises:
        IdError: the rows do not all lie in the table.
        TypeError, ValueError: dtype or shape does not fit, or ranks that own the rows together give different values.
            Nothing was written.
    """
    kernels.require_dense(values, "values")
    fitting({column: values}, table.columns, len(values), table.name)
    if start < 0 or start + len(values) > table.num_embeddings:
        raise IdError(
            f"rows {start} to {start + len(values) - 1} were to be written, but table {table.name!r} has rows 0 to "
            f"{table.num_embeddings - 1}"
        )
    require_alike(table, values, f"values of column {column!r} of")
    put(table, start, values, column)
    if commit:
        table.commit()


def require_alike(table: Table, given: object, what: str) -> None:
    """Raise ValueError, on all ranks that own the rows together, unless all of them were given the same.

    Args:
        given: a tensor, or settings.
        what: that is, for the message, before the table's name.
    """
    if table.ranks is not None:
        table.ranks.require_alike(given, f"{what} table {table.name!r}")


def put(table: Table, start: int, values: Tensor, column: str = "weight") -> None:
    """Overwrite rows of a column as :func:`write` does, with values that were checked, as a part of a step.

    Where ranks own the rows together, each writes its own, and nobody compares the values.
    """
    with table.lock:
        table.check_open(writing=True)
        table.store.note_change(range(start, start + len(values)))
        table.store.write(column, start, values)


def view(table: Table, column: str = "weight") -> Tensor:
    """Return all rows of a column as a tensor over the table's own memory: writing to it writes to the table.

    Its use is not guarded: checks, version and room on disk are settled now, once, so that a file takes its full
    size. It must not be used after the table is closed, nor on the CPU while a GPU works on a pinned table.

    Returns:
        A tensor (num_embeddings, ...), not contiguous where records hold more than this column; of the dtype in
        which the column is stored.

    Raises:
        TypeError: the column is stored as int8 with scales.
        TableFullError: the disk has no room for every row.
    """
    with table.lock:
        table.check_open(writing=True)
        column_of(table, column)
        table.store.note_change(None)
        table.store.notes.is_viewed = True
        return table.store.view(column)


def add_columns(table: Table, columns: Sequence[Column], *, commit: bool = True) -> None:
    """Give every row more columns, at their initial values.

    Before the table is first written they share its records (initial values are computed again); afterwards they
    start new records next to the others.

    Args:
        columns: names and initial values.
        commit: whether they, and everything before, are durable when this returns; False leaves that to the next
            commit, as inside a step.

    Raises:
        ValueError: a column of that name exists, its zero_row is not a row, or it is to begin as a copy of a column
            that does not exist or has rows of another shape.
    """
    with table.lock:
        table.check_open(writing=True)
        for column in columns:
            if column.name in table.columns:
                raise ValueError(f"column {column.name!r} exists already in table {table.name!r}")
            require_zero_row(column.zero_row, table.num_embeddings)
        require_sources(columns, table.columns, table.name)
        if columns:
            if commit:
                table.store.flush()  # so that the columns are committed at once
            table.store.note_change(None)
            table.store.add_columns(columns)


def reset_columns(table: Table, columns: Sequence[Column]) -> None:
    """Give existing columns their initial values again, in every row.

    Args:
        columns: names and initial values; everything else is taken from the table's own columns.

    Raises:
        ValueError: as for :meth:`add_columns`.
    """
    with table.lock:
        table.check_open(writing=True)
        for column in columns:
            column_of(table, column.name)
            require_zero_row(column.zero_row, table.num_embeddings)
        require_sources(columns, table.columns, table.name)
        if columns:
            table.store.note_change(None)
            table.store.reset_columns(columns)


def reserve(table: Table, columns: Collection[str]) -> None:
    """Make sure that writing every row of some columns cannot fail for want of room.

    Raises:
        TableFullError: the disk has no room. Nothing was written.
    """
    with table.lock:
        table.check_open(writing=True)
        if table.store.files is not None:
            table.store.files.reserve(columns)


def column_of(table: Table, name: str) -> Column:
    """Return a column.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in table.columns:
        raise ValueError(f"column {name!r} is not in table {table.name!r}; it has {', '.join(table.columns)}")
    return table.columns[name]


def require_zero_row(zero_row: int | None, num_embeddings: int) -> int | None:
    """Return a column's zero_row as an int, or None.

    Raises:
        ValueError: it is not a row of the table.
    """
    last = num_embeddings - 1
    if zero_row is None:
        return None
    return whole_number("zero_row", zero_row, 0, last, remedy=f"give one of the table's rows, 0 to {last}, or None")
