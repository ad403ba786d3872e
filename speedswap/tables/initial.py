"""The initial values of any rows of a table, computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.tables.init import ColumnMemory, CopyOf, from_json
from speedswap.tables.record import Column

__all__ = [
    "Origin",
    "initial_chunk",
    "initial_values",
    "is_lazy",
    "origins_of",
    "require_functions_of_row",
    "require_sources",
    "starts_of",
]

_CPU = torch.device("cpu")


class Origin(NamedTuple):
    """The columns that the values of a column's untouched rows come from.

    Attributes:
        start: the column whose initial values they are; for one that began as a copy the column that was copied, as it
            was then.
        through: the columns that copied ``start``, each the one before, as they began; this one last. Empty if it began
            with values of its own.
    """

    start: Column
    through: tuple[Column, ...] = ()

    @classmethod
    def of(cls, column: Column, known: Mapping[str, Origin]) -> Origin:
        """Return the origin of a column that begins now, after others."""
        if not isinstance(column.init, CopyOf):
            return cls(column)
        source = known[column.init.column]
        return cls(source.start, (*source.through, column))


def origins_of(columns: Mapping[str, Column]) -> dict[str, Origin]:
    """Return the origins of columns none of which has begun anew since another one copied it."""
    found: dict[str, Origin] = {}
    for name, column in columns.items():
        found[name] = Origin.of(column, found)
    return found


def starts_of(
    columns: Mapping[str, Column],
    origins: Mapping[str, Origin],
    seen_as: Callable[[Column], Column] = lambda each: each,
) -> dict[str, list[tuple[object, ...]]]:
    """Return all that the values of untouched rows depend on, but for the table's seed, by column.

    Args:
        columns, origins: the table's.
        seen_as: returns the column of the whole table, given one of a part.
    """
    return {
        name: [
            (each.name, each.init.to_json(), each.zero_row, each.row_shape, each.dtype, each.stored_dtype)
            for each in map(seen_as, (origin.start, *origin.through, columns[name]))
        ]
        for name, origin in origins.items()
    }


def is_lazy(column: Column) -> bool:
    """Return whether the initial values of untouched rows can be computed whenever the table is opened again."""
    return isinstance(column.init, CopyOf) or from_json(column.init.to_json()) is not None


def require_functions_of_row(columns: Mapping[str, Column], table: str) -> None:
    """Raise ValueError if a column's initial values cannot be computed again."""
    for name, column in columns.items():
        if not column.init.is_function_of_row:
            kind = column.init.to_json().get("kind")
            raise ValueError(
                f"column {name!r} of table {table!r} has initial values of kind {kind!r}, which cannot be computed "
                "again for rows that start anew; make the table with one of speedswap.init"
            )


def require_sources(columns: Sequence[Column], present: Mapping[str, Column], table: str) -> None:
    """Raise ValueError if columns begin as copies of others that are not there, or have rows of another shape.

    Args:
        columns: about to be made, or to begin anew, in this order.
        present: the table's columns.
        table: its name, for the message.
    """
    known = {name: column.row_shape for name, column in present.items()}
    for column in columns:
        if isinstance(column.init, CopyOf):
            source, shape = column.init.column, known.get(column.name, column.row_shape)
            if source == column.name or known.get(source) != shape:
                fitting = ", ".join(name for name in known if known[name] == shape and name != column.name)
                raise ValueError(
                    f"column {column.name!r} of table {table!r} was to begin as a copy of {source!r}, which is not "
                    f"another column with rows of shape {shape}; copy one of {fitting or 'no column'}"
                )
        known.setdefault(column.name, column.row_shape)


def initial_values(columns: Mapping[str, Column], rows: Tensor, seed: int, num_embeddings: int) -> dict[str, Tensor]:
    """Return the values that rows had when their columns were made.

    Args:
        columns: every column of the table; one that began as a copy of another gets that one's initial values.
        rows: int64, shape (n,), ascending, in host memory.
        seed: the table's.
        num_embeddings: the table's.

    Returns:
        Tensors (n, ...) in host memory by column, of the dtype of blocks. Those that are stored in fewer bytes are
        rounded to nearest already, so that no rounding changes them.
    """
    values: dict[str, Tensor] = {}

    def of(name: str) -> Tensor:
        if name not in values:
            values[name] = _of_column(columns[name])
        return values[name]

    def _of_column(column: Column) -> Tensor:
        if isinstance(column.init, CopyOf):
            source = columns[column.init.column]
            found = column.begun_as(source.as_read(of(source.name)), rows)
        else:
            memory = ColumnMemory.chunk(
                0, len(rows), column.row_shape, num_embeddings, seed, column.key, _CPU, column.dtype
            )
            column.init.fill_rows(memory, rows)
            found = memory.view
            if column.zero_row is not None:
                found[rows == column.zero_row] = 0
        if column.compact and column.stored_dtype.is_floating_point:
            found = found.to(column.stored_dtype).to(column.dtype)
        return found

    return {name: of(name) for name in columns}


def initial_chunk(column: Column, start: int, count: int, num_embeddings: int, seed: int) -> Tensor:
    """Return the initial values of rows ``start`` to ``start + count - 1``, of the dtype of blocks, in host memory.

    Args:
        column: not one that begins as a copy of another.
        start: a multiple of the initializers' chunks.
        count: at most a chunk.
        num_embeddings: the table's.
        seed: the table's.
    """
    chunk = ColumnMemory.chunk(start, count, column.row_shape, num_embeddings, seed, column.key, _CPU, column.dtype)
    column.init.fill(chunk, start, count)
    if column.zero_row is not None and start <= column.zero_row < start + count and not column.init.is_given:
        chunk.rows(column.zero_row, 1).zero_()
    return chunk.view
