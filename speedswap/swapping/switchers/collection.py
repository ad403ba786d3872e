"""A switcher's full collection of rows: its table, rows by indexes of NumPy, CuPy or torch, and whole columns in files.

Files are ``.npy`` and ``.npz``.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedswap import kernels
from speedswap._words import warn
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import DuplicateIdError, DuplicateRowsWarning, IdError
from speedswap.tables import Storage, Table, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.files.place import write_whole
from speedswap.tables.init import Initializer
from speedswap.tables.many import discard
from speedswap.tables.record import Column
from speedswap.tables.whole_table import as_numpy

_ID_DTYPES = (torch.int32, torch.int64)
_PIECE_BYTES = 64 * 2**20


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
        ids = checked_ids(positive, "retrievedPosIndexes", self.num_rows, what).reshape(-1)
        if negative is None:
            return ids
        others = checked_ids(negative, "retrievedNegIndexes", self.num_rows, what).reshape(-1)
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
        with written(with_suffix(saveFileName, self.file_suffix), [array]) as stream:
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
            self._read_file(path if path.exists() else with_suffix(path, self.file_suffix))

    def _read_file(self, path: Path) -> None:
        self.fill(lambda arrays_by_name: read_npy(path, arrays_by_name["weight"]))

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


# ---------------------------------------------------------------------- indexes, values and dtypes


def as_dtype(datatype: Any, argument: str = "datatype") -> torch.dtype:
    """Return the torch dtype that stands for a NumPy dtype, its name, or a torch dtype or its name.

    Raises:
        TypeError: torch has no equivalent dtype.

    >>> as_dtype("float32"), as_dtype(np.dtype("uint32")), as_dtype("bfloat16"), as_dtype(torch.float64)
    (torch.float32, torch.uint32, torch.bfloat16, torch.float64)
    """
    if isinstance(datatype, torch.dtype):
        return datatype
    try:
        return torch.from_numpy(np.empty(0, np.dtype(datatype))).dtype
    except TypeError:
        found = getattr(torch, datatype, None) if isinstance(datatype, str) else None
        if isinstance(found, torch.dtype):
            return found
        raise TypeError(f"{argument} is {datatype!r}; give a dtype that torch has, such as 'float32'") from None


def trainable_dtype(datatype: Any, argument: str) -> torch.dtype:
    """Return :func:`as_dtype` of a floating-point or complex dtype, and raise TypeError for any other."""
    dtype = as_dtype(datatype, argument)
    if not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"{argument} is {datatype!r}; rows are trained, so give a floating-point dtype")
    return dtype


def as_array(values: Any) -> Tensor | npt.NDArray[Any]:
    """Return values without moving them: as a tensor if torch can share their memory on a GPU or by DLPack, else NumPy.

    >>> as_array([1.5, 2]), as_array(torch.tensor(3))
    (array([1.5, 2. ]), tensor(3))
    """
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray | np.generic) and hasattr(values, "__dlpack__"):
        return from_dlpack(values)
    if hasattr(values, "__cuda_array_interface__"):
        return torch.as_tensor(values)
    return np.asarray(values)


def as_ids(indexes: Any, argument: str) -> Tensor:
    """Return indexes as an int32 or int64 tensor of the same shape, on their device.

    Args:
        indexes: a torch tensor, a NumPy array, an array on CPU or GPU with DLPack or a ``__cuda_array_interface__``
            (CuPy), or a sequence of whole numbers; of any integer dtype.
        argument: its name, for the message.

    Raises:
        TypeError: not whole numbers.

    >>> as_ids(np.array([[3, 1]], dtype=np.uint32), "indexes")
    tensor([[3, 1]])
    """
    ids = as_array(indexes)
    if isinstance(ids, np.ndarray):
        array = ids if ids.size or isinstance(indexes, np.ndarray) else ids.astype(np.int64)  # [] has no dtype
        if array.dtype.kind not in "iu":
            raise TypeError(f"{argument} is an array of {array.dtype}; give whole numbers, the rows' indexes")
        # torch does not share memory that is read-only, byte-swapped or walked backwards.
        ids = torch.from_numpy(array.astype(np.int32 if array.dtype.newbyteorder("=") == np.int32 else np.int64))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{argument} is an array of {ids.dtype}; give whole numbers, the rows' indexes")
    # A uint64 of 2**63 or more becomes negative here, which is outside every table.
    return ids if ids.dtype in _ID_DTYPES else ids.to(torch.int64)


def checked_ids(indexes: Any, argument: str, num_rows: int, what: str) -> Tensor:
    """Return :func:`as_ids` of indexes into the ``num_rows`` rows of ``what``.

    Raises:
        TypeError: not whole numbers.
        IdError: an index is negative or not below ``num_rows``; the message has the argument's name.
    """
    ids = as_ids(indexes, argument)
    try:
        kernels.check_ids(ids, num_rows, what)
    except IdError as error:
        raise IdError(f"{argument}: {error}") from None
    return ids


# ---------------------------------------------------------------------- whole columns, and files


class ColumnArray(NamedTuple):
    """A whole column of a table as one array.

    Attributes:
        table: its table.
        column: its name there.
        shape: of all rows together.
    """

    table: Table
    column: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in files: NumPy's equivalent of the column's."""
        return as_numpy(torch.empty(0, dtype=self.table.columns[self.column].dtype)).dtype

    def view(self) -> Tensor:
        """Return the rows themselves, not a copy."""
        return self.table.view(self.column).view(self.shape)

    def check(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Raise ValueError or TypeError if an array of that shape and dtype does not fit the column."""
        if tuple(shape) != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but the collection has {self.shape}; give a file of that shape"
            )
        if dtype != self.dtype:
            raise TypeError(
                f"{name} holds {dtype}, but the collection is saved as {self.dtype}; convert it with astype"
            )

    def fill(self, values: Callable[[slice], npt.NDArray[Any]]) -> None:
        """Overwrite the column, piece by piece.

        Args:
            values: returns the values of a slice of rows, called for consecutive slices.
        """
        column = self.table.columns[self.column]
        for rows in self._pieces():
            piece = values(rows)
            tensor = torch.from_numpy(np.array(piece, dtype=piece.dtype.newbyteorder("=")))
            self.table.write(rows.start, tensor.reshape(-1, *column.row_shape).to(column.dtype), column=self.column)

    def write(self, stream: IO[bytes]) -> None:
        """Write the column to a stream in the ``.npy`` format."""
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for rows in self._pieces():
            stream.write(as_numpy(self.table.read(rows.start, rows.stop, column=self.column)).tobytes())

    def read(self, stream: IO[bytes]) -> None:
        """Overwrite the column from a stream that holds only its values."""
        row_items, dtype = math.prod(self.shape[1:]), self.dtype
        self.fill(lambda rows: np.frombuffer(stream.read((rows.stop - rows.start) * row_items * dtype.itemsize), dtype))

    def _pieces(self) -> Iterator[slice]:
        num_rows = len(self.table)
        step = max(1, _PIECE_BYTES // max(1, self.table.columns[self.column].row_bytes))
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def with_suffix(file: str | os.PathLike[str], suffix: str) -> Path:
    """Return the path that NumPy would write to: with ``suffix``, unless the name ends in it."""
    path = Path(file)
    return path if path.name.endswith(suffix) else path.with_name(path.name + suffix)


def read_npy(path: Path, array: ColumnArray) -> None:
    """Overwrite a column with the rows of a ``.npy`` file.

    Raises:
        ValueError: the file's array has another shape, or the file is damaged or holds pickled objects.
        TypeError: the file's array has another dtype. In all cases the column is unchanged.
    """
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{str(path)!r} holds several arrays; give a .npy file with one")
    array.check(path.name, values.shape, values.dtype)
    array.fill(values.__getitem__)


def write_npz(path: Path, arrays: Mapping[str, ColumnArray], numbers: Mapping[str, Any]) -> None:
    """Write several columns, and numbers, by name to one uncompressed ``.npz`` file.

    The file appears complete or not at all.
    """
    with written(path, arrays.values()) as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                array.write(member)
        for name, number in numbers.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(number), allow_pickle=False)


def read_npz(path: Path, arrays: Mapping[str, ColumnArray], numbers: Iterable[str]) -> dict[str, Any]:
    """Overwrite columns with the arrays of a ``.npz`` file; return those of ``numbers`` that it has.

    Raises:
        ValueError: an array is missing or has another shape, or the file is damaged or holds pickled objects.
        TypeError: an array's dtype is not its column's. In all cases the columns are unchanged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
            if missing := [name for name in arrays if name not in sizes]:
                raise ValueError(
                    f"{str(path)!r} has arrays {list(sizes)}, but {missing} is needed; was it another optimizer's?"
                )
            # Everything is checked before anything is written.
            for name, array in arrays.items():
                with archive.open(f"{name}.npy") as member:
                    shape, dtype = _header(member, path)
                    array.check(f"{name} in {path.name}", shape, dtype)
                    nbytes = sizes[name] - member.tell()
                if nbytes != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{str(path)!r} is damaged: {name} has {nbytes} bytes for shape {shape}")
            found = {}
            for name in set(numbers) & sizes.keys():
                with archive.open(f"{name}.npy") as member:
                    found[name] = _number(member, path, name)
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{str(path)!r} is damaged: the checksum of {damaged} does not match")
            for name, array in arrays.items():
                with archive.open(f"{name}.npy") as member:
                    _header(member, path)
                    array.read(member)
            return found
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{str(path)!r} is not a .npz file of saveCupy: {error}") from error


def _header(stream: IO[bytes], path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{str(path)!r} is a .npz of a format that saveCupy does not write")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran_order and len(shape) > 1:
        raise ValueError(f"{str(path)!r} has its arrays in Fortran order; save them with np.ascontiguousarray")
    return shape, dtype


def _number(stream: IO[bytes], path: Path, name: str) -> Any:
    shape, dtype = _header(stream, path)
    if shape != () or dtype.kind not in "biufc":
        raise ValueError(f"{name!r} in {str(path)!r} is an array of {dtype} and shape {shape}, but a number is needed")
    return np.frombuffer(stream.read(dtype.itemsize), dtype=dtype)[0]


class _Nowhere(io.RawIOBase):
    """A stream that drops all data; unlike the null device, it has no position."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


@contextmanager
def written(path: Path, arrays: Iterable[ColumnArray]) -> Iterator[Any]:
    """Yield a stream for a file that appears once complete; if ranks share a table, the first one writes it."""
    joint = next((array.table.joint for array in arrays), None)
    with (
        nullcontext(True) if joint is None else joint.saving() as writes,
        write_whole(path) if writes else _Nowhere() as stream,
    ):
        yield stream
