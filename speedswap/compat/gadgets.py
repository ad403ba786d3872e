"""SpeedTorch's data gadgets: rows of a ``.npy`` file, a batch at a time."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedswap import kernels
from speedswap.compat.views import CupyMethods
from speedswap.swapping import arrays
from speedswap.swapping.collection import warn_of_duplicates
from speedswap.tables import gather_rows, scatter_rows
from speedswap.tables import init as initializers

__all__ = ["DataGadget", "DataGadgetMM"]


class DataGadget(CupyMethods):
    """Rows of a ``.npy`` file, in GPU or pinned memory, to be read and written a batch at a time.

    Args:
        fileName: a ``.npy`` file of shape (n, …).
        CPUPinn: keep the data in pinned host memory rather than on the GPU.
    """

    _init_methods = "gadgetInit or loadCupy"

    def __init__(self, fileName: str | os.PathLike[str], CPUPinn: bool = False) -> None:
        storage = "pinned" if CPUPinn else "device"
        super().__init__(0, (), torch.float32, storage=storage, name=os.fspath(fileName))
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the file, in pieces.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: it is damaged or pickled, or holds no rows of a dtype that torch has.
        """
        array = _mapped(self.fileName, "r")
        dtype = arrays.as_dtype(array.dtype.newbyteorder("="), f"the dtype of {os.fspath(self.fileName)!r}")
        self._num_rows, self._row_shape, self._dtype = len(array), array.shape[1:], dtype
        self._make(initializers.zeros())
        arrays.write_array(self.table, "weight", array)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Load another ``.npy`` file, of any shape, instead."""
        self.fileName = loadFileName
        self._name = os.fspath(loadFileName)
        self.gadgetInit()

    def getData(self, indexes: Any) -> Tensor:
        """Copy rows out of the data.

        Args:
            indexes: integers in an array or tensor of any shape, or a slice of rows.

        Returns:
            A tensor (*indexes.shape, …) on the GPU where there is one, ready to be a variable's data.

        Raises:
            IdError: an index is negative or too large.
        """
        self.table  # noqa: B018  (says what to call first)
        ids = _gadget_ids(indexes, self._num_rows, self._name)
        rows = self._gather(ids.reshape(-1), _compute_device())["weight"]
        return rows.view(*ids.shape, *self._row_shape)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write rows into the data.

        Args:
            dataObject: a tensor or array of the shape that ``getData(indexes)`` returns, or one with as many elements;
                floating-point data is converted to the dtype of the file.
            indexes: as for :meth:`getData`. Of rows with equal indexes the last is kept, and a warning says so once.

        Raises:
            IdError: an index is negative or too large.
            ValueError, TypeError: the data has another number of elements or kind of dtype. Nothing was written.
        """
        self.table  # noqa: B018
        ids = _gadget_ids(indexes, self._num_rows, self._name)
        data = _fitting(dataObject, ids, self._row_shape, self._dtype)
        self._scatter(ids.reshape(-1), {"weight": data})


class DataGadgetMM:
    """Rows of a ``.npy`` file, read and written where they are in the file.

    Args:
        fileName: a ``.npy`` file of shape (n, …); where it may not be written, the data can only be read.
        CPUPinn: has no effect, as a file is not pinned.
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
            ValueError, TypeError: it is damaged, pickled, in Fortran order, or holds no rows of a dtype that torch has.
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
        """Map another ``.npy`` file, of any shape, instead."""
        self.fileName = loadFileName
        self.gadgetInit()

    def getCupyMM(self) -> npt.NDArray[Any]:
        """The data itself as a NumPy array over the file; not a copy."""
        if self._array is None:
            raise RuntimeError(f"DataGadgetMM has no data of {os.fspath(self.fileName)!r} yet; call gadgetInit first")
        return self._array

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """All data as a NumPy array, a copy."""
        return np.array(self.getCupyMM())

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write all data to another ``.npy`` file; the ending is added where it is missing."""
        np.save(saveFileName, self.getCupyMM(), allow_pickle=False)

    def getData(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> Tensor:
        """Copy rows out of the file: those of the first indexes and then those of the second, flat.

        Returns:
            A tensor (n, …) on the GPU where there is one.

        Raises:
            IdError: an index is negative or too large.
        """
        array = self.getCupyMM()
        parts = [retrievedPosIndexes] if retrievedNegIndexes is None else [retrievedPosIndexes, retrievedNegIndexes]
        name = os.fspath(self.fileName)
        ids = torch.cat([_gadget_ids(part, len(array), name).reshape(-1).cpu() for part in parts])
        return gather_rows(self._matrix(), ids).view(len(ids), *array.shape[1:]).to(_compute_device())

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write rows into the file; the arguments are those of :meth:`DataGadget.insertData`."""
        array = self.getCupyMM()
        if not array.flags.writeable:
            raise PermissionError(
                f"{os.fspath(self.fileName)!r} may not be written; make it writable, or use DataGadget"
            )
        ids = _gadget_ids(indexes, len(array), os.fspath(self.fileName))
        data = _fitting(dataObject, ids, array.shape[1:], arrays.as_dtype(array.dtype)).cpu()
        ids = ids.reshape(-1).cpu()
        if not self._said_duplicates and kernels.first_duplicate(ids, len(array)) >= 0:
            self._said_duplicates = True
            warn_of_duplicates(ids, os.fspath(self.fileName), stacklevel=2)
        scatter_rows(self._matrix(), ids, data, duplicates="last")

    def _matrix(self) -> Tensor:
        """The file as rows and columns."""
        array = self.getCupyMM().reshape(len(self.getCupyMM()), -1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            return torch.from_numpy(array)


def _mapped(file: str | os.PathLike[str], mode: Literal["r", "r+"]) -> npt.NDArray[Any]:
    array = np.load(file, mmap_mode=mode, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.size == 0:
        raise ValueError(f"{os.fspath(file)!r} holds no rows; give a .npy file of shape (n, …)")
    return array


def _gadget_ids(indexes: Any, num_rows: int, name: str) -> Tensor:
    if isinstance(indexes, slice):
        return torch.arange(*indexes.indices(num_rows))
    return arrays.checked_ids(indexes, "indexes", num_rows, f"the data of {name!r}")


def _fitting(data: Any, ids: Tensor, row_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Data as a tensor (ids.numel(), width) of that dtype."""
    if not isinstance(data, Tensor):
        data = (
            from_dlpack(data) if not isinstance(data, np.ndarray) and hasattr(data, "__dlpack__") else np.asarray(data)
        )
        data = torch.as_tensor(data)
    data = data.detach()
    shape = (*ids.shape, *row_shape)
    if data.numel() != math.prod(shape):
        raise ValueError(f"dataObject has shape {tuple(data.shape)}, but the indexes are for data of shape {shape}")
    if not torch.can_cast(data.dtype, dtype):
        raise TypeError(f"dataObject is {data.dtype}, but the data is {dtype}; convert it first")
    converted: Tensor = data.to(dtype).reshape(ids.numel(), max(1, math.prod(row_shape)))
    return converted


def _compute_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
