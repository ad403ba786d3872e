"""The door to a table's rows: :class:`RowStore`, the interface of any place that holds them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap._locks import Locked
from speedswap.tables.init import chunks_of
from speedswap.tables.initial import Origin, origins_of
from speedswap.tables.notes import Notes
from speedswap.tables.record import Block, Column

if TYPE_CHECKING:
    from speedswap.collectives import RankGroup
    from speedswap.kernels import Lookup, Transfers
    from speedswap.tables.shards import Owners
    from speedswap.tables.table import Table


@dataclass
class Checked:
    """The outcome of reading all of a table.

    Attributes:
        rows: rows that were read.
        nbytes: bytes that were read.
        damaged: ranges of rows that cannot be read, or whose checksum does not match.
        problems: a sentence for each problem.
    """

    rows: int = 0
    nbytes: int = 0
    damaged: list[range] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Found = tuple[Block, Tensor]
"""A batch's rows, and each id's place among them."""


class Prefetched(ABC):
    """A gather that runs ahead of its step."""

    @abstractmethod
    def take(self) -> Found | None:
        """Return the rows as the store has them now. Once only.

        Returns:
            None where the store has to be asked for them: an id is out of range, or the rows are stale.
        """

    def has_turn(self) -> bool:
        """Wait for the other ranks that own the rows; return False if one of them has no batch for this turn.

        Raises:
            PeerError: since one has failed.
        """
        return True


class _NotPrefetched(Prefetched):
    """Rows that their store is asked for when they are needed."""

    def take(self) -> None:
        return None


class RowStore(ABC):
    """A place that holds a table's records. :class:`Table` puts names, checks and a lock in front of it.

    A store sees rows that are known to be in range (in a scatter also unique), and tensors that are known to fit. It
    never sees a model or an optimizer. One thread at a time calls its methods: the table's lock is held. A method that
    returns has taken effect for every later call; whether a scatter has reached the memory, and how transfers are
    ordered, is the store's own business. A method that raises has changed nothing.

    What is not abstract has a default: of a store in memory, without prefetch and without pending writes. To put a
    store in front of another one, derive from :class:`WrappedStore`.

    Attributes:
        num_embeddings: rows.
        storage: where they live.
        engine: how they go between host memory and a GPU.
        seed: of the initial values.
        name: for messages.
        notes: what is kept with the rows, and how many scatters there were, which the store counts.
        part_name: of rows that are a part of another store's: the name of their id map among those of the notes.
        reads_copies: whether :meth:`read` returns memory of its own, never a view of the store's.
        commits: the commits that stay; None where a store has none.
        files: the files that the rows are in; None where there are none.
        group: the ranks of a job that hold the rows together, if they do: all of them make a call about rows, each with
            rows of its own or none.
        joint: what only such ranks do, where the store is theirs; None for any other.
    """

    num_embeddings: int
    storage: str
    engine: str = "auto"
    seed: int = 0
    name: str = "table"
    part_name: str = ""
    reads_copies: bool = False
    group: RankGroup | None = None
    joint: JointRows | None = None

    @cached_property
    def locked(self) -> Locked:
        """The lock of every table over these rows."""
        return Locked()

    @cached_property
    def notes(self) -> Notes:
        """The notes of these rows."""
        return Notes()

    @property
    def commits(self) -> Commits | None:
        """The commits that stay."""
        return None

    @property
    def files(self) -> Files | None:
        """The files that the rows are in."""
        return None

    # ------------------------------------------------------------------ description

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The columns by name, ``weight`` first."""

    @property
    def origins(self) -> dict[str, Origin]:
        """The columns whose initial values untouched rows have, by the names of those that have them."""
        return origins_of(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as stored: every column, with the padding between records."""
        return self.num_embeddings * sum(column.row_bytes for column in self.columns.values())

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once :meth:`close` was called."""

    @property
    def pinned(self) -> bool:
        """True if CUDA kernels read and write this host memory directly."""
        return False

    def check(self, *, writing: bool = False) -> bool:
        """Check that this process can use the rows, and bring the store up to date with another writer.

        Returns:
            Whether rows or columns have changed since the last call without a call of this store's methods.

        Raises:
            TableClosedError: they cannot be read, or written where that is asked for.
        """
        return False

    def is_backed_by(self, memory: Tensor) -> bool:
        """Return whether a tensor lies in the memory that holds the rows."""
        return False

    def note_change(self, rows: Tensor | range | None) -> None:
        """Note that rows are about to change: ids, a range of rows, or all rows and columns."""
        self.notes.note_change(rows)

    # ------------------------------------------------------------------ batches of rows

    @abstractmethod
    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        """Copy rows to a device, as of all scatters so far.

        Args:
            rows: int64 or int32, shape (n,), on any device.
            columns: names; all columns by default.
            device: of the block; by default that of ``rows``, or of the store if that is a GPU.
            out: contiguous tensors that take some of the columns, by name.
        """

    @abstractmethod
    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        """Copy rows into the store.

        Args:
            block: of which ``rows`` are written: int64 or int32, shape (n,), n > 0, on any device. It may be one that
                this store has returned, with the ``place`` that was noted then, or a new one.
            values: tensors by column name.
            transfers: allow the store to return before the rows are written, and let a transfer that is added here
                write them. Then the rows are ascending, nothing changes ``values`` any more, and the caller starts the
                transfers.

        Raises:
            TableFullError: there is no room. Nothing was written.
        """

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        """Begin to gather every column of a later batch's rows.

        Args:
            lookup: the batch's ids, which are checked and made unique first.
            transfers: those of all tables of the batch, started by the caller.
        """
        return _NotPrefetched()

    def drain(self) -> None:
        """Return when every pending write has arrived. Raises what the first that failed has raised."""
        return None

    def commit(self) -> None:
        """Note that a step over all tables of an optimizer has ended: what was scattered and the attributes are one."""
        return None

    # ------------------------------------------------------------------ whole columns

    @abstractmethod
    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` of a column, to be read while the table's lock is held.

        Returns:
            Shape (stop - start, ...), as blocks have them: a view of the store's memory or a copy, on ``device`` if
            that is given.
        """

    @abstractmethod
    def write(self, column: str, start: int, values: Tensor) -> None:
        """Overwrite rows of a column from ``start`` on; see :meth:`Table.write`."""

    def view(self, column: str) -> Tensor:
        """Return all rows of a column as a tensor over the store's own memory; see :meth:`Table.view`."""
        raise TypeError(f"the rows of table {self.name!r} are not in one memory; use Table.read() and Table.write()")

    @abstractmethod
    def add_columns(self, columns: Sequence[Column]) -> None:
        """Give every row columns with new names, at their initial values. If it fails, nothing has changed."""

    @abstractmethod
    def reset_columns(self, columns: Sequence[Column]) -> None:
        """Give existing columns their initial values again, in every row."""

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield every row that may differ from its initial values, a piece at a time.

        Rows of a table that another process writes may come again, as they are by then: the last ones count.

        Yields:
            Ids, int64, shape (n,), and the columns' bytes by name, uint8, shape (n, row_bytes), in host memory.
        """
        for rows in chunks_of(self.num_embeddings):
            held = {name: each.encode(self.read(name, rows.start, rows.stop)) for name, each in self.columns.items()}
            yield torch.arange(rows.start, rows.stop), held

    def alone(self, outer: RowStore | None = None) -> AbstractContextManager[RowStore | None]:
        """Provide one process with a store that it reads by itself; other ranks that share it serve it and get None.

        Args:
            outer: the store in front of this one, if there is one, which is to be read.
        """
        return nullcontext(outer or self)

    # ------------------------------------------------------------------ lifetime

    def flush(self) -> None:
        """Make everything written so far durable, if this store is."""
        return None

    def flush_at_end(self) -> None:
        """Flush because the table was freed, or the process ends, without a call of :meth:`close`."""
        self.flush()

    @abstractmethod
    def close(self) -> None:
        """Flush, and release everything held. Closing twice is harmless, and completes an interrupted close."""


class Commits(ABC):
    """The commits of a store that stay until they are let go."""

    @abstractmethod
    def hold(self) -> int:
        """Begin a commit of rows and attributes as they are now, and keep it; a flush returns when it is durable.

        Returns:
            Its number, by which :meth:`Table.open` returns to it until it is let go.
        """

    @property
    @abstractmethod
    def held(self) -> list[int]:
        """The commits that are kept."""

    @abstractmethod
    def attributes_of(self, commit: int) -> dict[str, Any]:
        """Return the attributes as of a held commit."""

    @abstractmethod
    def let_go(self, commit: int) -> None:
        """Allow the room of a held commit to be used again."""

    @abstractmethod
    def return_to(self, commit: int) -> None:
        """Go back to a held commit, with its rows, columns and attributes; id maps stay. Later commits are dropped.

        Raises:
            ValueError: a later one is held. Nothing has changed.
        """


class Files(ABC):
    """The files that a store's rows are in.

    Attributes:
        was_found: whether the rows were in files before this store was asked for.
        stays_at: the commit that is read, of a store that was opened to read one and does not follow later ones.
    """

    was_found: bool = False
    stays_at: int | None = None

    @property
    def path(self) -> Path | None:
        """The directory that :meth:`Table.open` opens; None where the rows are only a part of a table's."""
        return None

    @property
    def is_untouched(self) -> bool:
        """True if every row is known to have its initial values, and takes no room."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return facts about the rows in files, as JSON can hold them, for ``speedswap info``."""
        return {}

    @abstractmethod
    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the files are there."""

    @abstractmethod
    def verify(self, advance: Callable[[float], object]) -> Checked:
        """Read everything in the files, and check whatever has a checksum.

        Args:
            advance: called with the number of rows read since the last call; parts of one if it is read in parts.
        """

    def take_rows(self, source: RowStore, columns: Sequence[str]) -> bool:
        """Replace columns of every row by those of another store with as many rows, if these files have a way for it.

        Args:
            source: the other store.
            columns: names of columns that both have, of one dtype and row shape.

        Returns:
            False if the rows have to be read and written.
        """
        return False

    def reserve(self, rows: int, times: int = 1) -> None:
        """Make sure that scatters of n rows, one after the other, cannot fail for want of room."""
        return None

    def remove(self) -> None:
        """Remove the files of a closed store."""
        return None


class WrappedStore(RowStore):
    """A store in front of another one, which does everything that a derived class does not.

    Args:
        inner: the other store.
    """

    def __init__(self, inner: RowStore) -> None:
        self.inner = inner
        self.num_embeddings, self.storage, self.engine = inner.num_embeddings, inner.storage, inner.engine
        self.seed, self.name, self.part_name = inner.seed, inner.name, inner.part_name
        self.notes = inner.notes
        self.reads_copies = inner.reads_copies
        self.group = inner.group
        self.locked = inner.locked

    @property
    def commits(self) -> Commits | None:
        return self.inner.commits

    @property
    def files(self) -> Files | None:
        return self.inner.files

    @property
    def columns(self) -> dict[str, Column]:
        return self.inner.columns

    @property
    def origins(self) -> dict[str, Origin]:
        return self.inner.origins

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def closed(self) -> bool:
        return self.inner.closed

    @property
    def pinned(self) -> bool:
        return self.inner.pinned

    def check(self, *, writing: bool = False) -> bool:
        return self.inner.check(writing=writing)

    def is_backed_by(self, memory: Tensor) -> bool:
        return self.inner.is_backed_by(memory)

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        return self.inner.gather(rows, columns, device, out)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        self.inner.scatter(block, values, transfers)

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        return self.inner.prefetch(lookup, transfers)

    def drain(self) -> None:
        self.inner.drain()

    def commit(self) -> None:
        self.inner.commit()

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        return self.inner.read(column, start, stop, device)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.inner.write(column, start, values)

    def view(self, column: str) -> Tensor:
        return self.inner.view(column)

    def add_columns(self, columns: Sequence[Column]) -> None:
        self.inner.add_columns(columns)

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.inner.reset_columns(columns)

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        return self.inner.written_rows()

    def alone(self, outer: RowStore | None = None) -> AbstractContextManager[RowStore | None]:
        return self.inner.alone(outer or self)

    def flush(self) -> None:
        self.inner.flush()

    def flush_at_end(self) -> None:
        self.inner.flush_at_end()

    def close(self) -> None:
        self.inner.close()


class JointRows(ABC):
    """Rows that ranks own together, as one of them sees them. Every rank makes each of these calls.

    Attributes:
        group: the ranks.
        own: the table of the rows that this rank owns.
        owners: which rank owns a row.
        torn: why the ranks' rows are not those of one step, until they are replaced; None if they are.
    """

    group: RankGroup
    own: Table
    owners: Owners
    torn: str | None = None

    @abstractmethod
    def make_step(self, table: Table, *arguments: Any) -> Any:
        """Return the training step of a table over these rows, with the arguments of an ordinary one's maker."""

    @abstractmethod
    def scatter_last(self, rows: Tensor, values: Mapping[str, Tensor]) -> bool:
        """Send rows to their owners; of a row that several ranks write the last rank's stays.

        Args:
            rows: unique ids, shape (n,).
            values: tensors by column name.

        Returns:
            Whether rows were written by several ranks.
        """

    @abstractmethod
    def read_part(self, column: str) -> Tensor:
        """Copy the rows of this rank's range of ids, from their owners.

        Returns:
            A DTensor of shape (num_embeddings, ...), in host memory, which ``full_tensor()`` makes whole.

        Raises:
            TableTooLargeError: the range does not fit into free memory.
        """

    @abstractmethod
    def write_part(self, column: str, values: Any) -> None:
        """Overwrite all rows, of which each rank gives its range.

        Args:
            values: a DTensor, shape (num_embeddings, ...).
        """

    @abstractmethod
    def save(self, path: Path, *, overwrite: bool) -> None:
        """Save the rows of all ranks as a table; see :meth:`Table.save`."""

    @abstractmethod
    def saving(self) -> AbstractContextManager[bool]:
        """Surround the writing of a file about the rows; provide whether this rank is the one that writes it."""


def begin_alike(
    one: RowStore,
    other: RowStore,
    columns: Collection[str],
    seen_as: Callable[[Column], Column] = lambda each: each,
) -> bool:
    """Return whether the rows of two stores that were never written have the same bits in some columns.

    Args:
        one, other: the stores.
        columns: names.
        seen_as: returns the column of the whole table, given one of a part.
    """

    def start(store: RowStore, name: str) -> list[tuple[object, ...]] | None:
        """Return all that the values depend on, but for the table's seed."""
        if name not in store.columns:
            return None
        origin = store.origins[name]
        return [
            (each.name, each.init.to_json(), each.zero_row, each.row_shape, each.dtype, each.stored_dtype)
            for each in map(seen_as, (origin.start, *origin.through, store.columns[name]))
        ]

    return one.seed == other.seed and all(start(one, name) == start(other, name) for name in columns)
