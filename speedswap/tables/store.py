"""The door to a table's rows: :class:`RowStore`, the interface of any place that holds them."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from speedswap._locks import Locked
from speedswap.tables.block import Block
from speedswap.tables.changes import ChangedRows
from speedswap.tables.disk.layout import LogLayout
from speedswap.tables.files.inspection import Checked
from speedswap.tables.init import CHUNK_ROWS
from speedswap.tables.initial import initial_values
from speedswap.tables.record import Column

if TYPE_CHECKING:
    from speedswap.collectives import RankGroup
    from speedswap.kernels import Lookup, Transfers
    from speedswap.tables.id_map import IdMap
    from speedswap.tables.joint import JointRows

__all__ = ["Found", "Prefetched", "RowStore", "WrappedStore"]

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
        attributes: plain data kept with the rows.
        live_attributes: functions for attributes that change at every step, by name, called when attributes are saved;
            one that returns None leaves the attribute as it is. They must not hold the table.
        version: goes up whenever rows or columns may have changed, through any table over these rows.
        reads_copies: whether :meth:`read` returns memory of its own, never a view of the store's.
        stays_at: the commit that is read, of a store that was opened to read one and does not follow later ones.
        group: the ranks of a job that hold the rows together, if they do: all of them make a call about rows, each with
            rows of its own or none.
        was_found: whether the rows were in files before this store was asked for.
        joint: what only such ranks do, where the store is theirs; None for any other.
    """

    num_embeddings: int
    storage: str
    engine: str
    seed: int
    name: str
    attributes: dict[str, Any]
    live_attributes: dict[str, Callable[[], Any]]
    version: int = 0
    changes: ChangedRows | None = None  # since `track_changes` was last called
    is_viewed: bool = False  # rows may change without a call, through a tensor over their memory
    reads_copies: bool = False
    stays_at: int | None = None
    group: RankGroup | None = None
    was_found: bool = False
    joint: JointRows | None = None

    @cached_property
    def locked(self) -> Locked:
        """The lock of every table over these rows."""
        return Locked()

    # ------------------------------------------------------------------ description

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The columns by name, ``weight`` first."""

    map_name: str = ""  # of the map of this store's rows among `id_maps`

    @cached_property
    def id_maps(self) -> dict[str, IdMap]:
        """Maps from keys to rows that are kept with the rows, by name."""
        return {}

    def map_of(self, id_map: IdMap) -> IdMap:
        """Return the map that a given one becomes when it is kept with these rows."""
        return id_map

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as stored: every column, with the padding between records."""
        return self.num_embeddings * sum(column.row_bytes for column in self.columns.values())

    @property
    @abstractmethod
    def writes(self) -> int:
        """The number of scatters so far."""

    def continue_writes(self, writes: int) -> None:
        """Let the next scatter have this number: the rows were replaced by those of a table with so many."""
        raise NotImplementedError(f"the scatters of {type(self).__name__} cannot be counted from another number")

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once :meth:`close` was called."""

    @property
    def pinned(self) -> bool:
        """True if CUDA kernels read and write this host memory directly."""
        return False

    @property
    def path(self) -> Path | None:
        """The directory of a store in files."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return facts about the rows in files, as JSON can hold them, for ``speedswap info``."""
        return {}

    def verify(self, advance: Callable[[float], object]) -> Checked:
        """Read everything in the store's files, and check whatever has a checksum.

        Args:
            advance: called with the number of rows read since the last call; parts of one if it is read in parts.
        """
        return Checked(self.num_embeddings)

    def check(self, *, writing: bool = False) -> bool:
        """Check that this process can use the rows, and bring the store up to date with another writer.

        Returns:
            Whether rows or columns have changed since the last call without a call of this store's methods.

        Raises:
            TableClosedError: they cannot be read, or written where that is asked for.
        """
        return False

    @property
    def is_untouched(self) -> bool:
        """True if every row is known to have its initial values, and takes no room."""
        return False

    def is_backed_by(self, memory: Tensor) -> bool:
        """Return whether a tensor lies in the memory that holds the rows."""
        return False

    def note_change(self, rows: Tensor | range | None) -> None:
        """Note that rows are about to change: ids, a range of rows, or all rows and columns."""
        self.version += 1
        if self.changes is not None:
            self.changes.add(rows)

    def track_changes(self) -> ChangedRows | None:
        """Begin to note which rows change, in place of what was noted so far; return None where that is unknown."""
        self.changes = None if self.is_viewed else ChangedRows(self.num_embeddings)
        return self.changes

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

    def commit(self, *, known: bool = True) -> None:
        """Note that a step over all tables of one optimizer has ended: what was scattered and the attributes are one.

        Args:
            known: False if live attributes would have to be waited for.
        """
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

    def reserve(self, columns: Collection[str]) -> None:
        """Make sure that writing every row of some columns, one after the other, cannot fail for want of room."""
        return None

    def reserve_rows(self, rows: int) -> None:
        """Make sure that a scatter of so many rows cannot fail for want of room."""
        return None

    @abstractmethod
    def add_columns(self, columns: Sequence[Column]) -> None:
        """Give every row columns with new names, at their initial values. If it fails, nothing has changed."""

    @abstractmethod
    def reset_columns(self, columns: Sequence[Column]) -> None:
        """Give existing columns their initial values again, in every row."""

    def initial_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the initial values of some rows, by column; see :func:`speedswap.tables.initial.initial_values`."""
        return initial_values(self.columns, rows, self.seed, self.num_embeddings)

    @property
    def initial_layout(self) -> LogLayout:
        """A layout of records on disk, with the initial values of rows that :meth:`written_rows` leaves out."""
        return LogLayout.of(list(self.columns.values()))

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield every row that may differ from its initial values, a piece at a time.

        Rows of a table that another process writes may come again, as they are by then: the last ones count.

        Yields:
            Ids, int64, shape (n,), and the columns' bytes by name, uint8, shape (n, row_bytes), in host memory.
        """
        for start in range(0, self.num_embeddings, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, self.num_embeddings)
            yield (
                torch.arange(start, stop),
                {name: column.encode(self.read(name, start, stop)) for name, column in self.columns.items()},
            )

    def take_rows(self, source: RowStore, columns: Sequence[str]) -> None:
        """Replace columns of every row by those of another store with as many rows.

        Args:
            source: the other store.
            columns: names of columns that both have, of one dtype and row shape.
        """
        for start in range(0, self.num_embeddings, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, self.num_embeddings)
            for name in columns:
                self.write(name, start, source.read(name, start, stop))

    def notes(self) -> tuple[dict[str, Any], dict[str, IdMap]]:
        """Return a copy of the attributes as they are now, and the id maps, for a copy of the store."""
        live = {name: value for name, get in self.live_attributes.items() if (value := get()) is not None}
        return copy.deepcopy({**self.attributes, **live}), dict(self.id_maps)

    def alone(self, outer: RowStore | None = None) -> AbstractContextManager[RowStore | None]:
        """Provide one process with a store that it reads by itself; other ranks that share it serve it and get None.

        Args:
            outer: the store in front of this one, if there is one, which is to be read.
        """
        return nullcontext(outer or self)

    # ------------------------------------------------------------------ commits that stay

    def hold(self) -> int:
        """Begin a commit of rows and attributes as they are now, and keep it; :meth:`flush` returns when it is durable.

        Returns:
            Its number, by which :meth:`Table.open` returns to it until it is let go.

        Raises:
            TypeError: this store has no commits.
        """
        raise TypeError(f"table {self.name!r} is {self.storage} and has no commits; copy it with Table.save(path)")

    @property
    def held_commits(self) -> list[int]:
        """The commits that are kept."""
        return []

    def held_attributes(self, commit: int) -> dict[str, Any]:
        """Return the attributes as of a held commit."""
        return {}

    def let_go(self, commit: int) -> None:
        """Allow the room of a held commit to be used again."""
        raise TypeError(f"table {self.name!r} is {self.storage} and has no commits")

    def return_to(self, commit: int) -> None:
        """Go back to a held commit, with its rows, columns and attributes; id maps stay. Later commits are dropped.

        Raises:
            ValueError: a later one is held. Nothing has changed.
        """
        raise TypeError(f"table {self.name!r} is {self.storage} and has no commits")

    # ------------------------------------------------------------------ lifetime

    @abstractmethod
    def copy(self, storage: str | None = None, engine: str = "auto") -> RowStore:
        """Return a store in memory with the same rows and attributes.

        Args:
            storage, engine: as for :meth:`Table.create`, but for disk; this store's own if None is given for storage.
        """

    def save(self, path: Path, *, overwrite: bool) -> None:
        """Write the rows, attributes and id maps to a table's directory; see :meth:`Table.save`."""
        from speedswap.tables.opening import save_copy

        save_copy(self, path, overwrite=overwrite)

    def flush(self) -> None:
        """Make everything written so far durable, if this store is."""
        return None

    def flush_at_end(self) -> None:
        """Flush because the table was freed, or the process ends, without a call of :meth:`close`."""
        self.flush()

    @abstractmethod
    def close(self) -> None:
        """Flush, and release everything held. Closing twice is harmless, and completes an interrupted close."""

    def remove(self) -> None:
        """Remove the files of a closed store, if there are any."""
        return None

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this store's own files are there."""
        return False

    def require_elsewhere(self, path: str | os.PathLike[str]) -> None:
        """Raise FileExistsError if this store is to be saved where its own files are."""
        if self.lives_at(path):
            self._refuse_own_place(path)

    def _refuse_own_place(self, path: str | os.PathLike[str]) -> NoReturn:
        raise FileExistsError(f"path is {os.fspath(path)!r}, where this table lives already; use flush()")


