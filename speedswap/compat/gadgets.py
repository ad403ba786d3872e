"""SpeedTorch's data gadgets: rows of a ``.npy`` file, a batch at a time; and its views of whole collections."""

from __future__ import annotations

import functools
import math
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import warn
from speedswap.errors import DuplicateRowsWarning, IdError
from speedswap.swapping.switchers.collection import (
    Collection,
    ColumnArray,
    RowField,
    as_array,
    as_dtype,
    as_ids,
    checked_ids,
)
from speedswap.tables import Column, LocalStore, Pageable, Table, as_storage
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.memory import Memory, RecordGroup
from speedswap.tables.record import RecordLayout
from speedswap.tables.store import Checked, Files, StoreFacts
from speedswap.tables.whole_table import as_numpy, numpy_dtype


def result_of(method: str) -> Any:
    """Return a property that calls a method."""
    return property(lambda self: getattr(self, method)(), doc=f"The result of :meth:`{method}`.")


class CupyMethods(Collection):
    """A collection with its memory as a CuPy array."""

    def getCupyVar(self) -> Any:
        """Return the collection itself, not a copy: a CuPy array with CuPy and a GPU, else a NumPy array."""
        return self.whole(lambda array: self._as_cupy(array.view()))

    CUPYcorpus = result_of("getCupyVar")

    def _as_cupy(self, view: Tensor) -> Any:
        if not kernels.cuda_ready()[0] or not (view.is_cuda or self.table.pinned):
            return view.numpy()
        import cupy

        if view.is_cuda:
            return cupy.from_dlpack(view)
        array = view.numpy()
        nbytes = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
        memory = cupy.cuda.UnownedMemory(view.data_ptr(), nbytes + array.itemsize, view)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), strides=array.strides)


class DiskMethods(Collection):
    """A collection in the first free directory ``<diskname><number>.memmap``, with a ``.npy`` file per column."""

    diskname: str | os.PathLike[str]
    fileName: str

    def new_table(self, weight: Column, seed: int) -> Table:
        number = 0
        while os.path.lexists(f"{os.fspath(self.diskname)}{number}.memmap"):
            number += 1
        self.fileName = f"{os.fspath(self.diskname)}{number}.memmap"
        store = NpyStore(Path(self.fileName), self.num_rows, self.name, seed)
        store.path.mkdir(parents=True)
        try:
            store.add_columns([weight])
        except BaseException:
            shutil.rmtree(store.path)
            raise
        return Table(store)

    def open_table(self, path: Path) -> Table:
        store = NpyStore(path, self.num_rows, self.name)
        for column in self.columns():
            store.open(column)
        return Table(store)

    def getCupyMM(self) -> Any:
        """Return the collection itself as a NumPy array over its file."""
        return self.whole(lambda array: array.view().numpy())

    CUPYmemmap = result_of("getCupyMM")


