"""A switcher's full collection of rows: its table, rows by index, and files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import warn
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import DuplicateIdError, DuplicateRowsWarning
from speedswap.swapping.switchers import arrays
from speedswap.swapping.switchers.arrays import ColumnArray
from speedswap.tables import Storage, Table, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.init import Initializer
from speedswap.tables.many import discard
from speedswap.tables.record import Column
from speedswap.tables.whole_table import as_numpy


class RowField(NamedTuple):
    """One value of a collection's rows: its name in files, its shape in a row, its dtype and its initial values."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    init: Initializer = initializers.zeros()


@dataclass(eq=False, repr=False)
class Collection:
    """Rows of one or more fields in a :class:`speedswap.Table`, created by an init method.

    Args:
        num_rows: number of rows.
        fields: of any torch dtype with a fixed item size. The first is the table's ``weight``, whatever its name.
        storage: where the rows live.
        name: its name in messages.
    """

    init_methods: ClassVar[str] = "an init method"
    file_suffix: ClassVar[str] = ".npy"
    by_name: ClassVar[bool] = False
    """True if whole collections are dictionaries by field name; False for the array of the only field."""

    num_rows: int
    fields: Sequence[RowField]
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
        """The ranks that own the rows together; None for a single process."""
        return self.storage.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first field of all rows together."""
        return (self.num_rows, *self.fields[0].row_shape)

    def in_table(self) -> list[tuple[str, RowField]]:
        """Return the fields with their names in the table."""
        return [("weight" if each is self.fields[0] else each.name, each) for each in self.fields]

    def columns(self) -> list[Column]:
        """Return the table's columns, the first of them flat."""
        return [
            Column(name, (math.prod(each.row_shape),) if name == "weight" else each.row_shape, each.dtype, each.init)
            for name, each in self.in_table()
        ]

    def column_arrays(self) -> dict[str, ColumnArray]:
        """Return the fields of all rows as arrays, by name."""
        rows = self.num_rows
        return {each.name: ColumnArray(self.table, name, (rows, *each.row_shape)) for name, each in self.in_table()}

    # ------------------------------------------------------------------ making it

    def make(self, init: Initializer | None = None) -> None:
        """Put a new table in place of the previous one, its first column with these initial values or the field's."""
        self.require_free()
        if self._table is not None and self._table.path is None:
            # Freed first, so both are never in memory together.
            self._table.close()
            self._table = None
        weight, *others = self.columns()
        self._replace(self.new_table(replace(weight, init=init or weight.init), int(torch.randint(2**62, ()).item())))
        if others:
            self.table.add_columns(others)

    def require_free(self) -> None:
        """Raise FileExistsError if the collection's directory exists."""
        try:
            self.storage.require_free()
        except FileExistsError as error:
            raise FileExistsError(f"{error}; loadCupy opens it") from None

    def new_table(self, weight: Column, seed: int) -> Table:
        """Return a new table of this collection's rows, with the first column."""
        settings: dict[str, Any] = {"init": weight.init, "seed": seed, "name": self.name}
        return Table.create(self.num_rows, *weight.row_shape, dtype=weight.dtype, storage=self.storage, **settings)

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

    def _check_opened(self, table: Table) -> None:
        for column in self.columns():
            if column.name not in table.columns:
                raise ValueError(f"{str(table.path)!r} has no {column.name}; was it another optimizer's?")
            there = table.columns[column.name]
            wanted = (self.num_rows, *column.row_shape, column.dtype)
            found = (table.num_embeddings, *there.row_shape, there.dtype)
            if found != wanted:
                raise ValueError(f"{str(table.path)!r} has rows, width and dtype {found}, but {wanted} is needed")

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
        """Copy rows of every field, in the order of the ids."""
        block = self.table.gather(ids, device=None if _lives_on_gpu(self.table) else device)
        columns = {name: rows.to(device) for name, rows in block.columns.items()}
        return {each.name: columns[name].view(len(ids), *each.row_shape) for name, each in self.in_table()}

    def scatter(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write fields of rows; for equal ids the last row of the last rank wins, and a warning says so once."""
        names = {each.name: name for name, each in self.in_table()}
        stored = {names[name]: rows.cuda() if _lives_on_gpu(self.table) else rows for name, rows in values.items()}
        if "weight" in stored:
            stored["weight"] = stored["weight"].reshape(len(stored["weight"]), math.prod(stored["weight"].shape[1:]))
        if (joint := self.table.joint) is not None:
            with self.table.lock:
                last, rows = _last_of_each(ids, stored)
                if joint.scatter_last(last, rows) or len(last) < len(ids):
                    self._warn_of_duplicates(ids)
                self.table.store.commit()
            return
        try:
            self.table.scatter(ids, stored)
        except DuplicateIdError:
            self._warn_of_duplicates(ids)
            self.table.scatter(*_last_of_each(ids, stored))

    def _warn_of_duplicates(self, ids: Tensor) -> None:
        if not self.said_duplicates:
            self.said_duplicates = True
            num_rows = len(kernels.last_occurrences(ids))
            warn(
                "SW506",
                f"{len(ids)} indexes of the collection of {self.name!r} name only {num_rows} rows: of the rows with "
                f"one index the last is kept, and the other {len(ids) - num_rows} updates are lost. "
                "speedswap.Embedding sums the gradients of equal ids instead. (Said once.)",
                DuplicateRowsWarning,
            )

    # ------------------------------------------------------------------ whole

    @of_all_ranks
    def getNumpyVersion(self) -> Any:
        """Return a copy of the whole collection as a NumPy array, or as several, by the names of the optimizer's state.

        A dtype that NumPy lacks (bfloat16) is returned as float32, which holds it exactly.

        Raises:
            TableTooLargeError: it does not fit into the free memory.
        """
        return self.whole(lambda array: as_numpy(array.table.read(column=array.column)).reshape(array.shape))

    def whole(self, form: Callable[[ColumnArray], Any]) -> Any:
        """Return all rows of each field in some form."""
        found = {name: form(array) for name, array in self.column_arrays().items()}
        return found if self.by_name else found["weight"]

    @of_all_ranks
    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write the whole collection to a ``.npy`` file, in pieces; the suffix is added where it is missing.

        The file appears complete or not at all, and replaces one of that name. ``numpy.load`` reads it. Ranks that own
        the rows together must all call this; the first one writes the file.
        """
        array = self.column_arrays()["weight"]
        with arrays.written(arrays.with_suffix(saveFileName, self.file_suffix), [array]) as stream:
            array.write(stream)

    @of_all_ranks
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read the whole collection from a ``.npy`` file, without an init method or after one.

        A collection on disk also takes an existing collection's directory and continues with it; nothing is copied.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError, TypeError: its array has another shape or dtype, or it is damaged or pickled. The collection is
                unchanged.
        """
        path = Path(loadFileName)
        if path.is_dir():
            self._open(path)
        else:
            self._read_file(path if path.exists() else arrays.with_suffix(path, self.file_suffix))

    def _read_file(self, path: Path) -> None:
        self.fill(lambda arrays_by_name: arrays.read_npy(path, arrays_by_name["weight"]))

    def fill(self, load: Callable[[dict[str, ColumnArray]], Any]) -> None:
        """Fill the table by way of its arrays, creating it if needed; a new table is removed if that fails."""
        if self._table is not None or not self.fields:
            load(self.column_arrays())
            return
        self.make(initializers.zeros())
        try:
            load(self.column_arrays())
        except BaseException:
            failed, self._table = self.table, None
            discard(failed)
            raise


def place_of(storage: Storage | str | None, diskname: str | os.PathLike[str] | None, pinned: bool) -> Storage:
    """Return the place of a switcher's rows: the one given, or the one that SpeedTorch's arguments describe."""
    if storage is None:
        storage = "disk" if diskname is not None else "pinned" if pinned else "device"
    return as_storage(storage, diskname)


def _last_of_each(ids: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each id once, with the rows at its last occurrence."""
    positions = kernels.last_occurrences(ids)
    return ids[positions], {name: rows.index_select(0, positions.to(rows.device)) for name, rows in values.items()}


def _lives_on_gpu(table: Table) -> bool:
    return table.storage == "device" and torch.cuda.is_available()
