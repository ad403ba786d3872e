"""Indexes, values and dtypes of NumPy, CuPy and torch, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedswap import kernels
from speedswap.errors import IdError

__all__ = ["as_array", "as_dtype", "as_ids", "checked_ids", "trainable_dtype"]

_ID_DTYPES = (torch.int32, torch.int64)


def as_dtype(datatype: Any, argument: str = "datatype") -> torch.dtype:
    """Return the torch dtype that stands for a NumPy dtype, its name, or a torch dtype or its name.

    Raises:
        TypeError: torch has no such dtype.

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
        raise TypeError(f"{argument} is {datatype!r}; give a dtype that torch has too, such as 'float32'") from None


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
        array = ids
        if array.size == 0 and not isinstance(indexes, np.ndarray):
            array = array.astype(np.int64)  # an empty list has no dtype of its own
        if array.dtype.kind not in "iu":
            raise _not_indexes(array.dtype, argument)
        # torch does not share memory that is read-only, byte-swapped or walked backwards.
        same = array.dtype.newbyteorder("=") in (np.dtype(np.int32), np.dtype(np.int64))
        ids = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=") if same else np.int64))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise _not_indexes(ids.dtype, argument)
    # A uint64 of 2**63 or more becomes negative here, and so stays outside every table.
    return ids if ids.dtype in _ID_DTYPES else ids.to(torch.int64)


def _not_indexes(dtype: object, argument: str) -> TypeError:
    return TypeError(f"{argument} is an array of {dtype}; give whole numbers, the rows' indexes")


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
