"""Rows on their way into the cache of a row log."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from speedswap.errors import TableBusyError
from speedswap.kernels import _C

__all__ = ["Bringing", "int64s", "says_if_busy"]


class Bringing:
    """Rows that are on their way into the cache, and stay there until the bringing is released.

    :meth:`wait` first; then either :meth:`filled`, if groups are fresh, or :meth:`RowLog.write`, if rows were brought
    to be overwritten; then :meth:`release`, which leaving a ``with`` block does. A release before these leaves the
    groups as they were.
    """

    def __init__(self, bringing: _C.Bringing) -> None:
        self._bringing = bringing

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait until the rows are in the cache.

        Returns:
            The place of each row, int64, shape (n,): its record is ``place * row_bytes`` behind ``cache_pointer``. And
            the fresh groups, int64, shape (m, 3): slot, group and layout. The caller fills them, all rows of each: of
            layout -1 wholly, and of an older layout the columns that this did not have.

        Raises:
            OSError: a read failed.
            RowLogDamaged: a record's checksum does not hold.
            RuntimeError: the bringing was released.
            TableBusyError: a writer elsewhere wrote over the rows faster than they could be read.
        """
        with says_if_busy():
            places, fresh = self._bringing.wait()
        return int64s(places), int64s(fresh).view(-1, 3)

    def filled(self) -> None:
        """Mark the fresh groups as filled."""
        self._bringing.filled()

    def release(self) -> None:
        """Let the rows be evicted. Has no effect the second time."""
        self._bringing.release()

    def __enter__(self) -> Bringing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def says_if_busy() -> Iterator[None]:
    """Raise TableBusyError, which names the remedy, where a writer elsewhere is faster than this reader."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TableBusyError) or error.errno != errno.EBUSY:
            raise
        raise TableBusyError(
            error.errno,
            "another process wrote over the table's log each time that it was read here: try again, or let the writer "
            "commit less often",
        ) from error


def int64s(buffer: _C.Buffer) -> Tensor:
    """Return a buffer as an int64 tensor that shares its memory."""
    if not len(memoryview(buffer)):
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(buffer, dtype=torch.int64)
