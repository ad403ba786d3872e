"""SpeedTorch's data gadgets: rows of a ``.npy`` file, a batch at a time."""

from __future__ import annotations

import math
import os
import warnings
from types import EllipsisType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._warnings import users_level
from speedswap.compat.views import CupyMethods
from speedswap.errors import DuplicateRowsWarning, IdError
from speedswap.swapping.switchers import arrays
from speedswap.swapping.switchers.collection import warn_of_duplicates
from speedswap.swapping.switchers.files import ColumnArray
from speedswap.tables import as_storage, gather_rows, scatter_rows
from speedswap.tables import init as initializers

__all__ = ["DataGadget", "DataGadgetMM"]

_Part = slice | int | npt.NDArray[Any] | EllipsisType | None

# Unsigned dtypes with little support in torch, and the dtypes that their items are moved as.
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def whole_rows(indexes: Any, num_rows: int, what: str) -> Tensor | None:
    """Return the ids of the rows that an index selects; None for an index of another kind.

    Args:
        indexes: whole numbers in an array, tensor or sequence of any shape, a slice, or a mask of the rows; alone, or
            alone in a tuple.
        num_rows: the number of rows.
        what: their owner, for messages.

    Returns:
        int32 or int64, of the shape of the numbers; one-dimensional for slices and masks.

    Raises:
        IdError: a number is negative or not below ``num_rows``.
        TypeError: an array of another kind.

    >>> whole_rows([False, True, True], 3, "the data"), whole_rows((slice(0, 2), 0), 3, "the data")
    (tensor([1, 2]), None)
    """
    alone = indexes[0] if isinstance(indexes, tuple) and len(indexes) == 1 else indexes
    if isinstance(alone, slice):
        return torch.from_numpy(np.arange(*alone.indices(num_rows)))
    if alone is None or isinstance(alone, tuple | EllipsisType):
        return None
    found = arrays.as_array(alone)
    if not _is_mask(found):
        return arrays.checked_ids(alone, "indexes", num_rows, what)
    if tuple(found.shape) != (num_rows,):
        return None
    return found.nonzero().reshape(-1) if isinstance(found, Tensor) else torch.from_numpy(found.nonzero()[0])


class Selection:
    """The items of an array that an index selects.

    Args:
        indexes: a slice, whole number, array of whole numbers or booleans, None or Ellipsis, or a tuple of those.
        shape: shape of the array.
        what: name of the array, for messages.

    Attributes:
        shape: shape of the selection.

    Raises:
        IdError: a number for the first dimension is negative, or any is too large; a mask has another shape, or there
            are too many indexes.
        TypeError: an array of neither whole numbers nor booleans.

    >>> Selection((slice(None), [2, 0]), (2, 3), "the data").of(torch.arange(6).view(2, 3))
    tensor([[2, 0],
            [5, 3]])
    """

    def __init__(self, indexes: Any, shape: tuple[int, ...], what: str) -> None:
        parts = [_part(part) for part in (indexes if isinstance(indexes, tuple) else (indexes,))]
        rows = _of_first_dimension(parts, len(shape))
        if rows is not None:
            arrays.checked_ids(rows, "indexes", shape[0], what)
        self._whole = shape
        self._index: Any = tuple(parts)
        # Indexes that mean the same in torch as in NumPy.
        self._is_plain = not any(
            isinstance(part, np.ndarray) or (isinstance(part, slice) and (part.step or 1) < 0) for part in parts
        )
        try:
            self.shape: tuple[int, ...] = np.broadcast_to(np.False_, shape)[self._index].shape
        except (IndexError, ValueError) as error:
            raise IdError(f"indexes: {error}; {what} has shape {shape}") from None

    def of(self, array: Tensor) -> Tensor:
        """Copy the selected items of an array, on its device."""
        if self._is_plain:
            return array[self._index].clone()
        if array.device.type == "cpu":
            return torch.from_numpy(np.array(array.numpy()[self._index]))
        return _movable(array)[self._places(array.device)].view(array.dtype)

    def put(self, array: Tensor, values: Tensor) -> int:
        """Write over the selected items of an array, in place; of several values for one item the last is kept.

        Args:
            array: the array.
            values: values of the selection's shape and the array's dtype, on any device.

        Returns:
            The number of values that were lost to later ones.
        """
        array, values = _movable(array), _movable(values.to(array.device))
        if self._is_plain:
            array[self._index] = values
            return 0
        places = [place.reshape(-1) for place in self._places(array.device)]
        items = torch.zeros_like(places[0])
        for place, size in zip(places, self._whole, strict=True):
            items = items * size + place
        last = kernels.last_occurrences(items)
        array[tuple(place[last] for place in places)] = values.reshape(-1)[last]
        return len(items) - len(last)

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return each selected item's place along every dimension of the array, in the selection's shape."""
        places = []
        for axis, size in enumerate(self._whole):
            along = np.arange(size).reshape([size if one == axis else 1 for one in range(len(self._whole))])
            selected = np.array(np.broadcast_to(along, self._whole)[self._index])
            places.append(torch.from_numpy(selected).to(device))
        return tuple(places)


def _part(part: Any) -> _Part:
    """Return one part of an index, with its numbers and masks as NumPy's."""
    if part is None or isinstance(part, slice | EllipsisType):
        return part
    found = arrays.as_array(part)
    if _is_mask(found):
        return found if isinstance(found, np.ndarray) else found.cpu().numpy()
    ids = arrays.as_ids(part, "indexes").cpu().numpy()
    return int(ids) if ids.ndim == 0 else ids


