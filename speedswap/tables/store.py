""":class:`RowStore`, the interface of all stores of a table's rows; notes kept with rows; ranges of rows.

All tables over the same rows share the notes, which also record the rows changed since a copy was made.
"""

from __future__ import annotations

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from speedswap import kernels
from speedswap._process import Locked
from speedswap._words import require_kind
from speedswap.collectives import RankGroup
from speedswap.kernels import Lookup, Transfers
from speedswap.tables.id_map import IdMap
from speedswap.tables.init import CopyOf, InRanges, chunks_of
from speedswap.tables.memory import HotBytes, WantedShares
from speedswap.tables.owners import Owners
from speedswap.tables.record import Block, Column, Origin, fitting, origins_of, require_functions_of_row

TableT = TypeVar("TableT")
"""The table that holds a rank's own rows."""

PARTS = "tables"
"""The attribute that names a store's parts; the copy of a part lacks it."""

IDLE_STEPS = "idle_steps"
"""The attribute for the steps that rows may have missed; a copy's rows have taken these steps."""

IDLE_ROWS = "idle_rows"
"""The attribute for how the rows' last optimizer was attached; absent if lazily."""

CHECKPOINT, CHECKPOINT_FOLDER = "checkpoint", "checkpoints"
"""The attributes for the checkpoint that a commit is held for: its token and folder; absent from other commits."""

AVERAGES = "averages"
"""The attribute for averages of the rows: updates and decay, by the name of their column."""


