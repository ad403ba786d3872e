"""Several tables as one: prefetch the rows of a batch, and write those of a step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from speedswap.kernels import Lookup, Transfers
from speedswap.tables.store import Prefetched
from speedswap.tables.table import Table

__all__ = ["Commit", "prefetch"]


def prefetch(lookups: Iterable[tuple[Table, Tensor, torch.device]]) -> list[Prefetched]:
    """Begin to look up a later batch's ids in any number of tables.

    On a GPU the rows of all lookups are found in one round trip, before the first are gathered.

    Args:
        lookups: tables, each with ids (int64 or int32, any shape, at least one; nothing changes them any more) and the
            device where the block goes.

    Returns:
        The pending rows of each lookup, to be taken once, while the table's lock is held.
    """
    wanted, transfers = list(lookups), Transfers("in")
    with ExitStack() as held:
        # In one order, so that two threads with the same tables do not wait for each other.
        for table in sorted({table for table, _, _ in wanted}, key=id):
            held.enter_context(table.lock)
            table.check_open()
        prefetched = [
            table.store.prefetch(Lookup(ids, table.num_embeddings, f"table {table.name!r}", device), transfers)
            for table, ids, device in wanted
        ]
        transfers.start()
        return prefetched


class Commit:
    """The end of a step: what it writes to any number of tables goes as one, and each table's store then commits.

    A context manager. Leaving it, also with an exception, starts the transfers and commits the tables added so far.
    """

    def __init__(self) -> None:
        self._transfers: Transfers | None = None
        self._tables: list[Table] = []

    @property
    def transfers(self) -> Transfers:
        """Scatters that may run behind the next step."""
        if self._transfers is None:
            self._transfers = Transfers("out")
        return self._transfers

    def add(self, table: Table) -> None:
        """Add a table that the step has written."""
        self._tables.append(table)

    def __enter__(self) -> Commit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._transfers is not None:
                self._transfers.start()
        finally:
            self._commit(0)

    def _commit(self, first: int) -> None:
        """Commit the tables from one on: each of them, also where an earlier one raises."""
        for place in range(first, len(self._tables)):
            try:
                self._tables[place].commit()
            except BaseException:
                self._commit(place + 1)
                raise