class TorchMethods(Collection):
    """A collection with its memory as a torch tensor, saved and loaded in torch's files."""

    def getTorchVar(self) -> Any:
        """Return the collection itself as a torch tensor, not a copy."""
        return self.whole(ColumnArray.view)

    def saveTorch(self, saveFileName: str | os.PathLike[str]) -> None:
        """Save the whole collection with ``torch.save``, as a tensor on the CPU."""
        torch.save(self.whole(lambda array: array.view().contiguous().cpu()), saveFileName)

    def loadTorch(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read the whole collection from a file of :meth:`saveTorch`, without an init method or after one.

        Raises:
            ValueError, TypeError: it has another shape or dtype. The collection is unchanged.
            pickle.UnpicklingError: it holds objects other than tensors.
        """
        names, file = [each.name for each in self.fields], os.fspath(loadFileName)
        loaded = torch.load(loadFileName, map_location="cpu", weights_only=True)
        if isinstance(loaded, Tensor):
            loaded = [loaded]
        if isinstance(loaded, list) and len(loaded) == len(names):
            loaded = dict(zip(names, loaded, strict=True))  # as SpeedTorch wrote them
        if not isinstance(loaded, dict) or loaded.keys() != set(names):
            found = list(loaded) if isinstance(loaded, dict) else f"{len(loaded)} tensors"
            raise ValueError(f"{file!r} has {found}, but {names} is needed")

        def load(arrays: dict[str, ColumnArray]) -> None:
            for name, array in arrays.items():
                found, dtype = loaded[name], array.table.columns[array.column].dtype
                array.check(f"{name} in {file!r}", tuple(found.shape), array.dtype)
                if found.dtype != dtype:  # of torch, since NumPy has none for bfloat16
                    raise TypeError(
                        f"{name} in {file!r} is {found.dtype}, but the collection is {dtype}; convert it with Tensor.to"
                    )
            for name, array in arrays.items():
                array.fill(functools.partial(_rows_of, loaded[name]))

        self.fill(load)


def _rows_of(values: Tensor, rows: slice) -> npt.NDArray[Any]:
    return as_numpy(values[rows])


# ---------------------------------------------------------------------- .npy files


class _NpyMemory(Memory):
    """The rows of a column, mapped from its file."""

    def __init__(self, array: np.memmap[Any, Any]) -> None:
        self.array = array
        self.bytes = torch.from_numpy(array.reshape(-1).view(np.uint8))

    def close(self) -> None:
        super().close()
        self.array.flush()


class NpyStore(LocalStore, Files):
    """Rows in ``.npy`` files that NumPy opens, each mapped into memory: ``<column>.npy`` in a directory.

    A killed process may leave a step half-written, and nothing prevents two processes from writing.

    Args:
        path: the directory.
        num_embeddings: rows.
        name: the table's.
        seed: of the initial values.
    """

    def __init__(self, path: Path, num_embeddings: int, name: str, seed: int = 0) -> None:
        super().__init__(StoreFacts(num_embeddings, "disk", seed=seed, name=name), written=True)
        self._path = path

    def adopt(self, column: Column, array: np.memmap[Any, Any]) -> None:
        """Take a mapped file as a column."""
        layout = RecordLayout((column,), (0,), column.row_bytes)
        self.add_group(RecordGroup(layout, _NpyMemory(array), self.num_embeddings))

    def open(self, column: Column) -> None:
        """Continue with the file of a column.

        Raises:
            ValueError: it is missing, or holds different rows.
        """
        file = self.file_of(column)
        if not file.is_file():
            raise ValueError(f"{str(self.path)!r} has no {file.name}; was it another optimizer's?")
        with says_if_full(file.parent):
            _take_room(file)
        array = np.lib.format.open_memmap(file, mode="r+")
        wanted = (self.num_embeddings, *column.row_shape), numpy_dtype(column.dtype)
        if (array.shape, array.dtype) != wanted or not array.flags.c_contiguous:
            raise ValueError(f"{str(file)!r} has shape and dtype {(array.shape, array.dtype)}, not {wanted}")
        self.adopt(column, array)

    def add_columns(self, columns: Sequence[Column]) -> None:
        for column in columns:
            file, dtype = self.file_of(column), numpy_dtype(column.dtype)
            if dtype is None:
                raise TypeError(
                    f"column {column.name!r} is {column.dtype}, which .npy files do not hold; choose another dtype"
                )
            with says_if_full(file.parent):
                shape = (self.num_embeddings, *column.row_shape)
                try:
                    array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
                    _take_room(file)
                except BaseException:
                    file.unlink(missing_ok=True)
                    raise
            self.adopt(column, array)
            if not column.init.is_zero:
                self.reset_columns([column])

    def file_of(self, column: Column) -> Path:
        """Return the path of a column's file."""
        return self._path / f"{column.name}.npy"

    @property
    def files(self) -> Files:
        return self

    @property
    def path(self) -> Path:
        return self._path

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        return os.path.realpath(path) == os.path.realpath(self._path)

    def verify(self, advance: Callable[[float], object], *, strict: bool = False) -> Checked:
        return Checked()  # nothing has a checksum

    def flush(self) -> None:
        self.drain()
        for group in self.groups:
            assert isinstance(group.memory, _NpyMemory)
            group.memory.array.flush()

    def leave(self, flush: Callable[[], None]) -> None:
        if not self.notes.closed and not kernels.in_transfer_thread():  # which the garbage collector may run in
            flush()

    def remove(self) -> None:
        for column in self.columns.values():
            self.file_of(column).unlink(missing_ok=True)
        self._path.rmdir()


def _take_room(file: Path) -> None:
    """Reserve disk space for the whole file: writing into a hole of a mapped file could kill the process."""
    with open(file, "r+b") as opened:
        kernels.allocate(opened.fileno(), 0, file.stat().st_size)


_Part = slice | int | npt.NDArray[Any] | EllipsisType | None

# Unsigned dtypes with little support in torch, and the dtypes that their items are moved as.
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class DataGadget(CupyMethods):
    """Rows of a ``.npy`` file in GPU or pinned memory, read and written a batch at a time.

    Args:
        fileName: a ``.npy`` file of shape (n, …).
        CPUPinn: keep the data in pinned host memory rather than on the GPU.
    """

    init_methods = "gadgetInit or loadCupy"

    def __init__(self, fileName: str | os.PathLike[str], CPUPinn: bool = False) -> None:
        super().__init__(0, [RowField("weight", (), torch.float32)], storage=Pageable(), name=os.fspath(fileName))
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the file, in pieces.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is damaged or pickled, or has no rows of one of torch's dtypes.
        """
        array = self._mapped("r")
        self._describe(array)
        self.storage = as_storage("pinned" if self.CPUPinn else "device")
        self.make()
        self.column_arrays()["weight"].fill(array.__getitem__)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Take another ``.npy`` file, of any shape, in place of the present one."""
        self.fileName, self.name = loadFileName, os.fspath(loadFileName)
        self.gadgetInit()

    def getData(self, indexes: Any) -> Tensor:
        """Copy a part of the data by NumPy's and CuPy's indexing: whole rows in bursts, other parts item by item.

        Args:
            indexes: integers in an array or tensor of any shape, a slice or mask of rows, None or Ellipsis, or a tuple
                of those, one for each dimension.

        Returns:
            A tensor on the GPU if there is one, ready to be a variable's data; of shape (*indexes.shape, …) for
            an array of row numbers.

        Raises:
            IdError: a row's number is negative, any number is too large, or a mask does not fit.
            TypeError: an array of neither integers nor booleans.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        ...     np.save(file.name, np.arange(6).reshape(2, 3))
        ...     gadget = DataGadget(file.name)
        ...     gadget.gadgetInit()
        >>> gadget.getData((slice(0, 2), [2, 0])).tolist()
        [[2, 0], [5, 3]]
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ids = self._whole_rows(indexes)
        if ids is None:
            matrix, places, shape = self._items(indexes)
            return matrix[places].view(self.fields[0].dtype).view(shape).to(device)
        return self.gather(ids.reshape(-1), device)["weight"].view(*ids.shape, *self.shape[1:])

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Overwrite a part of the data.

        Args:
            dataObject: a tensor or array of the shape that ``getData(indexes)`` returns, with the same number of items,
                or one that is broadcast to it; floating-point data is converted to the dtype of the file.
            indexes: as for :meth:`getData`. Of data for the same row or item the last is kept, and a warning says so
                once.

        Raises:
            IdError: a row's number is negative, any number is too large, or a mask does not fit.
            ValueError, TypeError: the data has another shape or kind of dtype. Nothing was written.
        """
        ids, dtype = self._whole_rows(indexes), self.fields[0].dtype
        if ids is not None:
            data = _fitting(dataObject, (*ids.shape, *self.shape[1:]), dtype)
            self.scatter(ids.reshape(-1), {"weight": data.reshape(-1, *self.shape[1:])})
            return
        matrix, (rows, columns), shape = self._items(indexes)
        values = _movable(_fitting(dataObject, shape, dtype)).to(matrix.device)
        last = kernels.last_occurrences(rows * matrix.shape[1] + columns)
        matrix[rows[last], columns[last]] = values.reshape(-1)[last]
        if (lost := len(rows) - len(last)) and not self.said_duplicates:
            self.said_duplicates = True
            warn(
                "SW507",
                f"the indexes name items of {self._what} more than once: the last value for each is kept, and the "
                f"other {lost} are lost. (Said once.)",
                DuplicateRowsWarning,
            )

    @property
    def _what(self) -> str:
        return f"the data of {self.name!r}"

    def _mapped(self, mode: Literal["r", "r+"]) -> npt.NDArray[Any]:
        """Map the file into memory."""
        array = np.load(self.fileName, mmap_mode=mode, allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.ndim == 0 or array.size == 0:
            raise ValueError(f"{self.name!r} holds no rows; give a .npy file of shape (n, …)")
        return array

    def _describe(self, array: npt.NDArray[Any]) -> None:
        """Use the file's shape and dtype for the collection."""
        dtype = as_dtype(array.dtype.newbyteorder("="), f"the dtype of {self.name!r}")
        self.num_rows, self.fields = len(array), [RowField("weight", array.shape[1:], dtype)]

    def _whole_rows(self, indexes: Any) -> Tensor | None:
        """Return the ids of the rows that an index selects, in the index's shape; None for an index of another kind.

        Raises:
            IdError: a number is negative or not below the number of rows.
            TypeError: an array of neither integers nor booleans.
        """
        self.table  # noqa: B018  (says what to call first)
        alone = indexes[0] if isinstance(indexes, tuple) and len(indexes) == 1 else indexes
        if isinstance(alone, slice | EllipsisType):
            return torch.from_numpy(np.arange(self.num_rows)[alone].copy())
        if alone is None or isinstance(alone, tuple):
            return None
        found = as_array(alone)
        if not _is_mask(found):
            return checked_ids(alone, "indexes", self.num_rows, self._what)
        mask = found if isinstance(found, Tensor) else torch.tensor(found)
        return mask.nonzero().reshape(-1) if tuple(mask.shape) == (self.num_rows,) else None

    def _items(self, indexes: Any) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[int, ...]]:
        """Return the data as a matrix, the rows and columns there of the items that an index selects, and their shape.

        Raises:
            IdError: a row's number is negative, any number is too large, or a mask does not fit.
            TypeError: an array of neither integers nor booleans.
        """
        parts = tuple(_part(part) for part in (indexes if isinstance(indexes, tuple) else (indexes,)))
        numbers = _of_first_dimension(parts, len(self.shape))
        if numbers is not None:
            checked_ids(numbers, "indexes", self.num_rows, self._what)
        items: Any = 0
        try:
            for axis, size in enumerate(self.shape):
                along = np.arange(size).reshape(-1, *[1] * (len(self.shape) - 1 - axis))
                items = items * size + np.broadcast_to(along, self.shape)[parts]
        except (IndexError, ValueError) as error:
            raise IdError(f"indexes: {error}; {self._what} has shape {self.shape}") from None
        matrix = _movable(self.table.view())
        rows, columns = (torch.from_numpy(found).to(matrix.device) for found in divmod(items.ravel(), matrix.shape[1]))
        return matrix, (rows, columns), np.shape(items)


class DataGadgetMM(DataGadget):
    """Rows of a ``.npy`` file, read and written in place.

    Args:
        fileName: a ``.npy`` file of shape (n, …); without permission to write it, the data is read-only.
        CPUPinn: without effect, as a file is not pinned.
    """

    def gadgetInit(self) -> None:
        """Map the file into memory; nothing is read yet.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is damaged, pickled, in Fortran order, or has no rows of one of torch's dtypes.
        """
        try:
            array = self._mapped("r+")
        except PermissionError:
            array = self._mapped("r")
        if not array.flags.c_contiguous or not array.dtype.isnative:
            raise ValueError(
                f"{self.name!r} is in Fortran or foreign byte order and cannot be used in place; use DataGadget, which "
                "converts it"
            )
        assert isinstance(array, np.memmap)
        self._describe(array)
        store = NpyStore(Path(self.fileName), self.num_rows, self.name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            store.adopt(self.columns()[0], array)
        self._replace(Table(store))
        self._array = array

    def getCupyMM(self) -> npt.NDArray[Any]:
        """Return the data itself, not a copy, as a NumPy array over the file."""
        self.table  # noqa: B018
        return self._array

    getCupyVar = getCupyMM

    CUPYmemmap = result_of("getCupyMM")

    def getData(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> Tensor:
        """Copy a part of the data out of the file.

        Args:
            retrievedPosIndexes: as for :meth:`DataGadget.getData`.
            retrievedNegIndexes: further indexes of rows, which follow.

        Returns:
            A tensor on the GPU if there is one; of shape (n, …) for n rows whose indexes have two dimensions or more.

        Raises:
            IdError: as for :meth:`DataGadget.getData`.
            TypeError: one of two indexes does not select whole rows.
        """
        positive = self._whole_rows(retrievedPosIndexes)
        if retrievedNegIndexes is None:
            if positive is not None and positive.dim() > 1:
                positive = positive.reshape(-1)
            return super().getData(retrievedPosIndexes if positive is None else positive)
        negative = self._whole_rows(retrievedNegIndexes)
        if positive is None or negative is None:
            raise TypeError("retrievedNegIndexes follow the rows of retrievedPosIndexes; give indexes of rows for both")
        return super().getData(torch.cat([positive.reshape(-1).cpu(), negative.reshape(-1).cpu()]))

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Overwrite a part of the data in the file; the arguments are those of :meth:`DataGadget.insertData`."""
        if not self.getCupyMM().flags.writeable:
            raise PermissionError(f"{self.name!r} may not be written; make it writable, or use DataGadget")
        super().insertData(dataObject, indexes)


def _part(part: Any) -> _Part:
    """Return one part of an index, with its numbers and masks as NumPy's."""
    if part is None or isinstance(part, slice | EllipsisType):
        return part
    found = as_array(part)
    if _is_mask(found):
        return found if isinstance(found, np.ndarray) else found.cpu().numpy()
    ids = as_ids(part, "indexes").cpu().numpy()
    return int(ids) if ids.ndim == 0 else ids


def _is_mask(found: Tensor | npt.NDArray[Any]) -> bool:
    return found.dtype == (torch.bool if isinstance(found, Tensor) else np.bool_)


def _of_first_dimension(parts: tuple[_Part, ...], dimensions: int) -> int | npt.NDArray[Any] | None:
    """Return the whole numbers for the first dimension; None if another kind of index selects from it."""
    taken = [_dimensions_of(part) for part in parts]
    for part, count in zip(parts, taken, strict=True):
        if count or (part is Ellipsis and sum(taken) < dimensions):
            is_number = isinstance(part, int) or (isinstance(part, np.ndarray) and part.dtype != np.bool_)
            return part if is_number else None  # type: ignore[return-value]
    return None


def _dimensions_of(part: _Part) -> int:
    """Count the array's dimensions that a part selects from."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype == np.bool_ else 1


def _movable(values: Tensor) -> Tensor:
    return values.view(_MOVED_AS.get(values.dtype, values.dtype))


def _fitting(values: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values as a tensor of that shape and dtype: reshaped if item counts match, else broadcast as in NumPy."""
    data = as_array(values)
    if isinstance(data, np.ndarray):  # torch does not take read-only, byte-swapped or reversed arrays
        data = torch.from_numpy(np.require(data, data.dtype.newbyteorder("="), ["C", "W"]))
    if not torch.can_cast(data.dtype, dtype):
        raise TypeError(f"dataObject is {data.dtype}, but the data is {dtype}; convert it first")
    data = data.to(dtype)
    if data.numel() == math.prod(shape):
        return data.reshape(shape)
    try:
        return data.broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"dataObject has shape {tuple(data.shape)}, but the indexes are for data of shape {shape}"
        ) from None