@dataclass(eq=False)
class Notes:
    """The notes kept with a store's rows. A store that wraps another shares the other's notes.

    Attributes:
        attributes: plain data kept with the rows.
        live_attributes: functions for attributes that change at every step, by name, called when attributes are saved;
            one that returns None leaves the attribute unchanged. They must not hold a reference to the table.
        id_maps: the id maps kept with the rows, by name.
        map_of: returns the map to keep for a given map: the same one, unless ranks own the rows.
        writes: the number of scatters so far, counted by the store.
        version: increases whenever rows or columns may have changed, through any table over these rows.
        adopted: increases whenever attributes are replaced with those of a commit.
        closed: True once the store is closed.
        pinned: True if CUDA kernels read and write the rows' host memory directly, or will once it is taken.
        hot: the cache of hot rows on a GPU; None if there is none.
        viewed: addresses of memory that tensors outside view; the rows there may change without a call.
        parts: the stores of parts of these rows, each the store of a table.
        listeners: called with the rows that are about to change, and the columns that are written.
        changes: the rows changed since :meth:`track_changes` was last called; None if unknown.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    live_attributes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    id_maps: dict[str, IdMap] = field(default_factory=dict)
    map_of: Callable[[IdMap], IdMap] = field(default=lambda id_map: id_map)
    writes: int = 0
    version: int = 0
    adopted: int = 0
    closed: bool = False
    pinned: bool = False
    hot: kernels.HotRows | None = None
    viewed: set[int] = field(default_factory=set)
    parts: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    listeners: list[Callable[[Tensor | range | None, Collection[str]], None]] = field(default_factory=list)
    changes: ChangedRows | None = None

    def up_to_date(self) -> dict[str, Any]:
        """Update the attributes from the live ones, and return them."""
        self.attributes.update(self._live())
        return self.attributes

    def _live(self) -> dict[str, Any]:
        return {name: value for name, get in self.live_attributes.items() if (value := get()) is not None}

    def take_over(self, source: Notes, part: str = "", *, lacks_steps: bool = False) -> None:
        """Copy another store's current attributes, id maps and number of writes.

        Args:
            source: the other notes.
            part: the name of the part, if only a part's rows were copied; then only its map is.
            lacks_steps: True if rows were copied before taking the steps that they may have missed.
        """
        self.attributes.update(copy.deepcopy({**source.attributes, **source._live()}))
        if not lacks_steps:
            self.attributes.pop(IDLE_STEPS, None)
        self.writes = source.writes
        if not part:
            self.id_maps.update(source.id_maps)
            return
        self.attributes.pop(PARTS, None)
        if part in source.id_maps:
            self.id_maps[""] = source.id_maps[part]

    def note_change(
        self, rows: Tensor | range | None, columns: Collection[str] = (), *, as_stored: bool = True
    ) -> None:
        """Record that rows are about to change: ids, a range of rows, or all rows and columns.

        Args:
            rows: the rows.
            columns: the names of those that are written; none if rows change in another way.
            as_stored: False if they only miss one more step, which they take when they are read.
        """
        self.version += 1
        if as_stored and self.changes is not None:
            self.changes.add(rows)
        for listener in self.listeners:
            listener(rows, columns)

    def track_changes(self, num_rows: int) -> ChangedRows | None:
        """Start recording which of ``num_rows`` rows change, dropping any earlier record; None if unknown."""
        self.changes = None if self.viewed else ChangedRows(num_rows)
        return self.changes


class ChangedRows:
    """A flag (byte) per row of a store, set when the row is written; one array per device that ids come from.

    Args:
        num_rows: the store's number of rows.

    Example:
        >>> changed = ChangedRows(10)
        >>> changed.add(torch.tensor([7, 2]))
        >>> changed.add(range(4, 6))
        >>> changed.rows()
        tensor([2, 4, 5, 7])
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._masks: dict[torch.device, Tensor] = {}
        self._all = False

    def add(self, rows: Tensor | range | None) -> None:
        """Record that rows change: ids, a range of rows, or all of them."""
        if rows is None or (isinstance(rows, range) and len(rows) == self._num_rows):
            self._all = True
            self._masks.clear()
        elif self._all:
            return
        elif isinstance(rows, range):
            self._mask(torch.device("cpu"))[rows.start : rows.stop] = 1
        elif rows.device.type == "cpu":
            self._mask(rows.device).numpy()[rows.numpy()] = 1  # in one thread: starting torch's threads costs more
        else:
            self._mask(rows.device)[rows.long()] = 1

    def _mask(self, device: torch.device) -> Tensor:
        if device not in self._masks:
            with torch.inference_mode(False):
                self._masks[device] = torch.zeros(self._num_rows, dtype=torch.uint8, device=device)
        return self._masks[device]

    def rows(self) -> Tensor | None:
        """Return the changed rows, ascending, int64, on the CPU; None for all rows."""
        if self._all:
            return None
        found = [mask.nonzero().squeeze(1).cpu() for mask in self._masks.values()] or [torch.arange(0)]
        return found[0] if len(found) == 1 else kernels.unique(torch.cat(found))[0]


@dataclass
class Checked:
    """The outcome of verifying a table.

    Attributes:
        rows: number of rows read.
        nbytes: number of bytes read.
        damaged: ranges of rows that are unreadable, or whose checksum does not match.
        problems: a sentence for each problem.
    """

    rows: int = 0
    nbytes: int = 0
    damaged: list[range] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Found = tuple[Block, Tensor]
"""A batch's rows, and each id's place among them."""


class Prefetched:
    """A gather ahead of its step; by itself, one that the store makes only when its rows are needed."""

    def take(self) -> Found | None:
        """Return the rows as currently stored. Call it only once.

        Returns:
            None if the store must gather them now: an id is out of range, or the rows are stale.
        """
        return None

    def has_turn(self) -> bool:
        """Wait for the other ranks that own the rows; return False if one of them has no batch this turn.

        Raises:
            PeerError: another rank failed.
        """
        return True


