"""The full rows: a table of records, read and written a batch of rows at a time."""

from __future__ import annotations

import threading
import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap._locks import Locked
from speedswap._words import AVERAGE_OTHERS
from speedswap.collectives import of_all_ranks
from speedswap.errors import TableClosedError
from speedswap.tables import whole_table
from speedswap.tables.disk.salvage import salvage
from speedswap.tables.files.manifest_file import part_of_ranks
from speedswap.tables.id_map import IdMap
from speedswap.tables.record import Column
from speedswap.tables.store import RowStore
from speedswap.tables.table import batches, files, making, whole_columns

if TYPE_CHECKING:
    import enum

__all__ = ["Table"]


class Table:
    """``num_embeddings`` rows of weights and, once an optimizer is attached, of its state.

    Made by :meth:`create`, :meth:`open` or :meth:`load`, or over any :class:`RowStore`. A table is a context manager;
    leaving it closes it.

    Any number of threads may use a table. Each call is atomic: a gather sees all of a scatter or nothing of it, calls
    wait for one another, and one that comes after :meth:`close` raises :class:`TableClosedError`. Only the tensor that
    :meth:`view` returns is not guarded.

    Args:
        store: the place that holds the rows.

    Attributes:
        store: the place that holds the rows.
        ranks: that own the rows together; None for a process alone.
        num_embeddings: rows.
        storage: where they live.
        engine: how they go between host memory and a GPU.
        name: for messages.
        attributes: plain data kept with a table's files, such as an optimizer's step count.
        live_attributes: functions for attributes that change at every step, by name, called when attributes are saved;
            they must not hold the table.

    Example:
        >>> import torch, speedswap
        >>> with speedswap.Table.create(1000, 8, init=speedswap.init.normal(std=0.1)) as table:
        ...     rows = torch.tensor([3, 997])
        ...     block = table.gather(rows)
        ...     table.scatter(rows, block.weight * 2)
        >>> block.weight.shape
        torch.Size([2, 8])
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store
        self.ranks = store.group
        self.num_embeddings = store.num_embeddings
        self.storage = store.storage
        self.engine = store.engine
        self.name = store.name
        self.attributes = store.notes.attributes
        self.live_attributes = store.notes.live_attributes
        self._flush_at_end = weakref.finalize(self, _flush_at_end, store, store.locked)

    # ------------------------------------------------------------------ what it does, in functions of these modules

    create = classmethod(of_all_ranks(making.create))
    open = classmethod(of_all_ranks(making.open))
    load = classmethod(making.load)
    from_file = classmethod(of_all_ranks(making.from_file))
    salvage = staticmethod(salvage)

    lease = batches.lease
    give_back = batches.give_back
    gather = of_all_ranks(batches.gather)
    scatter = of_all_ranks(batches.scatter)
    reset_rows = of_all_ranks(batches.reset_rows)
    reserve_rows = batches.reserve_rows
    check_rows = batches.check_rows
    check_resettable = batches.check_resettable
    drain = batches.drain
    commit = batches.commit

    read = of_all_ranks(whole_columns.read)
    write = of_all_ranks(whole_columns.write)
    view = of_all_ranks(whole_columns.view)
    rows_between = whole_columns.rows_between
    add_columns = of_all_ranks(whole_columns.add_columns)
    reset_columns = of_all_ranks(whole_columns.reset_columns)
    reserve = of_all_ranks(whole_columns.reserve)
    __array__ = whole_table.to_numpy
    __dlpack__ = whole_table.to_dlpack

    save = of_all_ranks(files.save)
    export = of_all_ranks(files.export)
    flush = files.flush
    close = files.close
    remove = files.remove

    # ------------------------------------------------------------------ description

    def __len__(self) -> int:
        return self.num_embeddings

    @property
    def seed(self) -> int:
        """The seed of the initial values."""
        return self.store.seed

    @property
    def embedding_dim(self) -> int:
        """Items in a row's weight."""
        return self.columns["weight"].width

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.columns["weight"].dtype

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, ``weight`` first."""
        return self.store.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as stored: every column, with the padding between records."""
        return self.store.nbytes

    @property
    def writes(self) -> int:
        """The number of scatters so far, which is that of the next one. It is kept with a table's files."""
        return self.store.notes.writes

    @property
    def path(self) -> Path | None:
        """The directory of a table on disk."""
        return None if self.store.files is None else self.store.files.path

    @property
    def was_found(self) -> bool:
        """True if the rows were in files before the table was asked for."""
        return self.store.files is not None and self.store.files.was_found

    @property
    def pinned(self) -> bool:
        """True if CUDA kernels read and write this host memory directly."""
        return self.store.pinned

    @property
    def closed(self) -> bool:
        """True once the table was closed."""
        return self.store.closed

    @property
    def id_map(self) -> IdMap | None:
        """The map from keys to rows that is kept with the table; None if there is none."""
        return self.store.notes.id_maps.get(self.store.part_name)

    @of_all_ranks
    def set_id_map(self, id_map: IdMap) -> None:
        """Keep a map from keys to rows with the table: saved, opened, copied and closed with it.

        A table owned by ranks makes a map of its own with these arguments, whose keys they own: :attr:`id_map`.

        Raises:
            ValueError: it has other rows than the table; the table has another map; it evicts, and is another table's;
                or the initial values of rows that are to start anew cannot be computed again.
            TableClosedError: the table is closed, or opened with mode ``r``.
        """
        if self.id_map is not None and self.id_map.stands_for(id_map):
            self.id_map.holder = weakref.ref(self.store)  # of one from files, it is not known yet
            return
        if self.id_map is not None:
            raise ValueError(f"table {self.name!r} has an id map already; use table.id_map, or another table")
        if id_map.num_rows != self.num_embeddings:
            raise ValueError(
                f"id_map has rows 0 to {id_map.capacity}, and table {self.name!r} rows 0 to {self.num_embeddings - 1}; "
                "make the table with id_map.num_rows rows"
            )
        self.check_resettable()
        id_map = self.store.map_of(id_map)
        if id_map.evict is not None and id_map.holder() not in (None, self.store):
            raise ValueError(
                f"id_map evicts and is another table's, whose rows start anew then; give table {self.name!r} a map of "
                "its own, or one with evict=None"
            )
        with self.lock:
            self.check_open(writing=True)
            id_map.holder = weakref.ref(self.store)
            self.store.notes.id_maps[self.store.part_name] = id_map

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread that uses the table, or another one over its rows; a forked child finds it free."""
        return self.store.locked.lock

    @property
    def version(self) -> int:
        """A number that goes up whenever rows or columns may have changed."""
        return self.store.notes.version

    def __repr__(self) -> str:
        part = part_of_ranks(self.columns["weight"])
        state = ("" if part is None else f"{part}, ") + ("closed" if self.closed else self.storage)
        columns = "".join(f" + {name}" for name in self.columns if name != "weight")
        weight = self.columns["weight"]
        dtype = str(weight.dtype).removeprefix("torch.")
        if weight.compact:
            dtype += f" as {str(weight.stored_dtype).removeprefix('torch.')}"
        size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes > 2**30 // 200 else "under 0.01 GiB"
        return f"Table({self.name!r}, {self.num_embeddings:,} × {self.embedding_dim} {dtype}{columns}, {state}, {size})"

    def __dlpack_device__(self) -> tuple[enum.IntEnum, int]:
        """Return host memory, where :meth:`__dlpack__` puts the weights."""
        return torch.empty(0).__dlpack_device__()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        path, files = self.path, self.store.files
        if path is None or files is None:
            remedy = "save torch.save(model.state_dict(), …), or speedswap.save_checkpoint(path, model); for another "
            remedy += "process use Table.save(path), and Table.open(path, mode='r') there"
            if get_spawning_popen() is not None:
                remedy = (
                    "to read its rows in a worker, start that with fork (multiprocessing_context='fork'), or make the "
                )
                remedy += "table on disk (path=), which opens there; to train it in several processes, make it in each "
                remedy += "of them with storage=speedswap.Ranks()"
            raise TypeError(f"table {self.name!r} is {self.storage} memory and cannot be pickled; {remedy}")
        self.flush()  # another process sees what is committed
        return (_opened_to_read, (str(path), files.stays_at))

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        if self.path is not None:
            raise TypeError(
                f"table {self.name!r} lies in files, which are not copied implicitly; copy it with Table.save(path) "
                f"and Table.open(path), or into memory with Table.load(path); {AVERAGE_OTHERS}"
            )
        with self.lock:
            self.check_open()
            return type(self)(self.store.copy())

    # ------------------------------------------------------------------ checks

    def check_open(self, *, writing: bool = False) -> None:
        """Raise unless this process can use the table, and bring it up to date with another process that writes it.

        Raises:
            TableClosedError: it is closed, or cannot be read here, or written if that is asked for.
        """
        store = self.store
        if store.closed:
            raise TableClosedError(f"table {self.name!r} is closed; open it again with Table.open")
        if store.check(writing=writing):
            store.note_change(None)


def _opened_to_read(path: str, commit: int | None) -> Table:
    """Rebuild an unpickled table."""
    return Table.open(path, "r", commit=commit)


def _flush_at_end(store: RowStore, locked: Locked) -> None:
    """Flush a store whose table was not closed: its object was freed, or the process ends."""
    with locked.lock:
        store.flush_at_end()
