"""A store whose rows may lack steps, and take them before anyone sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, get_args

import torch
from torch import Tensor

from speedswap.kernels import deferred_interrupts
from speedswap.tables.init import chunks_of, ids_of, zeros
from speedswap.tables.memory import MemoryKind
from speedswap.tables.record import Block, Column
from speedswap.tables.store import Found, Prefetched, RowStore, WrappedStore

if TYPE_CHECKING:
    from speedswap.kernels import Lookup, Transfers
    from speedswap.tables.table import Table

LAST_STEP = "last_step"
"""The column, seen only here, that holds the number of the last step that a row has taken."""
_COLUMN = Column(LAST_STEP, (), torch.int32, zeros())


class Steps(Protocol):
    """Steps of an optimizer, which move every row, also those without a gradient."""

    @property
    def count(self) -> int:
        """The number of steps."""

    def take(self, columns: dict[str, Tensor], taken: Tensor) -> None:
        """Take the steps that rows have missed, in place.

        Args:
            columns: every column by name, shape (n, ...), on one device.
            taken: how many of the steps each row has taken, int32, shape (n,), on that device.
        """


class IdleStore(WrappedStore):
    """A store in front of another, whose rows take the steps they have missed when they are read.

    Rows that are written have taken every step. The number of each row's last step is kept with it, in 4 bytes.

    Args:
        inner: the store that holds the rows, in this process's memory.

    Attributes:
        steps: the steps that rows may have missed; None if every row is up to date.
    """

    view = RowStore.view  # refused: memory lacks steps

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self.steps: Steps | None = None
        self._before = 0  # the number of steps before these
        self._ahead = 0  # 1 while the rows of a step are written, before the step counts
        self._seen: tuple[dict[str, Column], dict[str, Column]] = {}, {}

    @classmethod
    def over(cls, table: Table) -> IdleStore:
        """Return the store that a table's rows are behind from now on, also for the tables of its parts."""
        if not isinstance(table.store, cls):
            idle = cls(table.store)
            for part in table.store.notes.parts:
                part.inner = idle
            table.store = idle
        return table.store

    @property
    def columns(self) -> dict[str, Column]:
        inner, seen = self._seen
        if inner is not self.inner.columns:
            inner = self.inner.columns
            seen = {name: column for name, column in inner.items() if name != LAST_STEP}
            self._seen = inner, seen
        return seen

    # ------------------------------------------------------------------ steps

    @property
    def _missed(self) -> int:
        """The number of steps that rows may have missed."""
        return 0 if self.steps is None else self.steps.count

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Write the rows of a step inside the block; the caller counts the step afterwards, unless that raised."""
        if LAST_STEP not in self.inner.columns:
            self.inner.add_columns([_COLUMN])
        self._ahead = 1
        try:
            yield
        finally:
            self._ahead = 0
        self.notes.note_change(None)  # every row changes

    def bring_up_to_date(self) -> None:
        """Write every row with the steps it has missed, a piece at a time."""
        if not self._missed:
            return
        for rows in chunks_of(self.facts.num_embeddings):
            block = self.gather(ids_of(rows))
            self._write(block, block.columns)
        with deferred_interrupts():
            self._before, self.steps = self._before + self._missed, None

    def _write(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        """Write all columns of rows that are up to date."""
        number, device = self._before + self._missed + self._ahead, values["weight"].device
        last = torch.full((block.rows.shape[0],), number, dtype=torch.int32, device=device)
        self.inner.scatter(block, {**values, LAST_STEP: last}, transfers)

    def take(self, block: Block) -> None:
        """Bring a block with all columns up to date, in place; it loses the numbers of its rows' last steps."""
        last = block.columns.pop(LAST_STEP)
        if self.steps is not None:
            self.steps.take(block.columns, last - self._before)

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        names = tuple(self.columns) if columns is None else columns
        if not self._missed:
            return self.inner.gather(rows, names, device, out)
        block = self.inner.gather(rows, None, device)
        self.take(block)
        found = {name: block[name] for name in names}
        for name in (out or {}).keys() & found.keys():
            found[name] = out[name].copy_(found[name])  # type: ignore[index]
        return Block(rows, found, block.place)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        if not self._missed and not self._ahead:
            self.inner.scatter(block, values, transfers)
            return
        if values.keys() != self.columns.keys():  # the other columns have to take their steps too
            rest = self.gather(block.rows, device=next(iter(values.values())).device)
            values = {**rest.columns, **values}
        self._write(block, values, transfers)

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        return _Prefetched(self, self.inner.prefetch(lookup, transfers))

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        if not self._missed:
            return self.inner.read(column, start, stop, device)
        return self.gather(ids_of(range(start, stop)), [column], device)[column]

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.bring_up_to_date()
        self.inner.write(column, start, values)

    def add_columns(self, columns: Sequence[Column]) -> None:
        self.bring_up_to_date()
        self.inner.add_columns(columns if LAST_STEP in self.inner.columns else [*columns, _COLUMN])

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.bring_up_to_date()
        self.inner.reset_columns(columns)

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        self.bring_up_to_date()
        for rows, held in self.inner.written_rows():
            held.pop(LAST_STEP, None)
            yield rows, held


def require_in_memory(table: Table) -> None:
    """Raise ValueError unless a table's rows are in this process's memory alone, where nothing else reads them."""
    if table.storage not in (*get_args(MemoryKind), "file") or table.ranks is not None:
        raise ValueError(
            f"idle_rows is 'dense', but {table!r} is not in this process's memory alone: others would find rows that "
            "lack steps; give storage='pageable', 'pinned' or 'device', and keep the rows with save_checkpoint"
        )


class _Prefetched(Prefetched):
    """A gather ahead, whose rows take the steps they have missed when they are taken."""

    def __init__(self, store: IdleStore, inner: Prefetched) -> None:
        self._store, self._inner = store, inner

    def take(self) -> Found | None:
        found = self._inner.take()
        if found is not None and LAST_STEP in found[0].columns:
            self._store.take(found[0])
        return found
