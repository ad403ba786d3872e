"""A full collection of rows behind a switcher: its table, the rows that indexes name, and its files."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._warnings import users_level
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import DuplicateIdError, DuplicateRowsWarning
from speedswap.swapping.switchers import arrays
from speedswap.swapping.switchers.arrays import ColumnArray
from speedswap.tables import Storage, Table, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.init import Initializer
from speedswap.tables.record import Column
from speedswap.tables.table import discard
from speedswap.tables.whole_table import as_numpy


@dataclass(eq=False, repr=False)
class Collection:
    """Rows of one shape and dtype in a :class:`speedswap.Table`, made when an init method is called.

    Args:
        num_rows: number of rows.
        row_shape: shape of one row.
        row_dtype: any torch dtype with a fixed item size.
        storage: where the rows live.
        name: its name in messages.
    """

    init_methods: ClassVar[str] = "an init method"
    file_suffix: ClassVar[str] = ".npy"

    num_rows: int
    row_shape: tuple[int, ...]
    row_dtype: torch.dtype
    storage: Storage
    name: str
    said_duplicates: bool = field(default=False, init=False)
    _table: Table | None = field(default=None, init=False)

    @property
    def table(self) -> Table:
        """The collection's table.

        Raises:
            RuntimeError: no init method was called yet.
        """
        if self._table is None:
            raise RuntimeError(
                f"{type(self).__name__} has no collection of {self.name!r} yet; call {self.init_methods} first"
            )
        return self._table

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a process alone."""
        return self.storage.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        return (self.num_rows, *self.row_shape)

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the table's column and the shape of all its rows for each name in the collection's files."""
        return {"weight": ("weight", self.shape)}

    def column_arrays(self, table: Table) -> dict[str, ColumnArray]:
        """Return the columns of a table of this collection as arrays, by name."""
        return {name: ColumnArray(table, column, shape) for name, (column, shape) in self.columns().items()}

    # ------------------------------------------------------------------ making it

    def make(self, init: Initializer) -> None:
        """Put a new table with these initial values in place of the previous one."""
        self.require_free()
        if self._table is not None and self._table.path is None:
            # Freed first, so that the two are never in memory together.
            self._table.close()
            self._table = None
        self._replace(self.new_table(init, seed=int(torch.randint(2**62, ()).item())))

    def require_free(self) -> None:
        """Raise FileExistsError if the collection's directory exists."""
        try:
            self.storage.require_free()
        except FileExistsError as error:
            raise FileExistsError(f"{error}; loadCupy takes what is there") from None

    def new_table(self, init: Initializer, seed: int) -> Table:
        """Return a new table of this collection's rows."""
        settings: dict[str, Any] = {"init": init, "seed": seed, "name": self.name}
        return Table.create(self.num_rows, self.width, dtype=self.row_dtype, storage=self.storage, **settings)

    def _replace(self, table: Table) -> None:
        if self._table is not None:
            self._table.close()
        self._table = table

    def _open(self, path: Path) -> None:
        """Continue with an existing table on disk."""
        if self._table is not None and (files := self._table.store.files) is not None and files.lives_at(path):
            return
        table = self.open_table(path)
        try:
            self._check_opened(table)
        except BaseException:
            table.close()
            raise
        self._replace(table)

    def open_table(self, path: Path) -> Table:
        """Open an existing table of this collection's rows."""
        return Table.open(self.storage.at(path))

    def table_columns(self) -> list[Column]:
        """Return the columns of the table, without their initial values."""
        return [Column("weight", (self.width,), self.row_dtype, initializers.zeros())]

    def _check_opened(self, table: Table) -> None:
        wanted = (self.num_rows, self.width, self.row_dtype)
        found = (table.num_embeddings, table.embedding_dim, table.dtype)
        if found != wanted:
            raise ValueError(f"{str(table.path)!r} has rows, width and dtype {found}, but {wanted} is needed")

    @property
    def width(self) -> int:
        """Items in a row."""
        return max(1, math.prod(self.row_shape))

    # ------------------------------------------------------------------ rows

    def checked_ids(self, positive: Any, negative: Any = None) -> Tensor:
        """Return positive indexes followed by negative ones, flat; raise IdError if one is out of range."""
        what = f"the collection of {self.name!r}"
        ids = arrays.checked_ids(positive, "retrievedPosIndexes", self.num_rows, what).reshape(-1)
        if negative is None:
            return ids
        others = arrays.checked_ids(negative, "retrievedNegIndexes", self.num_rows, what).reshape(-1)
        return torch.cat([ids, others.to(ids.device)])

    def gather(self, ids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Copy rows of every column of the table, in the order of the ids."""
        block = self.table.gather(ids, device=None if _lives_on_gpu(self.table) else device)
        return {name: rows.to(device) for name, rows in block.columns.items()}

    def scatter(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write rows; of rows with equal ids the last one wins, of the last rank, and a warning says so once."""
        if _lives_on_gpu(self.table):
            values = {name: rows.cuda() for name, rows in values.items()}
        if (joint := self.table.store.joint) is not None:
            with self.table.lock:
                last, rows = _last_of_each(ids, values)
                if joint.scatter_last(last, rows) or len(last) < len(ids):
                    self._warn_of_duplicates(ids)
                self.table.store.commit()
            return
        try:
            self.table.scatter(ids, values)
        except DuplicateIdError:
            self._warn_of_duplicates(ids)
            self.table.scatter(*_last_of_each(ids, values))

    def _warn_of_duplicates(self, ids: Tensor) -> None:
        if not self.said_duplicates:
            self.said_duplicates = True
            warn_of_duplicates(ids, self.name)

    # ------------------------------------------------------------------ whole

    @of_all_ranks
    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """Return the whole collection as a NumPy array, a copy.

        A dtype that NumPy lacks (bfloat16) is returned as float32, which holds it exactly.

        Raises:
            TableTooLargeError: it does not fit into the free memory.
        """
        return as_numpy(self.table.read()).reshape(self.shape)

    @of_all_ranks
    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write the whole collection to a ``.npy`` file, in pieces; the suffix is added where it is missing.

        The file appears complete or not at all, and replaces one of that name. ``numpy.load`` reads it. Of ranks that
        own the rows together, which all call this, the first one writes it.
        """
        array = self.column_arrays(self.table)["weight"]
        with arrays.written(arrays.with_suffix(saveFileName, self.file_suffix), [array]) as stream:
            array.write(stream)

    @of_all_ranks
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read the whole collection from a ``.npy`` file, without an init method or after one.

        A collection on disk also takes the directory of an existing one: it continues with that, and nothing is copied.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: its array has another shape or dtype, or it is damaged or pickled. The collection is
                unchanged.
        """
        path = Path(loadFileName)
        if path.is_dir():
            self._open(path)
        else:
            self._read_file(path if path.exists() else arrays.with_suffix(path, self.file_suffix))

    def _read_file(self, path: Path) -> None:
        self.fill(lambda table: arrays.read_npy(path, self.column_arrays(table)["weight"]))

    def fill(self, load: Callable[[Table], Any]) -> None:
        """Fill the table, creating it if needed; a new table is removed if that fails."""
        if self._table is not None:
            load(self._table)
            return
        self.make(initializers.zeros())
        assert self._table is not None
        try:
            load(self._table)
        except BaseException:
            failed, self._table = self._table, None
            discard(failed)
            raise


def place_of(
    callee: str,
    storage: Storage | str | None,
    diskname: str | os.PathLike[str] | None,
    pinned: bool,
    former: Mapping[str, Any],
) -> Storage:
    """Return the place of a switcher's rows: the one given, or the one that SpeedTorch's arguments describe."""
    if storage is None:
        storage = "disk" if diskname is not None else "pinned" if pinned else "device"
    return as_storage(storage, diskname, former, callee)


def warn_of_duplicates(ids: Tensor, name: str) -> None:
    """Warn that some of the written rows have equal ids, and how many are lost."""
    num_rows = len(kernels.last_occurrences(ids))
    warnings.warn(
        f"{len(ids)} indexes of the collection of {name!r} name only {num_rows} rows: of the rows with one index the "
        f"last is kept, and the other {len(ids) - num_rows} updates are lost. speedswap.Embedding sums the gradients "
        "of equal ids instead. (Said once.)",
        DuplicateRowsWarning,
        stacklevel=users_level(),
    )


def _last_of_each(ids: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each id once, with the rows at its last occurrence."""
    positions = kernels.last_occurrences(ids)
    return ids[positions], {name: rows.index_select(0, positions.to(rows.device)) for name, rows in values.items()}


def _lives_on_gpu(table: Table) -> bool:
    return table.storage == "device" and torch.cuda.is_available()