@dataclass
class StoreFacts:
    """Facts about a store, which rarely change.

    Attributes:
        num_embeddings: number of rows.
        storage: where the rows live.
        shares: of rows that kernels move from pinned memory to a GPU, and back; None for the fastest.
        seed: of the initial values.
        name: for messages.
        nbytes: bytes of all rows as stored; None if they follow from the columns.
        part_name: if the rows are part of another store's, the name of their id map in the notes.
        first_row: then the number of the first row in that store.
        is_borrowed: True if another store's table flushes and closes the rows.
        reads_copies: True if :meth:`RowStore.read` always returns a copy, never a view of the store's memory.
        ranks: the ranks that own the rows together, if any; all of them must make each call about rows, each with its
            own rows or none.
        hot_bytes: GPU memory for a cache of hot rows, as :class:`speedswap.Pinned` takes it.
        locked: the lock of every table over these rows.
    """

    num_embeddings: int
    storage: str
    shares: WantedShares = (None, None)
    seed: int = 0
    name: str = "table"
    nbytes: int | None = None
    part_name: str = ""
    first_row: int = 0
    is_borrowed: bool = False
    reads_copies: bool = False
    ranks: RankGroup | None = None
    hot_bytes: HotBytes | None = None
    locked: Locked = field(default_factory=Locked)


