"""Rows on their way between a table and a file: a bounded piece of them at a time."""

from __future__ import annotations

import errno
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Texts
from speedswap.tables.disk.store import LogStore
from speedswap.tables.formats.keys import RowKeys
from speedswap.tables.memory.host import available_bytes
from speedswap.tables.record import Column
from speedswap.tables.store import RowStore

__all__ = [
    "PIECE_BYTES",
    "ColumnForm",
    "Incoming",
    "Outgoing",
    "Piece",
    "_Window",
    "_window_rows",
    "_windows",
    "rows_in_piece",
]

PIECE_BYTES = 8 << 20
_SHARE = 4  # of the free memory, of which a window takes one
_BYTES_FOR_A_READ = 16 << 10  # a disk reads as much in order in the time of a single read
_ROWS_AT_ONCE = 1 << 16


class ColumnForm(NamedTuple):
    """The dtype and the shape of a column's rows."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Items in a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Some consecutive rows.

    Attributes:
        start: the first one's number.
        values: by column, shape (n, ...), in ordinary memory.
        keys: numbers, int64, shape (n,), or texts; None where rows have none.
    """

    start: int
    values: dict[str, Tensor]
    keys: Tensor | Texts | None = None

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))


def rows_in_piece(forms: Sequence[ColumnForm]) -> int:
    """Return the rows that a piece of some columns has."""
    return max(1, PIECE_BYTES // max(1, sum(form.row_bytes for form in forms)))


class Outgoing:
    """Rows of a store on their way into a file. The table's lock is held.

    Args:
        store: the rows.
        columns: names.
        keys: of the rows, which are then those that have a key; None for all rows, without keys.
    """

    def __init__(self, store: RowStore, columns: Sequence[str], keys: RowKeys | None) -> None:
        self.keys = keys
        self.rows = range(store.num_embeddings) if keys is None else keys.rows
        self.columns: dict[str, Column] = {name: store.columns[name] for name in columns}
        self._store = store

    @property
    def forms(self) -> dict[str, ColumnForm]:
        """The columns' forms, by name."""
        return {name: ColumnForm(column.dtype, column.row_shape) for name, column in self.columns.items()}

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self) -> Iterator[Piece]:
        """Yield the rows in order, numbered from 0 on."""
        start = 0
        for values in self._values(rows_in_piece([*self.forms.values()])):
            piece = Piece(start, values)
            keys = None if self.keys is None else self.keys.take(start, start + len(piece))
            yield replace(piece, keys=keys)
            start += len(piece)

    def _values(self, step: int) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of ``step`` rows at a time."""
        names = [*self.columns]
        most = _window_rows(self._store, names, self.rows)
        if most is None:
            for start in range(0, len(self), step):
                rows = self.rows[start : start + step]
                yield {name: self._store.read(name, rows.start, rows.stop).cpu().contiguous() for name in names}
            return
        assert isinstance(self._store, LogStore)
        for window in _windows(self._store, names, self.rows, most):
            for start in range(0, len(window.rows), step):
                yield {name: values[start : start + step] for name, values in window.values.items()}


class Incoming(ABC):
    """The rows of a file, whose head has been checked: sizes are those of the file.

    Attributes:
        num_rows: rows.
        columns: forms by name; the first is the weight unless columns are chosen.
        key_kind: ``"exact"`` for keys that are texts, ``"int64"`` for numbers; None where rows have none.
    """

    num_rows: int
    columns: Mapping[str, ColumnForm]
    key_kind: str | None = None

    def require_readable_keys(self, columns: Sequence[str]) -> None:
        """Raise TableFormatError if rows have keys of a type that is not read, unless these are among ``columns``."""
        return None

    def choose(self, columns: Sequence[str]) -> None:
        """Take the number of rows from some columns, where it depends on them.

        Raises:
            TableFormatError: they have different ones.
        """
        return None

    @abstractmethod
    def pieces(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield all rows in order, with some of the columns.

        Raises:
            TableFormatError: the file is damaged from here on.
        """


class _Window(NamedTuple):
    """Consecutive rows.

    Attributes:
        rows: their numbers.
        values: by column, in ordinary memory.
    """

    rows: range
    values: dict[str, Tensor]


def _window_rows(store: RowStore, columns: Sequence[str], rows: range) -> int | None:
    """Return the rows that a window has; None if rows are better read one by one.

    Each window takes a walk over the whole log. That pays as long as the walks take less time than a read per group.
    """
    if not isinstance(store, LogStore):
        return None
    row_bytes = sum(store.columns[name].width * store.columns[name].dtype.itemsize for name in columns)
    most = max(1, available_bytes() // _SHARE // row_bytes)
    walks = -(-len(rows) // most)
    return most if walks * store.log.stats()["record_bytes"] <= _BYTES_FOR_A_READ else None


def _windows(store: LogStore, columns: Sequence[str], rows: range, most: int) -> Iterator[_Window]:
    """Yield rows in order, ``most`` of them at a time."""
    chosen = {name: store.columns[name] for name in columns}
    for start in range(0, len(rows), most):
        window = rows[start : start + most]
        values = {name: torch.empty(len(window), *each.row_shape, dtype=each.dtype) for name, each in chosen.items()}
        missing = torch.ones(len(window), dtype=torch.bool)
        try:
            for found, held in store.written_rows():
                inside = (found >= window.start) & (found < window.stop)
                places = found[inside] - window.start
                for name, column in chosen.items():
                    values[name][places] = _decoded(held[name][inside], column)
                missing[places] = False
        except OSError as error:
            if error.errno != errno.ESTALE:  # another process has written over some of them
                raise
            missing[:] = True
        for places in torch.split(missing.nonzero().flatten(), _ROWS_AT_ONCE):
            block = store.gather(places + window.start, columns, torch.device("cpu"))
            for name in chosen:
                values[name][places] = block.columns[name]
        yield _Window(window, values)


def _decoded(held: Tensor, column: Column) -> Tensor:
    """Return rows of a column, as blocks have them, of the bytes that records hold."""
    count, row_bytes = held.shape
    held = held.contiguous()
    records = kernels.Records(held.data_ptr(), row_bytes, count, held.device, False, held)
    block = torch.empty(count, *column.row_shape, dtype=column.dtype)
    kernels.gather_records(records, torch.arange(count), [kernels.Part(0, block, column.form())])
    return block
