"""A table of records, read and written a batch of rows at a time."""

from __future__ import annotations

import enum
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from speedswap import kernels
from speedswap._words import require_kind
from speedswap.collectives import of_all_ranks
from speedswap.errors import DuplicateIdError, TableClosedError, TableFormatError
from speedswap.tables import whole_table
from speedswap.tables.disk.salvage import salvage
from speedswap.tables.files.manifest import part_of_ranks, remedy_for_part
from speedswap.tables.files.tensor_files import TensorSource, absolute_paths
from speedswap.tables.formats import export_rows, import_rows
from speedswap.tables.id_map import IdMap
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import Initializer
from speedswap.tables.pending import Commit
from speedswap.tables.record import (
    Block,
    Column,
    column_among,
    fitting,
    initial_values,
    require_addable,
    require_functions_of_row,
)
from speedswap.tables.rows_file import load_rows, save_rows
from speedswap.tables.storage import Disk, Storage, as_storage, copy_rows, create_store, opened_place, save_copy
from speedswap.tables.store import AVERAGES, Commits, JointRows, RowStore, keep_map, leave, note_change, require_out


class Table:
    """A table of ``num_embeddings`` rows of weights and, once an optimizer is attached, of its state.

    Made with :meth:`create`, :meth:`open` or :meth:`load`, or over any :class:`RowStore`. A table is a context manager;
    leaving it closes the table.

    Any number of threads may use a table. Each call is atomic: a gather sees all of a scatter or nothing of it, calls
    wait for one another, and calls after :meth:`close` raise :class:`TableClosedError`. Only the tensor that
    :meth:`view` returns is not guarded.

    Args:
        store: the place that holds the rows.

    Attributes:
        store: the place that holds the rows.
        ranks: the ranks that own the rows together; None for a single process.
        joint: operations specific to rows owned by ranks; None for other tables.
        num_embeddings: number of rows.
        storage: where the rows live.
        name: for messages.
        local_to_rank: True if each process of a job may train its own table.
        attributes: plain data saved with the table, e.g. an optimizer's step count.
        live_attributes: functions for attributes that change at every step, by name, called when attributes are saved;
            they must not hold a reference to the table.

    Example:
        >>> import torch, speedswap
        >>> with speedswap.Table.create(1000, 8, init=speedswap.init.normal(std=0.1)) as table:
        ...     rows = torch.tensor([3, 997])
        ...     block = table.gather(rows)
        ...     table.scatter(rows, block.weight * 2)
        >>> block.weight.shape
        torch.Size([2, 8])
    """

    local_to_rank = False

    def __init__(self, store: RowStore) -> None:
        require_kind("store", store, RowStore, "a RowStore; Table.create, Table.open and Table.load make tables")
        self.store, facts = store, store.facts
        self.ranks = facts.ranks
        self.joint: JointRows[Table] | None = store if isinstance(store, JointRows) else None
        if self.ranks is not None and self.joint is None and not facts.is_borrowed:
            raise TypeError(
                f"store is a {type(store).__name__} in front of rows that ranks own; wrap each rank's store instead: "
                "storage=Ranks(each=…)"
            )
        self.num_embeddings, self.name = facts.num_embeddings, facts.name
        self.attributes = store.notes.attributes
        self.live_attributes = store.notes.live_attributes
        self._locked = facts.locked
        self._is_closed = False  # this table is closed; other tables over the rows may be open
        self._flush_at_end = weakref.finalize(self, leave, store)

    # ------------------------------------------------------------------ made, opened, loaded

    @property
    def storage(self) -> str:
        """The place of the rows: ``device``, ``pinned``, ``pageable``, ``disk``, or a store's own name."""
        return self.store.facts.storage

    @classmethod
    def _at(cls, place: Storage, store: RowStore) -> Table:
        table = cls(store)
        table.local_to_rank = place.local_to_rank
        return table

    @classmethod
    @of_all_ranks
    def create(
        cls,
        /,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        storage: Storage | str = "auto",
        path: str | os.PathLike[str] | None = None,
        init: Initializer | Callable[..., Any] | None = None,
        seed: int = 0,
        name: str | None = None,
        zero_row: int | None = None,
        stored_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
    ) -> Table:
        """Create a table, filled with its initial values.

        Args:
            num_embeddings: number of rows, at least 1.
            embedding_dim: size of a row's weight, at least 1.
            dtype: the weights' dtype; any torch dtype with a fixed item size.
            storage: where the rows live: :class:`speedswap.Device`, :class:`speedswap.Pinned`,
                :class:`speedswap.Pageable`, :class:`speedswap.Disk`, :class:`speedswap.Ranks`; or, for short,
                ``device``, ``pinned``, ``pageable``, ``disk``, or ``auto``: disk if a path is given, else pinned if
                there is a GPU, else pageable.
            path: shorthand for ``storage=Disk(path)``; :class:`speedswap.Disk` has more settings.
            init: one of :mod:`speedswap.init`, or a function of ``torch.nn.init``; zeros by default.
            seed: of the initial values; the same seed gives the same bits everywhere.
            name: for messages; the path's last part, or ``table``, by default.
            zero_row: a row that starts as zeros, whatever ``init`` is.
            stored_dtype: float16, bfloat16, or int8 with a scale per row, to hold float32 weights in fewer bytes;
                blocks stay float32. See :class:`Column`.
            rounding: how scattered rows are rounded: ``nearest`` or ``stochastic``.

        Raises:
            ValueError: a number is out of range or not whole, the storage or rounding is unknown, or a path is given
                for storage without one.
            TypeError: weights of ``dtype`` cannot be stored as ``stored_dtype``.
            FileExistsError: ``path`` exists.
            TableBusyError: another process is making a table there.
            TableFullError: the disk has no room for the initial values. Nothing is left behind.
            TableTooLargeError: the memory could not be allocated, or the size overflows.
        """
        place = as_storage(storage, path)
        store = create_store(
            place, num_embeddings, embedding_dim, dtype=dtype, init=init, seed=seed, name=name, zero_row=zero_row,
            stored_dtype=stored_dtype, rounding=rounding,
        )  # fmt: skip
        return cls._at(place, store)

    @classmethod
    @of_all_ranks
    def open(
        cls,
        /,
        path: str | os.PathLike[str] | Storage,
        mode: str = "r+",
        *,
        commit: int | None = None,
        base: TensorSource | None = None,
    ) -> Table:
        """Open a table on disk, or one that :meth:`save` wrote.

        Args:
            path: the table's directory; or ``speedswap.Disk(directory, …)``, with settings for the cache and commits.
            mode: ``r+`` to read and write, as the only writer; ``r`` to read, following another process's commits.
            commit: the number of a held commit to open, by default the last one. With mode ``r+`` the table is
                permanently rolled back to it, which requires that no later commit is held.
            base: where the files of :func:`speedswap.init.of_tensors` are now, as they were given to it; a writer
                records that. By default they are where the table says, or at the same place relative to its directory.

        Raises:
            FileNotFoundError: ``path`` does not exist.
            ValueError: the commit does not exist; or a later one is held, and the mode is ``r+``.
            TableFormatError: the directory is damaged, or not a table; links in it are not followed, and only regular
                files are opened. Or the mode is ``r+``, and it is one rank's part of a table. Or its base is missing,
                damaged, truncated, or has other rows.
            TableBusyError: another process, or another Table in this one, has it open for writing.
        """
        place = opened_place(path)
        files = None if base is None else absolute_paths(base)
        table = cls._at(place, place.open(mode, commit) if files is None else place.open(mode, commit, files))
        if mode != "r" and (part := part_of_ranks(table.columns["weight"])) is not None:
            at = table.path or Path()
            table.close()
            raise TableFormatError(f"path is {str(at)!r}, {part}, which these alone write; {remedy_for_part(at)}")
        return table

    @classmethod
    def load(cls, /, path: str | os.PathLike[str] | Storage, *, storage: Storage | str = "auto") -> Table:
        """Load a copy of a saved table, or of a table on disk, into memory.

        Args:
            path: the table's directory, as for :meth:`open`.
            storage: as for :meth:`create`, except disk and ranks.

        Raises:
            FileNotFoundError, TableFormatError, TableTooLargeError: as :meth:`open` and :meth:`create` do.
        """
        place = as_storage(storage)
        with cls.open(path, mode="r") as source:
            return cls._at(place, place.copy(source.store))

    @classmethod
    @of_all_ranks
    def from_file(
        cls,
        /,
        file: str | os.PathLike[str],
        path: str | os.PathLike[str] | None = None,
        format: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        keys: str | os.PathLike[str] = "map",
        allow_nan: bool = False,
        dtype: torch.dtype | None = None,
        storage: Storage | str = "auto",
        seed: int = 0,
        name: str | None = None,
        stored_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
    ) -> Table:
        """Make a table from another program's file, reading a bounded piece at a time.

        The file may be untrusted: nothing in it is executed, and the sizes it declares are checked against its actual
        size before memory is allocated.

        Args:
            file: ``.npy``, ``.safetensors``, word2vec's text (``.txt``, ``.vec``) or binary format (``.bin``), or
                Parquet (``.parquet``, ``.pq``; needs pyarrow).
            path: the directory of a new table on disk; it must not exist, and appears complete or not at all. By
                default the table is in memory.
            format: ``npy``, ``safetensors``, ``word2vec``, ``word2vec-binary`` or ``parquet``; by default inferred from
                the suffix.
            columns: names of the tensors or columns to read from the file; the first becomes the weight. By default
                ``weight``, or the only column.
            keys: for rows with keys, as in the word2vec formats and in a Parquet column ``key`` of strings, bytes or
                integers (not uint64): ``"map"`` keeps them as the table's :attr:`id_map`, so that the first row in the
                file becomes row 1, and row 0, zeros, stands for unknown keys; ``"drop"`` ignores them; a path writes
                them to a text file, one per line, line i for row i.
            allow_nan: True to accept values that are not finite.
            dtype: the weights' dtype; by default the file's.
            storage, seed, name, stored_dtype, rounding: as for :meth:`create`.

        Returns:
            The table. Rows without a value in the file are zeros.

        Raises:
            TableFormatError: the file is damaged, too short or in another format, or has a value that is not finite,
                rows of different lengths or a duplicate key; the message names the row. Or the keys' type is not
                supported. Nothing is left behind.
            ValueError: ``columns``, ``format`` or ``keys`` do not fit the file.
            FileExistsError, TableFullError, TableTooLargeError: as for :meth:`create`.
            ModuleNotFoundError: pyarrow is missing.

        Example:
            >>> import pathlib, tempfile, torch, speedswap
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "vectors.txt"
            >>> _ = file.write_text("2 3\\ncat 1 2 3\\ndog 4 5 6.5\\n")
            >>> table = speedswap.Table.from_file(file)
            >>> rows = table.id_map.lookup(["dog", "mouse"])
            >>> table.gather(rows).weight
            tensor([[4.0000, 5.0000, 6.5000],
                    [0.0000, 0.0000, 0.0000]])
        """
        place = as_storage(storage, path)
        store = import_rows(
            file, place, format, columns=columns, keys=keys, allow_nan=allow_nan, dtype=dtype, seed=seed, name=name,
            stored_dtype=stored_dtype, rounding=rounding,
        )  # fmt: skip
        return cls._at(place, store)

    salvage = staticmethod(salvage)

    # ------------------------------------------------------------------ description

    def __len__(self) -> int:
        return self.num_embeddings

    @property
    def seed(self) -> int:
        """The seed of the initial values."""
        return self.store.facts.seed

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

    def column_of(self, name: str) -> Column:
        """Return a column.

        Raises:
            ValueError: no column has that name.
        """
        return column_among(self.columns, name, self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as stored: every column, with the padding between records."""
        return whole_table.bytes_of(self.store)

    @property
    def writes(self) -> int:
        """The number of scatters so far, and so the number of the next one. It is saved with the table."""
        return self.store.notes.writes

    @property
    def path(self) -> Path | None:
        """The directory of a table on disk."""
        is_part = bool(self.store.facts.part_name)  # the files belong to the whole table
        return None if self.store.files is None or is_part else self.store.files.path

    @property
    def was_found(self) -> bool:
        """True if the rows were in files before this table was made."""
        return self.store.files is not None and self.store.files.was_found

    @property
    def pinned(self) -> bool:
        """True if CUDA kernels read and write this host memory directly, or will from the first write on."""
        return self.store.notes.pinned

    @property
    def closed(self) -> bool:
        """True once the table is closed."""
        return self._is_closed or self.store.notes.closed

    @property
    def commits(self) -> Commits | None:
        """The held commits of a table on disk; None for others."""
        return None if self.store.files is None else self.store.files.commits

    @property
    def id_map(self) -> IdMap | None:
        """The id map kept with the table; None without one."""
        return self.store.notes.id_maps.get(self.store.facts.part_name)

    @of_all_ranks
    def set_id_map(self, id_map: IdMap) -> None:
        """Attach an id map to the table: it is saved, opened, copied and closed with the table.

        A table owned by ranks makes a new map with the same arguments (:attr:`id_map`), whose keys the ranks own.

        Raises:
            ValueError: its number of rows differs from the table's; the table has another map; it evicts and belongs to
                another table; or initial values cannot be computed again, to reset rows that get a new key.
            TableClosedError: the table is closed, or opened with mode ``r``.
        """
        if (known := self.id_map) is not None:
            if not known.stands_for(id_map):
                raise ValueError(f"table {self.name!r} has an id map already; use table.id_map, or another table")
            known.holder = weakref.ref(self.store)  # not set yet for a map from files
            return
        with self._held(writing=True):
            keep_map(self.store, id_map)

    @property
    def lock(self) -> threading.RLock:
        """The lock of all tables over these rows, held by the thread that uses one; free in a forked child."""
        return self._locked.lock

    @property
    def version(self) -> int:
        """A number that increases whenever rows or columns may have changed."""
        return self.store.notes.version

    def __repr__(self) -> str:
        return whole_table.described(self.store, closed=self.closed)

    def __dlpack_device__(self) -> tuple[enum.IntEnum, int]:
        """Return the host device, where :meth:`__dlpack__` puts the weights."""
        return torch.empty(0).__dlpack_device__()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        path, files = self.path, self.store.files
        if path is None or files is None:
            raise whole_table.not_pickled(self.name, self.storage)
        self.flush()  # another process sees only committed rows
        place = Disk(str(path), local_to_rank=self.local_to_rank)
        return (partial(Table.open, commit=files.stays_at), (place, "r"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        whole_table.require_copyable(self.store)
        with self._held():
            twin = type(self)(copy_rows(self.store))
            twin.local_to_rank = self.local_to_rank
            twin.attributes.pop(AVERAGES, None)  # as in torch, a copied model has no averages
            return twin

    # ------------------------------------------------------------------ batches of rows

    @of_all_ranks
    def gather(
        self,
        rows: Tensor,
        *,
        columns: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        """Copy rows out of the table onto the compute device.

        Args:
            rows: ids, int64 or int32, shape (n,), on any device.
            columns: names; all columns by default.
            device: the block's device; by default that of ``out``, of a table on a GPU, or of ``rows``.
            out: contiguous tensors (n, ...) on ``device``, by name, to receive some of the columns.

        Returns:
            A block: one contiguous tensor (n, ...) per column, in the order of ``rows``. A copy to the GPU is queued on
            torch's current stream.

        Raises:
            IdError: an id is negative or not below ``num_embeddings``.
            ValueError, TypeError: a column does not exist, or a tensor of ``out`` does not fit. In all cases nothing
                was copied.
        """
        target = None if device is None else torch.device(device)
        self.check_rows(rows)
        if out is not None:
            require_kind("out", out, Mapping, "tensors by column name")
        if out:
            target = target or next(iter(out.values())).device
            require_out(self.store, out, rows, target)
        with self._held():
            block = self.store.gather(rows, columns, target, out)
        for tensor in (out or {}).values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # tell autograd about a write that bypassed it
        return block

    @of_all_ranks
    def scatter(
        self,
        rows: Tensor,
        values: Block | Tensor | Mapping[str, Tensor],
        *,
        commit: Commit | None = None,
    ) -> None:
        """Copy rows into the table.

        This is write number :attr:`writes`, which is then incremented; the number seeds stochastic rounding.

        Args:
            rows: unique ids, int64 or int32, shape (n,), on any device.
            values: a block, a tensor of weights (n, embedding_dim), or tensors by column name, each of the column's
                dtype and row shape, on any device.
            commit: allow the table to return before the rows are written, at the end of this commit or later. Then the
                rows must be ascending, and ``values`` must not be modified afterwards.

        Raises:
            IdError: an id is negative or not below ``num_embeddings``.
            DuplicateIdError: an id occurs twice.
            ValueError, TypeError: a tensor's shape, dtype or column does not fit.
            TableFullError: the disk has no room. In all cases nothing was written.
        """
        self.check_open(writing=True)
        self._check_write(rows, commit)
        if commit is not None and not bool((rows[1:] > rows[:-1]).all()):
            raise ValueError("rows are not ascending, but a pending write needs that; sort rows and values")
        values = fitting(values, self.columns, len(rows), self.name)
        device = next((value.device for value in values.values()), None)
        values = {name: value.to(device) for name, value in values.items()}  # they move together
        with self.lock:
            self.give_back(Block(rows, {}), values, commit)
            if commit is None and (len(rows) or self.ranks is not None):
                self.store.commit()  # the scatter is a whole step

    def lease(self, rows: Tensor, *, columns: Sequence[str] | None = None, device: torch.device | None = None) -> Block:
        """Gather rows found by ``kernels.find_rows``, for :meth:`give_back` or only for reading.

        Args:
            rows: rows of the table, int64, shape (n,); unique and ascending for :meth:`give_back`.
            columns, device: as for :meth:`gather`.
        """
        with self._locked.lock:
            self.check_open()
            return self.store.gather(rows, columns, device)

    def give_back(self, block: Block, values: Mapping[str, Tensor], commit: Commit | None = None) -> None:
        """Write a leased block's rows, as one scatter.

        Args:
            block: the block that :meth:`lease` returned, or a new one with unique, ascending rows.
            values: tensors by column name, already checked to fit.
            commit: allow the table to return before the rows are written, at the end of this commit or later. Then
                ``values`` must not be modified afterwards.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        store = self.store
        with self._locked.lock:
            self.check_open(writing=True)
            if block.rows.shape[0] or self.ranks is not None:
                self.note_change(block.rows, values)
                store.scatter(block, values, None if commit is None else commit.transfers)

    @of_all_ranks
    def reset_rows(
        self, rows: Tensor, *, device: torch.device | str | None = None, commit: Commit | None = None
    ) -> None:
        """Reset some rows to their initial values in every column, weight and optimizer state, as one scatter.

        They get exactly the bits they were created with, from the initializers that the columns were created with, also
        in columns stored in fewer bytes. A column that started as a copy of another gets that column's initial values.

        Args:
            rows: unique ids, int64 or int32, shape (n,), on any device.
            device: the device of the written values; by default the rows'. For a pending write, the device of the
                steps' blocks.
            commit: as for :meth:`scatter`.

        Raises:
            IdError, DuplicateIdError: as for :meth:`scatter`.
            ValueError: initial values cannot be computed again: they were given (``from_pretrained``), or came from a
                function of ``torch.nn.init`` and the table was since reopened from files. In all cases nothing was
                written.

        Example:
            >>> import torch, speedswap
            >>> table = speedswap.Table.create(10, 2, init=speedswap.init.constant(0.5))
            >>> table.write(0, torch.ones(10, 2))
            >>> table.reset_rows(torch.tensor([3]))
            >>> table.read(2, 5)[:, 0].tolist()
            [1.0, 0.5, 1.0]
        """
        self._check_write(rows, commit)
        self.check_resettable()
        if len(rows) or self.ranks is not None:
            place = rows.device if device is None else torch.device(device)
            ordered = rows.to("cpu", torch.int64).sort().values
            with self._held(writing=True):
                initial = initial_values(self.columns, ordered, self.seed, self.num_embeddings)
                values = {name: column.to(place) for name, column in initial.items()}
                self.give_back(Block(ordered.to(place), {}), values, commit)

    def reserve_rows(self, *writes: int | range) -> None:
        """Reserve room so that later writes cannot fail for lack of it, in place of what was reserved before.

        Args:
            writes: of a scatter its number of rows; the range of rows that are written in order, in large pieces.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        with self._held(writing=True):
            if self.store.files is not None:
                self.store.files.reserve(*writes)

    def drain(self) -> None:
        """Wait until every pending write of this process has arrived."""
        with self.lock:
            self.store.drain()

    def commit(self) -> None:
        """Mark the end of a step: its writes and the live attributes are consistent."""
        with self._locked.lock:
            self.store.commit()

    # ------------------------------------------------------------------ whole columns

    @of_all_ranks
    def read(
        self, start: int = 0, stop: int | None = None, *, column: str = "weight", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Copy rows ``start`` to ``stop`` of a column into ordinary memory, in its dtype or the given one.

        Raises:
            TableTooLargeError: the rows do not fit in free memory; read fewer rows, or use :meth:`save`.
            TypeError: ids were passed.
        """
        with self._held():
            return whole_table.read_rows(self.store, start, stop, column, dtype)

    @of_all_ranks
    def write(self, start: int, values: Tensor, *, column: str = "weight", commit: bool = True) -> None:
        """Overwrite rows of a column from ``start`` on.

        Args:
            start: the first row.
            values: shape (n, ...), of the column's dtype and row shape, on any device; rounded to nearest if the column
                is stored in fewer bytes.
            column: the column's name.
            commit: True if this is a whole step, after which a table on disk may commit; False if it is part of one.

        Raises:
            IdError: some rows are out of range.
            TypeError, ValueError: dtype or shape does not fit, or ranks that own the rows together give different
                values. Nothing was written.
        """
        kernels.require_dense(values, "values")
        fitting({column: values}, self.columns, len(values), self.name)
        whole_table.require_rows(self.store.facts, start, len(values))
        if self.ranks is not None:  # each rank writes in pieces
            self.reserve_rows(len(values))
            self.ranks.require_alike(values, f"values of column {column!r} of table {self.name!r}")
        put(self, start, values, column)
        if commit:
            self.commit()

    @of_all_ranks
    def view(self, column: str = "weight") -> Tensor:
        """Return all rows of a column as a tensor over the table's memory: writing to it writes to the table.

        Its use is not guarded: checks, version and disk space are settled now, once, so a file takes its full size. Do
        not use the tensor after the table is closed, or on the CPU while a GPU works on a pinned table.

        Returns:
            A tensor (num_embeddings, ...) in the column's stored dtype; not contiguous if records hold several columns.

        Raises:
            TypeError: the column is stored as int8 with scales.
            TableFullError: the disk has no room for every row.
        """
        with self._held(writing=True):
            self.column_of(column)
            self.note_change(None, (column,))
            view = self.store.view(column)
            self.store.notes.viewed.add(view.untyped_storage().data_ptr())
            return view

    @contextmanager
    def rows_between(self, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the weights of rows ``start`` to ``stop`` on a device, read-only, for the block.

        Yields:
            Shape (stop - start, embedding_dim): a view of the table's memory if it is on the device and has this dtype;
            otherwise a copy.
        """
        with self._held():
            yield self.store.read("weight", start, stop, device)

    @of_all_ranks
    def add_columns(self, columns: Sequence[Column], *, commit: bool = True) -> None:
        """Add columns, filled with their initial values.

        Columns added before the table is first written join its records (initial values are computed again); later
        columns get separate records.

        Args:
            columns: names and initial values.
            commit: True to make them and everything before durable before returning; False leaves that to the next
                commit, e.g. inside a step.

        Raises:
            ValueError: a column of that name exists, its zero_row is not a row, or it should start as a copy of a
                column that does not exist or has another row shape.
            TypeError: one is not a :class:`Column`. In all cases nothing was changed.
        """
        with self._held(writing=True):
            require_addable(columns, self.columns, self.num_embeddings, self.name)
            for column in columns:
                if column.name in self.columns:
                    raise ValueError(f"column {column.name!r} already exists in table {self.name!r}")
            if columns:
                if commit:
                    self.store.flush()  # commits the columns at once
                self.note_change(None)
                self.store.add_columns(columns)

    @of_all_ranks
    def reset_columns(self, columns: Sequence[Column]) -> None:
        """Reset existing columns to their initial values in every row.

        Args:
            columns: names and initial values; everything else is taken from the table's columns.

        Raises:
            ValueError, TypeError: as for :meth:`add_columns`.
        """
        with self._held(writing=True):
            require_addable(columns, self.columns, self.num_embeddings, self.name)
            for column in columns:
                self.column_of(column.name)
            if columns:
                self.note_change(None, [column.name for column in columns])
                self.store.reset_columns(columns)

    @of_all_ranks
    def reserve(self, columns: Collection[str]) -> None:
        """Reserve room so that writing every row of some columns cannot fail for lack of it.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        self.reserve_rows(*[range(self.num_embeddings)] * len(columns))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return whole_table.to_numpy(self.store, self.read, dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        if options.get("copy") is False:
            raise BufferError(f"copy is False, but the rows of table {self.name!r} are always copied; use Table.view()")
        return self.read().__dlpack__(**options)

    # ------------------------------------------------------------------ files and the end

    @of_all_ranks
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the whole table, in chunks of rows, to a directory that :meth:`open` reads.

        For a table owned by ranks, all of them must call this, and each writes its rows; :meth:`load`, and :meth:`open`
        with mode ``r``, read them as one table in any process.

        Args:
            path: the directory; it appears complete or not at all, durably. If it is a symbolic link to a table, that
                table is replaced and the link stays.
            overwrite: replace an existing table.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is not set; or it is this table itself, holds foreign
                files, or is a table with a commit that checkpoints may need.
            TableBusyError: the table at ``path`` is open for writing, or being created.
            TableFullError: the disk has no room. An existing table is unchanged.
        """
        self.check_open()
        if self.joint is not None:
            self.joint.save(Path(path), overwrite=overwrite)
        else:
            save_copy(self.store, Path(path), overwrite=overwrite)

    @of_all_ranks
    def export(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        *,
        columns: Sequence[str] = ("weight",),
        keys: str | os.PathLike[str] | IdMap | Sequence[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write rows to a file for other programs, a bounded piece at a time.

        Values are written bit for bit; in text, as the shortest decimal that reads back to the same bits. A column
        stored in fewer bytes is written as the values that a lookup returns. bfloat16 and float8 are written as
        float32, which is exact, to formats that lack them (only safetensors has bfloat16).

        Args:
            path: the file; it appears complete or not at all, durably.
            format: ``npy``: one column as an array. ``safetensors``: columns as tensors of their names. ``word2vec``,
                ``word2vec-binary``: keys and vectors, as gensim's ``KeyedVectors.load_word2vec_format`` reads them.
                ``parquet``: columns as lists of fixed size, and keys as ``key`` (needs pyarrow). By default inferred
                from the suffix: ``.npy``, ``.safetensors``, ``.txt`` or ``.vec``, ``.bin``, ``.parquet`` or ``.pq``.
            columns: names; one for ``npy`` and word2vec's formats.
            keys: the rows' keys, if the format has them: an :class:`IdMap`, which selects the rows that have a key; the
                path of a text file with a key per line, or a list of strings, one per row; or ``"rows"`` for the rows'
                numbers. By default :attr:`id_map`; without one, the rows' numbers in the word2vec formats, and none in
                Parquet. Duplicate keys are written unchanged; :meth:`from_file` then reads the file only with
                ``keys="drop"``.
            overwrite: replace an existing file.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is not set; or it is inside a table's directory, a
                file of a checkpoint, or one that the table's untouched rows are read from.
            ValueError: the format or a column is unknown; the format cannot hold several columns, or keys; the number
                of keys differs from that of rows, or the word2vec formats cannot hold a key, since it is empty or has
                whitespace. Or the table is one rank's part of another.
            TypeError: the format cannot hold a column's dtype.
            TableFullError: the disk has no room. In all cases nothing is left behind.
            ModuleNotFoundError: pyarrow is missing.

        Example:
            >>> import pathlib, tempfile, torch, speedswap
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "vectors.txt"
            >>> table = speedswap.Table.create(2, 3, init=speedswap.init.constant(0.1))
            >>> table.export(file, keys=["cat", "dog"])
            >>> print(file.read_text())
            2 3
            cat 0.1 0.1 0.1
            dog 0.1 0.1 0.1
            <BLANKLINE>
        """
        self.check_open()
        export_rows(self.store, path, format, columns=columns, keys=keys, overwrite=overwrite)

    @of_all_ranks
    def save_rows(
        self,
        file: str | os.PathLike[str],
        *,
        name: str | None = None,
        since: int | None = None,
        state: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write the rows that training has changed to a safetensors file that :meth:`load_rows` reads.

        All other rows are those of the table's initializer, a checkpoint or a seed, which the file names. A table on
        disk knows its written rows; in other places, and over ranks, every row is compared with its initial values. If
        these cannot be computed again, all rows are written. Memory: 8 bytes per changed row, and a bounded piece of
        the rows themselves.

        Args:
            file: it appears complete or not at all, durably. It has ``{name}.ids``, int64, ascending, and
                ``{name}.rows``, in the dtype in which the table stores them (float32 for int8).
            name: by default the table's.
            since: the number of a held commit (:meth:`hold`), to write only the rows changed since.
            state: True to also write the optimizer's state, ``{name}.state.{column}``.
            overwrite: replace an existing file.

        Raises:
            FileExistsError: ``file`` exists and ``overwrite`` is not set, or it is inside a table's directory, or one
                that the table's untouched rows are read from.
            TypeError: the table has an id map, or a dtype that safetensors lacks; or ``since`` is given, and it keeps
                no commits.
            ValueError: the commit is not held.
            TableFullError: the disk has no room. In all cases nothing is left behind.

        Example:
            >>> import pathlib, tempfile, torch, speedswap
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "rows.safetensors"
            >>> init = speedswap.init.normal(std=0.1)
            >>> trained, fresh = (speedswap.Table.create(1000, 8, init=init) for _ in range(2))
            >>> trained.scatter(torch.tensor([3, 997]), torch.ones(2, 8))
            >>> trained.save_rows(file)
            >>> fresh.load_rows(file)
            >>> torch.equal(fresh.read(), trained.read())
            True
        """
        self.check_open()
        save_rows({name or self.name: self.store}, file, since=since, state=state, overwrite=overwrite)

    @of_all_ranks
    def load_rows(self, file: str | os.PathLike[str], *, name: str | None = None, state: bool = True) -> None:
        """Write the rows in a file of :meth:`save_rows` to the table, a bounded piece at a time, as one step.

        Rows that are not in the file stay as they are. For a table owned by ranks, all of them must call this, with the
        same file.

        Args:
            file: its shape, dtypes, checkpoint or seed, ids and checksums are verified first.
            name: the table's name in the file; by default the table's.
            state: False to leave out the optimizer's state. State that the file lacks, or that is left out, gets its
                initial values in these rows. With its state, the table goes on from the file's :attr:`writes`.

        Raises:
            FileNotFoundError: ``file`` does not exist.
            TableFormatError: it is damaged, or not a file of rows.
            ValueError: it has no rows of this name, or they are of a table of another shape or over other initial
                values; or it has state that the table lacks.
            TypeError: the table would round the rows, or has an id map.
            TableFullError: the disk has no room. In all cases nothing was written.
        """
        self.check_open(writing=True)
        load_rows({name or self.name: self.store}, file, state=state)

    @of_all_ranks
    def hold(self) -> int:
        """Commit the table on disk durably, and hold the commit: its rows stay until ``commits.let_go(commit)``.

        A table holds two commits at most; a checkpoint for which none is left copies the table.

        Returns:
            The commit's number, for :meth:`changed_since`, :meth:`save_rows` and :meth:`open`; also in a process that
            opens the table later.

        Raises:
            TypeError: the table keeps no commits: it is not on disk, scratch, or owned by ranks.
            ValueError: two commits are held already, those of checkpoints included.
        """
        with self._held(writing=True):
            return whole_table.hold_commit(self.store)

    @of_all_ranks
    def changed_since(self, commit: int) -> Tensor:
        """Return the rows written since a held commit.

        Returns:
            Ids, int64, ascending, in host memory. A row that was written with the values it had may be left out.

        Raises:
            TypeError: the table keeps no commits: it is not on disk, scratch, or owned by ranks.
            ValueError: the commit is not held.
        """
        with self._held():
            return whole_table.changed_rows(self.store, (), commit)

    @of_all_ranks
    def flush(self) -> None:
        """Commit everything written so far, and wait until it is durable (tables on disk; a no-op for others).

        A table that is not closed is flushed when it is freed, or when the process exits normally.
        """
        with self._held():
            self.store.flush()

    @of_all_ranks
    def close(self) -> None:
        """Flush, and release memory, files and lock. Closing twice is harmless, and completes an interrupted close.

        Raises:
            TableFullError: the disk has no room for the last commit. The table stays open; close it once there is room.
            TypeError, ValueError: :attr:`attributes` are not plain data, or too long. The table stays open.
        """
        with self.lock:
            try:
                self.store.close()
                self._is_closed = True
            finally:
                if self.closed:
                    self._flush_at_end.detach()

    @of_all_ranks
    def remove(self) -> None:
        """Close the table and remove its files; log a warning if checkpoints may need them."""
        if self.store.facts.part_name:
            raise TypeError(f"table {self.name!r} shares a store with others and has no separate files to remove")
        try:
            self.close()
        finally:
            if self.store.files is not None:
                self.store.files.remove()

    # ------------------------------------------------------------------ checks

    def check_open(self, *, writing: bool = False) -> None:
        """Raise unless this process can use the table, and catch up with another process that writes it.

        Raises:
            TableClosedError: it is closed, or cannot be read here, or cannot be written if writing is requested.
        """
        store = self.store
        if self._is_closed or store.notes.closed:
            raise TableClosedError(f"table {self.name!r} is closed; open it again with Table.open")
        if store.check(writing=writing):
            self.store = IdleStore.in_front_of(store)
            self.note_change(None)

    def note_change(self, rows: Tensor | range | None, columns: Collection[str] = ()) -> None:
        """Record that rows are about to change: ids, a range of rows, or all rows; ``columns`` are written."""
        note_change(self.store, rows, columns)

    def is_backed_by(self, memory: Tensor) -> bool:
        """Return whether a tensor shares the rows' memory, as :meth:`view` does."""
        return memory.untyped_storage().data_ptr() in self.store.notes.viewed

    @contextmanager
    def _held(self, *, writing: bool = False) -> Iterator[None]:
        """Hold the lock of a table that this process can use; errors are those of :meth:`check_open`."""
        with self.lock:
            self.check_open(writing=writing)
            yield

    def check_resettable(self) -> None:
        """Raise ValueError unless :meth:`reset_rows` can compute every column's initial values."""
        require_functions_of_row(self.columns, self.name)

    def check_rows(self, ids: Tensor) -> None:
        """Check one-dimensional ids against the table before anything moves.

        Raises:
            TypeError: not a tensor, or not int32 or int64.
            ValueError: not one-dimensional.
            IdError: an id is negative or not below ``num_embeddings``; it names the position and the value.
        """
        kernels.require_id_dtype(ids)
        if ids.dim() != 1:
            raise ValueError(f"rows has shape {tuple(ids.shape)}; give one-dimensional ids, rows.flatten()")
        kernels.check_ids(ids, self.num_embeddings, f"table {self.name!r}")

    def _check_write(self, rows: Tensor, commit: Commit | None) -> None:
        """Check ids as :meth:`check_rows` does, and a commit; raise DuplicateIdError if an id occurs twice."""
        if commit is not None:
            require_kind("commit", commit, Commit, "a speedswap.tables.Commit, or leave it out")
        self.check_rows(rows)
        position = kernels.first_duplicate(rows, self.num_embeddings)
        if position >= 0:
            raise DuplicateIdError(
                f"rows[{position}] is {int(rows[position])}, which occurs before it; each row of table {self.name!r} "
                "can be written once: sum or select the values of equal ids first"
            )


def put(table: Table, start: int, values: Tensor, column: str = "weight") -> None:
    """Overwrite rows of a column as :meth:`Table.write` does, with checked values, as part of a step.

    If ranks own the rows, each writes its own rows, and values are not compared.
    """
    with table.lock:
        table.check_open(writing=True)
        table.columns[column].require_storable(values, start)
        table.note_change(range(start, start + len(values)), (column,))
        table.store.write(column, start, values)