def _is_mask(found: Tensor | npt.NDArray[Any]) -> bool:
    return found.dtype == (torch.bool if isinstance(found, Tensor) else np.bool_)


def _of_first_dimension(parts: list[_Part], dimensions: int) -> int | npt.NDArray[Any] | None:
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


class DataGadget(CupyMethods):
    """Rows of a ``.npy`` file in GPU or pinned memory, read and written a batch at a time.

    Args:
        fileName: a ``.npy`` file of shape (n, …).
        CPUPinn: keep the data in pinned host memory rather than on the GPU.
    """

    init_methods = "gadgetInit or loadCupy"

    def __init__(self, fileName: str | os.PathLike[str], CPUPinn: bool = False) -> None:
        storage = as_storage("pinned" if CPUPinn else "device")
        super().__init__(0, (), torch.float32, storage=storage, name=os.fspath(fileName))
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the file, in pieces.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is damaged or pickled, or has no rows of one of torch's dtypes.
        """
        array = _mapped(self.fileName, "r")
        dtype = arrays.as_dtype(array.dtype.newbyteorder("="), f"the dtype of {os.fspath(self.fileName)!r}")
        self.num_rows, self.row_shape, self.row_dtype = len(array), array.shape[1:], dtype
        self.make(initializers.zeros())
        ColumnArray(self.table, "weight", self.shape).fill(array.__getitem__)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Load another ``.npy`` file, of any shape, in place of the present one."""
        self.fileName = loadFileName
        self.name = os.fspath(loadFileName)
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
        self.table  # noqa: B018  (says what to call first)
        ids = whole_rows(indexes, self.num_rows, self._what)
        if ids is None:
            return Selection(indexes, self.shape, self._what).of(self._view()).to(_compute_device())
        rows = self.gather(ids.reshape(-1), _compute_device())["weight"]
        return rows.view(*ids.shape, *self.row_shape)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write over a part of the data.

        Args:
            dataObject: a tensor or array of the shape that ``getData(indexes)`` returns, with as many items, or one
                that is broadcast to it; floating-point data is converted to the dtype of the file.
            indexes: as for :meth:`getData`. Of data for the same row or item the last is kept, and a warning says so
                once.

        Raises:
            IdError: a row's number is negative, any number is too large, or a mask does not fit.
            ValueError, TypeError: the data has another shape or kind of dtype. Nothing was written.
        """
        self.table  # noqa: B018
        ids = whole_rows(indexes, self.num_rows, self._what)
        if ids is None:
            selection = Selection(indexes, self.shape, self._what)
            lost = selection.put(self._view(), _fitting(dataObject, selection.shape, self.row_dtype))
            self.said_duplicates = _said_of_lost(lost, self.name, self.said_duplicates)
            return
        data = _fitting(dataObject, (*ids.shape, *self.row_shape), self.row_dtype)
        self.scatter(ids.reshape(-1), {"weight": _rows(data, ids)})

    @property
    def _what(self) -> str:
        return f"the data of {self.name!r}"

    def _view(self) -> Tensor:
        return self.table.view().view(self.shape)


class DataGadgetMM:
    """Rows of a ``.npy`` file, read and written in place.

    Args:
        fileName: a ``.npy`` file of shape (n, …); without permission to write it, the data is read-only.
        CPUPinn: without effect, as a file is not pinned.
    """

    def __init__(self, fileName: str | os.PathLike[str], CPUPinn: bool = False) -> None:
        self.fileName = fileName
        self.CPUPinn = CPUPinn
        self._array: npt.NDArray[Any] | None = None
        self._said_duplicates = False

    def gadgetInit(self) -> None:
        """Map the file into memory; nothing is read yet.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is damaged, pickled, in Fortran order, or has no rows of one of torch's dtypes.
        """
        try:
            array = _mapped(self.fileName, "r+")
        except PermissionError:
            array = _mapped(self.fileName, "r")
        if not array.flags.c_contiguous or not array.dtype.isnative:
            raise ValueError(
                f"{os.fspath(self.fileName)!r} is in Fortran or foreign byte order and cannot be used in place; use "
                "DataGadget, which converts it"
            )
        arrays.as_dtype(array.dtype, f"the dtype of {os.fspath(self.fileName)!r}")
        self._array = array

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Map another ``.npy`` file, of any shape, in place of the present one."""
        self.fileName = loadFileName
        self.gadgetInit()

    def getCupyMM(self) -> npt.NDArray[Any]:
        """Return the data itself, not a copy, as a NumPy array over the file."""
        if self._array is None:
            raise RuntimeError(f"DataGadgetMM has no data of {os.fspath(self.fileName)!r} yet; call gadgetInit first")
        return self._array

    @property
    def CUPYmemmap(self) -> npt.NDArray[Any]:
        """The result of :meth:`getCupyMM`."""
        return self.getCupyMM()

    @property
    def CUPYcorpus(self) -> npt.NDArray[Any]:
        """The same, under the name in :class:`DataGadget`."""
        return self.getCupyMM()

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """Return a copy of all data as a NumPy array."""
        return np.array(self.getCupyMM())

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write all data to another ``.npy`` file; the suffix is added if missing."""
        np.save(saveFileName, self.getCupyMM(), allow_pickle=False)

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
        array, what = self._view(), self._what
        parts = [retrievedPosIndexes] if retrievedNegIndexes is None else [retrievedPosIndexes, retrievedNegIndexes]
        ids = [found.cpu() for part in parts if (found := whole_rows(part, len(array), what)) is not None]
        if not ids and len(parts) == 1:
            return Selection(retrievedPosIndexes, tuple(array.shape), what).of(array).to(_compute_device())
        if len(ids) < len(parts):
            raise TypeError("retrievedNegIndexes follow the rows of retrievedPosIndexes; give indexes of rows for both")
        rows = gather_rows(self._matrix(), torch.cat([part.reshape(-1) for part in ids]))
        shape = () if len(ids) == 1 and ids[0].dim() == 0 else (len(rows),)
        return rows.view(*shape, *array.shape[1:]).to(_compute_device())

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write over a part of the data in the file; the arguments are those of :meth:`DataGadget.insertData`."""
        array, name = self._view(), os.fspath(self.fileName)
        if not self.getCupyMM().flags.writeable:
            raise PermissionError(f"{name!r} may not be written; make it writable, or use DataGadget")
        ids = whole_rows(indexes, len(array), self._what)
        if ids is None:
            selection = Selection(indexes, tuple(array.shape), self._what)
            lost = selection.put(array, _fitting(dataObject, selection.shape, array.dtype))
            self._said_duplicates = _said_of_lost(lost, name, self._said_duplicates)
            return
        data = _rows(_fitting(dataObject, (*ids.shape, *array.shape[1:]), array.dtype), ids).cpu()
        ids = ids.reshape(-1).cpu()
        if not self._said_duplicates and kernels.first_duplicate(ids, len(array)) >= 0:
            self._said_duplicates = True
            warn_of_duplicates(ids, name)
        scatter_rows(self._matrix(), ids, data, duplicates="last")

    @property
    def _what(self) -> str:
        return f"the data of {os.fspath(self.fileName)!r}"

    def _view(self) -> Tensor:
        """Return the file as a tensor."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            return torch.from_numpy(self.getCupyMM())

    def _matrix(self) -> Tensor:
        """Return the file as a matrix of rows and columns."""
        array = self._view()
        return array.view(len(array), -1)


def _mapped(file: str | os.PathLike[str], mode: Literal["r", "r+"]) -> npt.NDArray[Any]:
    array = np.load(file, mmap_mode=mode, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.size == 0:
        raise ValueError(f"{os.fspath(file)!r} holds no rows; give a .npy file of shape (n, …)")
    return array


def _fitting(values: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values as a tensor of that shape and dtype: reshaped if as many items, else broadcast as in NumPy."""
    data = arrays.as_array(values)
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


def _rows(data: Tensor, ids: Tensor) -> Tensor:
    """Return data of shape (*ids.shape, …) as a matrix with one row per id."""
    return data.reshape(ids.numel(), math.prod(data.shape[ids.dim() :]))


def _said_of_lost(lost: int, name: str, said: bool) -> bool:
    """Warn once about values that were lost to later ones for the same item; return whether it has been said."""
    if lost and not said:
        warnings.warn(
            f"the indexes name items of the data of {name!r} more than once: the last value for each is kept, and "
            f"the other {lost} are lost. (Said once.)",
            DuplicateRowsWarning,
            stacklevel=users_level(),
        )
    return said or bool(lost)


def _compute_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