def _of_inner(name: str) -> Callable[..., Any]:
    def call(self: WrappedStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


def _set_inner(name: str) -> Callable[..., None]:
    def write(self: WrappedStore, value: Any) -> None:
        setattr(self.inner, name, value)

    return write


class WrappedStore(RowStore):
    """A store in front of another one, which does everything that a derived class does not.

    Args:
        inner: the other store.
    """

    def __init__(self, inner: RowStore) -> None:
        self.inner = inner
        self.num_embeddings, self.storage, self.engine = inner.num_embeddings, inner.storage, inner.engine
        self.seed, self.name = inner.seed, inner.name
        self.attributes, self.live_attributes = inner.attributes, inner.live_attributes
        self.reads_copies = inner.reads_copies
        self.group = inner.group
        self.locked = inner.locked

    version: Any = property(attrgetter("inner.version"), _set_inner("version"))
    changes: Any = property(attrgetter("inner.changes"), _set_inner("changes"))
    is_viewed: Any = property(attrgetter("inner.is_viewed"), _set_inner("is_viewed"))
    stays_at: Any = property(attrgetter("inner.stays_at"))
    columns = property(attrgetter("inner.columns"))
    id_maps: Any = property(attrgetter("inner.id_maps"))
    map_of: Any = _of_inner("map_of")
    map_name: Any = property(attrgetter("inner.map_name"))
    initial_layout: Any = property(attrgetter("inner.initial_layout"))
    nbytes = property(attrgetter("inner.nbytes"))
    writes = property(attrgetter("inner.writes"))
    closed = property(attrgetter("inner.closed"))
    pinned = property(attrgetter("inner.pinned"))
    path = property(attrgetter("inner.path"))
    is_untouched = property(attrgetter("inner.is_untouched"))
    facts: Any = _of_inner("facts")
    verify: Any = _of_inner("verify")
    check: Any = _of_inner("check")
    continue_writes: Any = _of_inner("continue_writes")
    is_backed_by: Any = _of_inner("is_backed_by")
    gather: Any = _of_inner("gather")
    scatter: Any = _of_inner("scatter")
    prefetch: Any = _of_inner("prefetch")
    drain: Any = _of_inner("drain")
    commit: Any = _of_inner("commit")
    read: Any = _of_inner("read")
    write: Any = _of_inner("write")
    view: Any = _of_inner("view")
    reserve: Any = _of_inner("reserve")
    reserve_rows: Any = _of_inner("reserve_rows")
    add_columns: Any = _of_inner("add_columns")
    reset_columns: Any = _of_inner("reset_columns")
    initial_rows: Any = _of_inner("initial_rows")
    take_rows: Any = _of_inner("take_rows")
    written_rows: Any = _of_inner("written_rows")
    hold: Any = _of_inner("hold")
    held_commits: Any = property(attrgetter("inner.held_commits"))
    held_attributes: Any = _of_inner("held_attributes")
    let_go: Any = _of_inner("let_go")
    return_to: Any = _of_inner("return_to")
    copy: Any = _of_inner("copy")
    flush: Any = _of_inner("flush")
    flush_at_end: Any = _of_inner("flush_at_end")
    close: Any = _of_inner("close")
    remove: Any = _of_inner("remove")
    lives_at: Any = _of_inner("lives_at")

    def alone(self, outer: RowStore | None = None) -> AbstractContextManager[RowStore | None]:
        return self.inner.alone(outer or self)
