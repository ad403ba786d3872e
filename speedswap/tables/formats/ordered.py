"""Rows of a log in the order of their numbers, read in the order of the log: a window of rows at a time."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.disk.store import LogStore
from speedswap.tables.memory.host import available_bytes
from speedswap.tables.record import Column
from speedswap.tables.store import RowStore

__all__ = ["Window", "window_rows", "windows"]

_SHARE = 4  # of the free memory, of which a window takes one
_BYTES_FOR_A_READ = 16 << 10  # a disk reads as much in order in the time of a single read
_ROWS_AT_ONCE = 1 << 16


class Window(NamedTuple):
    """Consecutive rows.

    Attributes:
        rows: their numbers.
        values: by column, in ordinary memory.
    """

    rows: range
    values: dict[str, Tensor]


def window_rows(store: RowStore, columns: Sequence[str], rows: range) -> int | None:
    """Return the rows that a window has; None if rows are better read one by one.

    Each window takes a walk over the whole log. That pays as long as the walks take less time than a read per group.
    """
    if not isinstance(store, LogStore):
        return None
    row_bytes = sum(store.columns[name].width * store.columns[name].dtype.itemsize for name in columns)
    most = max(1, available_bytes() // _SHARE // row_bytes)
    walks = -(-len(rows) // most)
    return most if walks * store.log.stats()["record_bytes"] <= _BYTES_FOR_A_READ else None


def windows(store: LogStore, columns: Sequence[str], rows: range, most: int) -> Iterator[Window]:
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
        yield Window(window, values)


def _decoded(held: Tensor, column: Column) -> Tensor:
    """Return rows of a column, as blocks have them, of the bytes that records hold."""
    count, row_bytes = held.shape
    held = held.contiguous()
    records = kernels.Records(held.data_ptr(), row_bytes, count, held.device, False, held)
    block = torch.empty(count, *column.row_shape, dtype=column.dtype)
    kernels.gather_records(records, torch.arange(count), [kernels.Part(0, block, column.form())])
    return block
