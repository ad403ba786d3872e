"""The full rows: a table of records, read and written a batch of rows at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._locks import Locked
from speedswap.errors import DuplicateIdError, IdError, TableClosedError
from speedswap.tables import init as initializers
from speedswap.tables import whole_table
from speedswap.tables.block import Block, fitting
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.id_map import IdMap
from speedswap.tables.init import Initializer
from speedswap.tables.initial import require_functions_of_row
from speedswap.tables.local import LocalStore
from speedswap.tables.record import Column, count
from speedswap.tables.store import RowStore

if TYPE_CHECKING:
    import enum

    from numpy.typing import DTypeLike, NDArray

    from speedswap.tables.many import Commit

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
        num_embeddings: rows.
        storage: where they live.
        engine: how they go between host memory and a GPU.
        seed: of the initial values.
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
        self.num_embeddings = store.num_embeddings
        self.storage = store.storage
        self.engine = store.engine
        self.seed = store.seed
        self.name = store.name
        self.attributes = store.attributes
        self.live_attributes = store.live_attributes
        self._flush_at_end = weakref.finalize(self, _flush_at_end, store, store.locked)

    # ------------------------------------------------------------------ construction

    @classmethod
    def create(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        storage: str = "auto",
        engine: str = "auto",
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
            num_embeddings: rows, at least 1.
            embedding_dim: items in a row's weight, at least 1.
            dtype: of the weights; any torch dtype with a fixed item size.
            storage: ``device`` (GPU memory), ``pinned`` (host memory that the GPU reads directly), ``pageable``
                (ordinary memory), ``memmap`` (a directory with the rows in a file), or ``auto``: memmap where a path is
                given, else pinned where there is a GPU, else pageable. Where there is no GPU, ``pinned`` works as
                ``pageable`` and says so once.
            engine: how rows go between a pinned table and a GPU: ``zero_copy`` (kernels read and write the table over
                the bus), ``staged`` (CPU threads gather, the copy engine carries; pageable and memmap tables have no
                other way), ``split`` (both at once), or ``auto``: the one that is fastest here. That is measured once
                on a machine, in two seconds, when the first large table is made; ``speedswap info`` tells.
            path: the directory of a memmap table; it must not exist yet, and does once it is complete and durable.
            init: one of :mod:`speedswap.init`, or a function of ``torch.nn.init``; zeros by default.
            seed: of the initial values; the same seed gives the same bits everywhere.
            name: for messages; the path's last part, or ``table``, by default.
            zero_row: a row that starts as zeros whatever ``init`` says.
            stored_dtype: float16, bfloat16, or int8 with a scale per row, to hold float32 weights in fewer bytes;
                blocks stay float32. See :class:`Column`.
            rounding: ``nearest`` or ``stochastic``, for scattered rows.

        Raises:
            ValueError: a number out of range, an unknown storage, engine or rounding, a path where none belongs.
            TypeError: weights of ``dtype`` cannot be stored as ``stored_dtype``.
            FileExistsError: ``path`` exists.
            TableBusyError: another process is making a table there.
            TableFullError: the disk has no room for the initial values. Nothing is left behind.
            TableTooLargeError: the memory could not be allocated, or the bytes cannot be counted.
        """
        num_embeddings = count("num_embeddings", num_embeddings)
        embedding_dim = count("embedding_dim", embedding_dim)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; give a whole number from 0 to 2**64 - 1")
        if zero_row is not None and not 0 <= zero_row < num_embeddings:
            raise ValueError(f"zero_row is {zero_row}, but the table has rows 0 to {num_embeddings - 1}")
        if str(dtype).startswith("torch.q"):
            raise TypeError(
                f"dtype is {dtype}, whose scales are not in the rows; use torch.int8 and keep the scales apart"
            )
        weight = Column("weight", (embedding_dim,), dtype, initializers.resolve(init), zero_row, stored_dtype, rounding)
        return cls(
            LocalStore.create(num_embeddings, weight, storage=storage, engine=engine, path=path, seed=seed, name=name)
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r+") -> Table:
        """Open a memmap table, or one that :meth:`save` wrote.

        Args:
            path: the table's directory.
            mode: ``r+`` to read and write, as the only writer; ``r`` to read, also what another process writes
                meanwhile.

        Raises:
            FileNotFoundError: there is nothing at ``path``.
            TableFormatError: the directory is damaged, or not a table; links within it are not followed, and other
                things than files not opened.
            TableBusyError: another process, or another Table of this one, has it open for writing.
        """
        return cls(LocalStore.open(path, mode))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, storage: str = "auto", engine: str = "auto") -> Table:
        """Load a copy of a table in files, such as :meth:`save` writes, into memory.

        Args:
            path: the table's directory.
            storage, engine: as in :meth:`create`, but for memmap.

        Raises:
            FileNotFoundError, TableFormatError, TableTooLargeError: as :meth:`open` and :meth:`create` do.
        """
        with cls.open(path, mode="r") as source:
            return cls(source.store.copy(storage, engine))

    # ------------------------------------------------------------------ description

    def __len__(self) -> int:
        return self.num_embeddings

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
        return self.store.writes

    @property
    def path(self) -> Path | None:
        """The directory of a memmap table."""
        return self.store.path

    @property
    def pinned(self) -> bool:
        """True if CUDA kernels read and write this host memory directly."""
        return self.store.pinned

    @property
    def closed(self) -> bool:
        """True once the table was closed."""
        return self.store.closed

    @property
    def attributes_lag(self) -> bool:
        """True if the attributes, as found, may be of an earlier step than the rows."""
        return self.store.attributes_lag

    @property
    def id_map(self) -> IdMap | None:
        """The map from keys to rows that is kept with the table; None if there is none."""
        return self.store.id_maps.get(self.store.map_name)

    def set_id_map(self, id_map: IdMap) -> None:
        """Keep a map from keys to rows with the table: saved, opened, copied and closed with it.

        Raises:
            ValueError: it has other rows than the table; the table has another map; it evicts, and is another table's;
                or the initial values of rows that are to start anew cannot be computed again.
            TableClosedError: the table is closed, or opened with mode ``r``.
        """
        if self.id_map is id_map:
            return
        if self.id_map is not None:
            raise ValueError(f"table {self.name!r} has an id map already; use table.id_map, or another table")
        if id_map.num_rows != self.num_embeddings:
            raise ValueError(
                f"id_map has rows 0 to {id_map.capacity}, and table {self.name!r} rows 0 to {self.num_embeddings - 1}; "
                "make the table with id_map.num_rows rows"
            )
        if id_map.evict is not None and id_map.holder() not in (None, self.store):
            raise ValueError(
                f"id_map evicts and is another table's, whose rows start anew then; give table {self.name!r} a map of "
                "its own, or one with evict=None"
            )
        self.check_resettable()
        with self.lock:
            self.check_open(writing=True)
            id_map.holder = weakref.ref(self.store)
            self.store.id_maps[self.store.map_name] = id_map

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread that uses the table, or another one over its rows; a forked child finds it free."""
        return self.store.locked.lock

    @property
    def version(self) -> int:
        """A number that goes up whenever rows or columns may have changed."""
        return self.store.version

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.storage
        columns = "".join(f" + {name}" for name in self.columns if name != "weight")
        weight = self.columns["weight"]
        dtype = str(weight.dtype).removeprefix("torch.")
        if weight.compact:
            dtype += f" as {str(weight.stored_dtype).removeprefix('torch.')}"
        size = f"{self.nbytes / 2**30:.2f} GiB" if self.nbytes > 2**30 // 200 else "under 0.01 GiB"
        return f"Table({self.name!r}, {self.num_embeddings:,} × {self.embedding_dim} {dtype}{columns}, {state}, {size})"

    # ------------------------------------------------------------------ batches of rows

    def gather(
        self,
        rows: Tensor,
        *,
        columns: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        out: Mapping[str, Tensor] | None = None,
        checked: bool = False,
    ) -> Block:
        """Copy rows out of the table onto the compute device.

        Args:
            rows: ids, int64 or int32, shape (n,), on any device.
            columns: names; all columns by default.
            device: where the block goes; by default the device of ``out``, of a table on a GPU, or of ``rows``.
            out: contiguous tensors (n, ...) on ``device``, by name, that take some of the columns.
            checked: True if the ids are known to be rows of the table, and ``out`` to fit.

        Returns:
            A block: one contiguous tensor (n, ...) for each column, in the order of ``rows``. A copy to the GPU is
            queued on torch's current stream.

        Raises:
            IdError: an id is negative or not below ``num_embeddings``.
            ValueError, TypeError: there is no such column, or a tensor of ``out`` does not fit. In all cases nothing
                was copied.
        """
        target = None if device is None else torch.device(device)
        if not checked:
            self.check_rows(rows)
        if out:
            target = target or next(iter(out.values())).device
            if not checked:
                self._require_out(out, rows, target)
        with self.lock:
            self.check_open()
            block = self.store.gather(rows, columns, target, out)
        for tensor in (out or {}).values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # autograd must notice a write that bypassed it
        return block

    def _require_out(self, out: Mapping[str, Tensor], rows: Tensor, device: torch.device) -> None:
        for name, tensor in fitting(out, self.columns, len(rows), self.name).items():
            kernels.require_apart(tensor, f"out[{name!r}]", rows, "rows")
            is_plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
            if not is_plain or tensor.device != device or self.store.is_backed_by(tensor):
                raise ValueError(
                    f"out[{name!r}], on {tensor.device} with strides {tensor.stride()}, cannot take the rows; give a "
                    f"contiguous tensor on {device} that is not a view of the table"
                )

    def scatter(
        self,
        rows: Tensor,
        values: Block | Tensor | Mapping[str, Tensor],
        *,
        checked: bool = False,
        pending: Commit | None = None,
    ) -> None:
        """Copy rows into the table.

        This is write number :attr:`writes`, which then goes up: what stochastic rounding draws depends on it.

        Args:
            rows: unique ids, int64 or int32, shape (n,), on any device.
            values: a block, or a tensor of weights (n, embedding_dim), or tensors by column name; each of the column's
                dtype and row shape, on any device.
            checked: True if the ids are known to be unique rows of the table, and the values, by column name, to fit.
            pending: allow the table to return before the rows are written, by the end of this commit or after it. Then
                the rows are ascending, and nothing changes ``values`` any more.

        Raises:
            IdError: an id is negative or not below ``num_embeddings``.
            DuplicateIdError: an id occurs twice.
            ValueError, TypeError: a tensor's shape, dtype or column does not fit.
            TableFullError: the disk has no room. In all cases nothing was written.
        """
        if not checked:
            self.check_open(writing=True)
            self.check_rows(rows)
            self._require_unique(rows)
            if pending is not None and not bool((rows[1:] > rows[:-1]).all()):
                raise ValueError("rows are not ascending, as those of a pending write must be; sort them, with values")
            values = fitting(values, self.columns, len(rows), self.name)
        assert isinstance(values, Mapping)
        with self.lock:
            self.check_open(writing=True)
            if len(rows):
                self.store.version += 1
                self.store.scatter(rows, values, None if pending is None else pending.transfers)

    def _require_unique(self, rows: Tensor) -> None:
        position = kernels.first_duplicate(rows, self.num_embeddings)
        if position >= 0:
            raise DuplicateIdError(
                f"rows[{position}] is {int(rows[position])}, which occurs before it; each row of table {self.name!r} "
                "can be written once: sum or select the values of equal ids first"
            )

    def drain(self) -> None:
        """Return when every pending write of this process has arrived."""
        with self.lock:
            self.store.drain()

    def commit(self, *, known: bool = True) -> None:
        """Note that a step has ended: what it has written and the live attributes belong together.

        Args:
            known: False if live attributes would have to be waited for.
        """
        with self.lock:
            self.store.commit(known=known)

    def reserve(self, columns: Iterable[str]) -> None:
        """Make sure that writing every row of some columns cannot fail for want of room.

        Raises:
            TableFullError: the disk has no room. Nothing was written.
        """
        with self.lock:
            self.check_open(writing=True)
            self.store.reserve(columns)

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

    # ------------------------------------------------------------------ whole columns

    def read(self, start: int = 0, stop: int | None = None, *, column: str = "weight") -> Tensor:
        """Copy rows ``start`` to ``stop`` of a column into ordinary memory.

        Raises:
            TableTooLargeError: they do not fit into free memory; read fewer rows, or use :meth:`save`.
        """
        start, stop, _ = slice(start, stop).indices(self.num_embeddings)
        stop = max(start, stop)
        with self.lock:
            self.check_open()
            found = self._column(column)
            whole_table.require_memory(
                (stop - start) * found.width * found.dtype.itemsize,
                f"rows {start} to {stop - 1} of column {column!r} of table {self.name!r}",
            )
            return self.store.read(column, start, stop).to("cpu", copy=not found.compact).contiguous()

    @contextmanager
    def rows_between(self, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
        """Provide the weights of rows ``start`` to ``stop`` on a device, to be read inside the block and not changed.

        Yields:
            Shape (stop - start, embedding_dim): a view of the table's memory if that is on the device and holds them
            in this dtype; else a copy.
        """
        with self.lock:
            self.check_open()
            yield self.store.read("weight", start, stop, device)

    def _column(self, name: str) -> Column:
        """Return a column.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.columns:
            raise ValueError(f"column {name!r} is not in table {self.name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Copy all weights into an array, for ``np.asarray(table)``.

        Args:
            dtype: of the array; by default that of the weights.
            copy: False is refused: only :meth:`view` shares the table's memory.

        Returns:
            An array (num_embeddings, embedding_dim).

        Raises:
            TableTooLargeError: it does not fit into free memory.
            TypeError: NumPy has no such dtype (bfloat16), and no other was asked for.
            ValueError: ``copy`` is False.
        """
        return whole_table.to_numpy(self, dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Copy all weights into a DLPack capsule in host memory, for ``torch.as_tensor(table)``.

        Raises:
            TableTooLargeError: they do not fit into free memory.
            BufferError: ``copy`` is False.
        """
        if options.get("copy") is False:
            raise BufferError(f"copy is False, but the rows of table {self.name!r} are always copied; use Table.view()")
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[enum.IntEnum, int]:
        """Return host memory, where :meth:`__dlpack__` puts the weights."""
        return torch.empty(0).__dlpack_device__()

    def write(self, start: int, values: Tensor, *, column: str = "weight") -> None:
        """Overwrite rows of a column from ``start`` on.

        Args:
            start: the first row.
            values: shape (n, ...), of the column's dtype and row shape, on any device; rounded to nearest where the
                column is stored in fewer bytes.

        Raises:
            IdError: the rows do not all lie in the table.
            TypeError, ValueError: dtype or shape does not fit. Nothing was written.
        """
        kernels.require_dense(values, "values")
        fitting({column: values}, self.columns, len(values), self.name)
        if start < 0 or start + len(values) > self.num_embeddings:
            raise IdError(
                f"rows {start} to {start + len(values) - 1} were to be written, but table {self.name!r} has rows 0 to "
                f"{self.num_embeddings - 1}"
            )
        with self.lock:
            self.check_open(writing=True)
            self.store.version += 1
            self.store.write(column, start, values)

    def view(self, column: str = "weight") -> Tensor:
        """Return all rows of a column as a tensor over the table's own memory: writing to it writes to the table.

        Its use is not guarded: checks, version and room on disk are settled now, once, so that a file takes its full
        size. It must not be used after the table is closed, nor on the CPU while a GPU works on a pinned table.

        Returns:
            A tensor (num_embeddings, ...), not contiguous where records hold more than this column; of the dtype in
            which the column is stored.

        Raises:
            TypeError: the column is stored as int8 with scales.
            TableFullError: the disk has no room for every row.
        """
        with self.lock:
            self.check_open(writing=True)
            self._column(column)
            self.store.version += 1
            return self.store.view(column)

    # ------------------------------------------------------------------ columns

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Give every row more columns, at their initial values.

        Before the table is first written they share its records (initial values are computed again); afterwards they
        start new records next to the others.

        Raises:
            ValueError: a column of that name exists.
        """
        with self.lock:
            self.check_open(writing=True)
            for column in columns:
                if column.name in self.columns:
                    raise ValueError(f"column {column.name!r} exists already in table {self.name!r}")
            if columns:
                self.store.version += 1
                self.store.add_columns(columns)

    def reset_columns(self, columns: Sequence[Column]) -> None:
        """Give existing columns their initial values again, in every row.

        Args:
            columns: names and initial values; everything else is taken from the table's own columns.
        """
        with self.lock:
            self.check_open(writing=True)
            for column in columns:
                self._column(column.name)
            if columns:
                self.store.version += 1
                self.store.reset_columns(columns)

    def reset_rows(
        self, rows: Tensor, *, device: torch.device | str | None = None, pending: Commit | None = None
    ) -> None:
        """Give some rows their initial values again, in every column: weight and optimizer state, as one scatter.

        They have the very bits that they were made with: of the initializers that the columns were made with, also in
        columns that are stored in fewer bytes. A column that began as a copy of another one gets that one's initial
        values.

        Args:
            rows: unique ids, int64 or int32, shape (n,), on any device.
            device: where the values are written from; by default the rows'. For a pending write that of the steps'
                blocks.
            pending: as for :meth:`scatter`.

        Raises:
            IdError, DuplicateIdError: as for :meth:`scatter`.
            ValueError: initial values cannot be computed again: the rows were given, as to ``from_pretrained``, or by a
                function of ``torch.nn.init`` to a table in files that was opened. In all cases nothing was written.

        Example:
            >>> import torch, speedswap
            >>> table = speedswap.Table.create(10, 2, init=speedswap.init.constant(0.5))
            >>> table.write(0, torch.ones(10, 2))
            >>> table.reset_rows(torch.tensor([3]))
            >>> table.read(2, 5)[:, 0].tolist()
            [1.0, 0.5, 1.0]
        """
        self.check_rows(rows)
        self._require_unique(rows)
        self.check_resettable()
        if len(rows):
            place = rows.device if device is None else torch.device(device)
            ordered = rows.to("cpu", torch.int64).sort().values
            with self.lock:
                self.check_open(writing=True)
                initial = self.store.initial_rows(ordered)
                values = {name: column.to(place) for name, column in initial.items()}
                self.scatter(ordered.to(place), values, checked=True, pending=pending)

    def check_resettable(self) -> None:
        """Raise ValueError unless :meth:`reset_rows` can compute every column's initial values."""
        require_functions_of_row(self.columns, self.name)

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the whole table, in chunks of rows, to a directory that :meth:`open` reads.

        Args:
            path: the directory; it appears there complete or not at all, durably. If it is a symbolic link to a
                table, that table is replaced, since it is the one that opens under this name, and the link stays.
            overwrite: replace an existing table.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is not set, or is this table itself, or holds other files
                than a table's.
            TableBusyError: the table there is open for writing, or being made.
            TableFullError: the disk has no room. An existing table is unchanged.
        """
        self.check_open()
        if self.store.lives_at(path):
            raise FileExistsError(f"path is {os.fspath(path)!r}, where this table lives already; use flush()")
        with TableDirectory.replacing(Path(path), overwrite=overwrite) as copied, self.lock:
            self.check_open()
            self.store.save_to(copied)

    def flush(self) -> None:
        """Make everything written so far durable (memmap tables; a no-op for others).

        A table that is not closed is flushed when it is freed, or when the process ends by itself.
        """
        with self.lock:
            self.check_open()
            self.store.flush()

    def close(self) -> None:
        """Flush, and release memory, file and lock. Closing twice is harmless, and completes an interrupted close."""
        with self.lock:
            try:
                self.store.close()
            finally:
                if self.closed:
                    self._flush_at_end.detach()

    def remove(self) -> None:
        """Close the table and remove its files."""
        try:
            self.close()
        finally:
            self.store.remove()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            raise TypeError(
                f"table {self.name!r} is {self.storage} memory and cannot be pickled; save it with Table.save(path) "
                "and open it with Table.open(path, mode='r') in the other process"
            )
        return (Table.open, (str(self.path), "r"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        if self.path is not None:
            raise TypeError(
                f"table {self.name!r} lies in files, which are not copied implicitly; copy it with Table.save(path) "
                "and Table.open(path), or into memory with Table.load(path)"
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
        if self.closed:
            raise TableClosedError(f"table {self.name!r} is closed; open it again with Table.open")
        if self.store.check(writing=writing):
            self.store.version += 1


def _flush_at_end(store: RowStore, locked: Locked) -> None:
    """Flush a store whose table was not closed: its object was freed, or the process ends."""
    with locked.lock:
        store.flush_at_end()