class RowStore(ABC):
    """A store of a table's records. :class:`Table` adds names, checks and a lock on top.

    Rows passed to a store are in range (and unique in a scatter), and tensors have the right shape and dtype. A store
    never sees a model or an optimizer. One thread at a time calls its methods: the table's lock is held. A method that
    returns has taken effect for every later call; the store decides when a scatter reaches the memory, and how
    transfers are ordered. A method that raises has changed nothing.

    Methods that are not abstract default to a store in memory without prefetch or pending writes. To wrap another
    store, derive from :class:`WrappedStore`.

    Attributes:
        facts: facts about the store.
        notes: data kept with the rows. The store counts scatters there, and notes that it is closed.
        files: the files that hold the rows, and their commits; None without files.
    """

    facts: StoreFacts

    @cached_property
    def notes(self) -> Notes:
        """The notes of these rows."""
        return Notes()

    @property
    def files(self) -> Files | None:
        """The files that hold the rows."""
        return None

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The columns by name, ``weight`` first."""

    def check(self, *, writing: bool = False) -> bool:
        """Check that this process can use the rows, and catch up with another process that writes them.

        Returns:
            True if rows or columns have changed since the last call other than through this store.

        Raises:
            TableClosedError: the rows cannot be read, or cannot be written if writing is requested.
        """
        return False

    # ------------------------------------------------------------------ batches of rows

    @abstractmethod
    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        """Copy rows to a device, including all scatters so far.

        Args:
            rows: int64 or int32, shape (n,), on any device.
            columns: names; all columns by default.
            device: the block's device; by default that of ``rows``, or of the store if that is a GPU.
            out: contiguous tensors to receive some of the columns, by name.
        """

    @abstractmethod
    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        """Copy rows into the store.

        Args:
            block: its ``rows`` are written: int64 or int32, shape (n,), n > 0, on any device. It may be a block that
                this store returned, with the ``place`` noted then, or a new one.
            values: tensors by column name.
            transfers: allow the store to return before the rows are written, by adding a transfer here. Then the rows
                are ascending, ``values`` must not be modified afterwards, and the caller starts the transfers.

        Raises:
            TableFullError: there is no room. Nothing was written.
        """

    def prefetch(self, lookup: Lookup, transfers: Transfers) -> Prefetched:
        """Start gathering every column of a later batch's rows.

        Args:
            lookup: the batch's ids, which the transfer checks and deduplicates when it begins.
            transfers: the transfers of all tables of the batch, started by the caller.
        """
        return Prefetched()

    def drain(self) -> None:
        """Wait until every pending write has arrived; raise the error of the first that failed."""
        return None

    def commit(self) -> None:
        """Mark the end of a step over all tables of an optimizer: scatters and attributes are now consistent."""
        return None

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` of a column, for reading while the table's lock is held.

        Returns:
            Shape (stop - start, ...), in the blocks' dtype: a view of the store's memory or a copy, on ``device`` if
            given.
        """
        return self.gather(torch.arange(start, stop), [column], device)[column]

    @abstractmethod
    def write(self, column: str, start: int, values: Tensor) -> None:
        """Overwrite rows of a column from ``start`` on; see :meth:`Table.write`."""

    def view(self, column: str) -> Tensor:
        """Return all rows of a column as a tensor over the store's memory; see :meth:`Table.view`."""
        raise TypeError(
            f"the rows of table {self.facts.name!r} are not in one memory; use Table.read() and Table.write()"
        )

    @abstractmethod
    def add_columns(self, columns: Sequence[Column]) -> None:
        """Add columns with new names, filled with their initial values. If it fails, nothing has changed."""

    @abstractmethod
    def reset_columns(self, columns: Sequence[Column]) -> None:
        """Reset existing columns to their initial values, in every row."""

    def written_rows(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield every row that may differ from its initial values, a piece at a time.

        If another process is writing the table, a row may be yielded again with newer values; the last ones count.

        Yields:
            Ids, int64, shape (n,), and the columns' bytes by name, uint8, shape (n, row_bytes), in host memory.
        """
        for rows in chunks_of(self.facts.num_embeddings):
            held = {name: each.encode(self.read(name, rows.start, rows.stop)) for name, each in self.columns.items()}
            yield torch.arange(rows.start, rows.stop), held

    # ------------------------------------------------------------------ lifetime

    def flush(self) -> None:
        """Make everything written so far durable, if this store can."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Flush, release all resources, and set ``notes.closed``.

        Closing twice is harmless, and completes an interrupted close.
        """


class Commits(ABC):
    """The held commits of a store, which stay until they are released."""

    @abstractmethod
    def hold(self) -> int:
        """Begin a commit of the current rows and attributes, and hold it; a flush waits until it is durable.

        Returns:
            Its number, with which :meth:`Table.open` can return to it until it is released.
        """

    @property
    @abstractmethod
    def held(self) -> list[int]:
        """The held commits."""

    @property
    @abstractmethod
    def last(self) -> int:
        """The last durable commit."""

    @abstractmethod
    def attributes_of(self, commit: int) -> dict[str, Any]:
        """Return the attributes of a held commit."""

    @abstractmethod
    def let_go(self, commit: int) -> None:
        """Release a held commit and free superseded rows for reuse."""

    @abstractmethod
    def return_to(self, commit: int) -> None:
        """Roll back to a held commit: rows, columns and attributes; id maps stay. Later commits are dropped.

        Raises:
            ValueError: a later commit is held. Nothing has changed.
        """


class Files(ABC):
    """The files that hold a store's rows.

    Attributes:
        was_found: True if the rows were in files before this store was created.
        stays_at: the commit being read, if the store was opened at one and does not follow later commits.
    """

    was_found: bool = False
    stays_at: int | None = None

    @property
    def path(self) -> Path | None:
        """The directory that :meth:`Table.open` opens; None if the rows are only part of a table's."""
        return None

    @property
    def commits(self) -> Commits | None:
        """The held commits; None without commits."""
        return None

    @property
    def origins(self) -> dict[str, Origin] | None:
        """The origins of untouched rows' values, by column name; None if no column was reset after it was copied."""
        return None

    @property
    def is_untouched(self) -> bool:
        """True if every row is known to have its initial values, taking no space."""
        return False

    def details(self) -> dict[str, Any]:
        """Return details of the rows in files, as plain data for JSON, for ``speedswap info``."""
        return {}

    @abstractmethod
    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path leads to the files."""

    @abstractmethod
    def verify(self, advance: Callable[[float], object], *, strict: bool = False) -> Checked:
        """Read everything in the files, and verify all checksums.

        Args:
            advance: called with the number of rows read since the last call, which may be fractional.
            strict: True to raise the first error.

        Raises:
            TableFormatError, OSError: a row or a header is damaged, or cannot be read, if ``strict``.
        """

    def take_rows(self, source: RowStore, columns: Sequence[str]) -> bool:
        """Replace columns of every row with those of another store of the same size, if the files have a fast way.

        Args:
            source: the other store.
            columns: names of columns that both have, with the same dtype and row shape.

        Returns:
            False if the rows must be read and written instead.
        """
        return False

    def reserve(self, *writes: int | range) -> None:
        """Reserve room so that later writes cannot fail for lack of it; this replaces an earlier reservation.

        Args:
            writes: a scatter's number of rows; or the range of rows to be written in order, in large pieces.

        Raises:
            TableFullError: there is no room. Nothing is reserved.
        """
        return None

    def leave(self, flush: Callable[[], None]) -> None:
        """Flush a store that was not closed before its table was freed or the process exits.

        Args:
            flush: flushes the table's store.
        """
        flush()

    def abandon(self) -> None:
        """Close the store and discard all writes since the last commit; a store without commits stays open."""
        return None

    def remove(self) -> None:
        """Remove the files of a closed store."""
        return None


class WrappedStore(RowStore):
    """A store that wraps another store and forwards everything that a derived class does not override.

    Args:
        inner: the wrapped store.
    """

    def __init__(self, inner: RowStore) -> None:
        self.inner = inner
        self.facts, self.notes = inner.facts, inner.notes

    @property
    def files(self) -> Files | None:
        return self.inner.files

    @property
    def columns(self) -> dict[str, Column]:
        return self.inner.columns

    def check(self, *, writing: bool = False) -> bool:
        return self.inner.check(writing=writing)

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

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


class JointRows(ABC, Generic[TableT]):
    """Rows owned by ranks together, as seen by one of them. Every rank must make each of these calls.

    Attributes:
        group: the ranks.
        own: a table of the rows that this rank owns.
        owners: the division of rows among ranks.
        torn: why the ranks' rows are at different steps, until these rows are replaced; None if consistent.
    """

    group: RankGroup
    own: TableT
    owners: Owners
    torn: str | None = None

    @abstractmethod
    def alone(self, outer: RowStore) -> AbstractContextManager[RowStore | None]:
        """Give the first rank a store that it can read alone, and give the others, which serve it, None.

        Args:
            outer: the store to read: this one, or one that wraps it.
        """

    @abstractmethod
    def make_step(self, table: TableT, *arguments: Any) -> Any:
        """Return the training step of a table over these rows; arguments are those for an ordinary table's step."""

    @abstractmethod
    def changed_rows(self, columns: Sequence[str]) -> Tensor:
        """Return the rows of all ranks that may differ from their initial values in some columns; int64, ascending."""

    @abstractmethod
    def scatter_last(self, rows: Tensor, values: Mapping[str, Tensor]) -> bool:
        """Send rows to their owners; if several ranks write a row, the last rank's values win.

        Args:
            rows: unique ids, shape (n,).
            values: tensors by column name.

        Returns:
            True if several ranks wrote the same row.
        """

    @abstractmethod
    def read_part(self, column: str) -> Tensor:
        """Copy the rows of this rank's range of ids from their owners.

        Returns:
            A DTensor of shape (num_embeddings, ...), in host memory; ``full_tensor()`` returns the whole column.

        Raises:
            TableTooLargeError: the range does not fit into free memory.
        """

    @abstractmethod
    def write_part(self, column: str, values: Any) -> None:
        """Overwrite all rows; each rank passes its range.

        Args:
            values: a DTensor, shape (num_embeddings, ...).
        """

    @abstractmethod
    def save(self, path: Path, *, overwrite: bool) -> None:
        """Save the rows of all ranks as a table; see :meth:`Table.save`."""

    @abstractmethod
    def saving(self) -> AbstractContextManager[bool]:
        """Surround the writing of a file of the rows; yield True on the rank that writes it."""


def innermost(store: RowStore) -> RowStore:
    """Return the store that others wrap."""
    while isinstance(store, WrappedStore):
        store = store.inner
    return store


def read_alone(store: RowStore) -> AbstractContextManager[RowStore | None]:
    """Give one process a store that it can read alone; other ranks that share the store serve it and get None."""
    if store.facts.ranks is None:
        return nullcontext(store)
    joint = innermost(store)
    assert isinstance(joint, JointRows)
    return joint.alone(store)


def require_alike(store: RowStore, given: object, what: str) -> None:
    """Raise ValueError, on all ranks that own the rows together, unless all of them passed the same values.

    Args:
        given: a tensor, or settings.
        what: its description for the message, before the table's name.
    """
    if store.facts.ranks is not None:
        store.facts.ranks.require_alike(given, f"{what} table {store.facts.name!r}")


def require_out(store: RowStore, out: Mapping[str, Tensor], rows: Tensor, device: torch.device) -> None:
    """Raise ValueError or TypeError unless tensors can receive rows of columns, as ``out`` of :meth:`Table.gather`."""
    for name, tensor in fitting(out, store.columns, len(rows), store.facts.name).items():
        kernels.require_apart(tensor, f"out[{name!r}]", rows, "rows")
        is_plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        if not is_plain or tensor.device != device or tensor.untyped_storage().data_ptr() in store.notes.viewed:
            raise ValueError(
                f"out[{name!r}], on {tensor.device} with strides {tensor.stride()}, cannot take the rows; give a "
                f"contiguous tensor on {device} that is not a view of the table"
            )


@contextmanager
def _outside_modes() -> Iterator[None]:
    """Create plain tensors: outside ``torch.func``, fake tensors, ``torch.device`` and inference mode."""
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
            yield


def leave(store: RowStore) -> None:
    """Flush a store whose table was not closed: it was freed, or the process is exiting.

    A table in a circle of references is freed by whatever code runs then, under torch's modes of that code.
    """
    if not store.facts.is_borrowed:
        with _outside_modes(), store.facts.locked.lock:
            if store.files is None:
                store.flush()
            else:
                store.files.leave(store.flush)


def note_change(store: RowStore, rows: Tensor | range | None, columns: Collection[str] = ()) -> None:
    """Record that rows are about to change; see :meth:`Notes.note_change`."""
    facts = store.facts
    if facts.ranks is not None:
        return  # the owners' tables record their own changes
    if facts.part_name:
        if isinstance(rows, Tensor):
            rows = rows.long() + facts.first_row
        else:
            some = range(facts.num_embeddings) if rows is None else rows
            rows = range(facts.first_row + some.start, facts.first_row + some.stop)
    store.notes.note_change(rows, columns)


def origins_in(store: RowStore) -> dict[str, Origin]:
    """Return the origins of untouched rows' values, by column name."""
    known = None if store.files is None or store.facts.part_name else store.files.origins
    return known or origins_of(store.columns)


def begin_alike(
    one: RowStore,
    other: RowStore,
    columns: Collection[str],
    seen_as: Callable[[Column], Column] = lambda each: each,
) -> bool:
    """Return whether unwritten rows of two stores have the same bits in some columns.

    Args:
        one, other: the stores.
        columns: names.
        seen_as: returns the whole table's column, given a part's column.
    """

    def start(store: RowStore, name: str) -> list[tuple[object, ...]] | None:
        """Return everything that the values depend on, except the table's seed."""
        if name not in store.columns:
            return None
        origin = origins_in(store)[name]
        return [
            (each.name, each.init.to_json(), each.zero_row, each.row_shape, each.dtype, each.stored_dtype)
            for each in map(seen_as, (origin.start, *origin.through, store.columns[name]))
        ]

    return one.facts.seed == other.facts.seed and all(start(one, name) == start(other, name) for name in columns)


def keep_map(store: RowStore, id_map: IdMap) -> None:
    """Keep a map, or the one that stands for it, with a store's rows; errors are those of `Table.set_id_map`."""
    require_kind("id_map", id_map, IdMap, "a speedswap.IdMap, such as speedswap.IdMap(capacity)")
    facts = store.facts
    if id_map.num_rows != facts.num_embeddings:
        raise ValueError(
            f"id_map has rows 0 to {id_map.capacity}, and table {facts.name!r} rows 0 to {facts.num_embeddings - 1}; "
            "make the table with id_map.num_rows rows"
        )
    require_functions_of_row(store.columns, facts.name)
    id_map = store.notes.map_of(id_map)
    if id_map.evict is not None and id_map.holder() not in (None, store):
        raise ValueError(
            f"id_map evicts and belongs to another table, where evicted rows are reset; give table {facts.name!r} a "
            "separate map, or one with evict=None"
        )
    id_map.holder = weakref.ref(store)
    store.notes.id_maps[store.facts.part_name] = id_map


class PartStore(WrappedStore):
    """Rows ``first_row`` to ``first_row + num_rows - 1`` of another store, numbered from 0.

    Several tables can so share one store, which a training step treats as one table. Writes go to the other store, and
    both share lock and version. A copy, in memory or in files, is a table of only these rows. Closing this store leaves
    the other one open.

    Args:
        inner: the store that holds the rows.
        first_row: the row that is number 0 here.
        num_rows: number of rows, at least 1.
        name: for messages.
    """

    # Rows that another table trains are not prefetched.
    prefetch = RowStore.prefetch
    written_rows = RowStore.written_rows

    def __init__(self, inner: RowStore, first_row: int, num_rows: int, name: str) -> None:
        super().__init__(inner)
        inner.notes.parts.add(self)
        self.first_row, self.num_rows = first_row, num_rows
        self._columns: tuple[dict[str, Column], dict[str, Column]] = {}, {}
        weight = inner.columns["weight"].init
        own = weight.at(first_row) if isinstance(weight, InRanges) else None
        self.facts = replace(
            inner.facts,
            num_embeddings=num_rows,
            seed=inner.facts.seed if own is None else own.seed,
            name=name,
            nbytes=None,
            part_name=name,
            first_row=inner.facts.first_row + first_row,
            is_borrowed=True,
        )

    # ------------------------------------------------------------------ description

    @property
    def columns(self) -> dict[str, Column]:
        whole, columns = self._columns
        if whole is not self.inner.columns:
            whole = self.inner.columns
            columns = {name: self._own(column) for name, column in whole.items()}
            self._columns = whole, columns
        return columns

    def _own(self, column: Column) -> Column:
        """Return the column with only these rows' initial values."""
        init, zero_row = column.init, column.zero_row
        if isinstance(init, InRanges):
            own = init.at(self.first_row)
            return column if own is None else replace(column, init=own.init, zero_row=own.zero_row)
        if zero_row is not None:
            zero_row -= self.first_row
        return replace(column, zero_row=zero_row if zero_row in range(self.num_rows) else None)

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        block = self.inner.gather(rows.long() + self.first_row, columns, device, out)
        return Block(rows, block.columns)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Transfers | None = None) -> None:
        self.inner.scatter(Block(block.rows.long() + self.first_row, {}), values, transfers)

    # ------------------------------------------------------------------ whole columns

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        return self.inner.read(column, self.first_row + start, self.first_row + stop, device)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.inner.write(column, self.first_row + start, values)

    def view(self, column: str) -> Tensor:
        return self.inner.view(column)[self.first_row : self.first_row + self.num_rows]

    def add_columns(self, columns: Sequence[Column]) -> None:
        names = ", ".join(column.name for column in columns)
        raise TypeError(
            f"table {self.facts.name!r} shares a store with others and cannot have additional columns ({names}); "
            "train it through the collection that it belongs to, or copy it with Table.save(path)"
        )

    def reset_columns(self, columns: Sequence[Column]) -> None:
        if self.files is not None:
            self.files.reserve(*[range(self.num_rows)] * len(columns))
        for column in columns:
            for rows in chunks_of(self.num_rows):
                if isinstance(column.init, CopyOf):
                    values = self.read(column.init.column, rows.start, rows.stop)
                else:
                    values = column.initial(rows, self.num_rows, self.facts.seed)
                self.write(column.name, rows.start, values)

    # ------------------------------------------------------------------ lifetime

    def close(self) -> None:
        if not self.notes.closed:
            self.inner.flush()
