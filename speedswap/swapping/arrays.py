"""Arrays as callers bring them: indexes and dtypes of NumPy, CuPy and torch, and whole columns as ``.npy`` files."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.tables import Column, Table

__all__ = [
    "as_array",
    "as_dtype",
    "as_ids",
    "as_numpy",
    "checked_ids",
    "read_npy",
    "read_npz",
    "row_slices",
    "with_suffix",
    "write_array",
    "write_npy",
    "write_npz",
]

_CHUNK_BYTES = 64 * 2**20
_ID_DTYPES = (torch.int32, torch.int64)


def as_dtype(datatype: Any, argument: str = "datatype") -> torch.dtype:
    """The torch dtype that a NumPy dtype, its name, or a torch dtype or its name stands for.

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


def as_array(values: Any) -> Tensor | npt.NDArray[Any]:
    """Values where they are: a tensor for those of torch, CuPy and others on a GPU or with DLPack, else a NumPy array.

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
    """Indexes as an int32 or int64 tensor of the same shape, where they are.

    Args:
        indexes: a torch tensor, a NumPy array, any array on CPU or GPU that speaks DLPack or has a
            ``__cuda_array_interface__`` (CuPy), or a sequence of whole numbers; of any integer dtype.
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
        # torch shares no memory that is read-only, byte-swapped or walked backwards.
        same = array.dtype.newbyteorder("=") in (np.dtype(np.int32), np.dtype(np.int64))
        ids = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=") if same else np.int64))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise _not_indexes(ids.dtype, argument)
    # A uint64 of 2**63 or more becomes negative here, and so stays outside every table.
    return ids if ids.dtype in _ID_DTYPES else ids.to(torch.int64)


def _not_indexes(dtype: object, argument: str) -> TypeError:
    return TypeError(f"{argument} is an array of {dtype}; give whole numbers, the rows' indexes")


def checked_ids(indexes: Any, argument: str, num_rows: int, what: str) -> Tensor:
    """Indexes as a tensor of their shape, each of them one of ``num_rows`` rows of ``what``.

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


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """A NumPy array of the tensor's values; those of a dtype that NumPy lacks (bfloat16) as float32, exactly."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.to(torch.float32).numpy()


def row_slices(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """All rows, in pieces of about 64 MiB."""
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


# ------------------------------------------------------------------ files


def with_suffix(file: str | os.PathLike[str], suffix: str) -> Path:
    """The path that NumPy would write to: with ``suffix``, unless the name ends in it."""
    path = Path(file)
    return path if path.name.endswith(suffix) else path.with_name(path.name + suffix)


def write_npy(path: Path, table: Table, column: str, shape: tuple[int, ...]) -> None:
    """Write a column as an array of ``shape``; the file appears complete or not at all."""
    with _replacing(path) as stream:
        _write_array(stream, table, column, shape)


def write_npz(
    path: Path, table: Table | None, columns: Mapping[str, tuple[str, tuple[int, ...]]], extra: Mapping[str, Any]
) -> None:
    """Write several columns, and small arrays beside them, into one uncompressed ``.npz`` file.

    Args:
        path: the file; it appears complete or not at all.
        table: where the columns are; None if there are none.
        columns: by the array's name in the file: the table's column and the array's shape.
        extra: small arrays by name.
    """
    with _replacing(path) as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
        for name, (column, shape) in columns.items():
            assert table is not None
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_array(member, table, column, shape)
        for name, value in extra.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(value), allow_pickle=False)


def read_npy(path: Path, table: Table, column: str, shape: tuple[int, ...]) -> None:
    """Write the rows of a ``.npy`` file over a column.

    Raises:
        ValueError: the array's shape is not ``shape``, or the file is damaged or holds pickled objects.
        TypeError: the array's dtype is not the column's. In all cases the column is as before.
    """
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{str(path)!r} holds several arrays; give a .npy file with one")
    _check_array(array.shape, array.dtype, path.name, table, column, shape)
    write_array(table, column, array)


def write_array(table: Table, column: str, array: npt.NDArray[Any]) -> None:
    """Write an array of a row for each of the table's rows over a column, in pieces, and convert it."""
    target = table.columns[column]
    for rows in row_slices(len(table), target.row_bytes):
        values = np.array(array[rows], dtype=array.dtype.newbyteorder("="))
        table.write(rows.start, _rows_for(target, torch.from_numpy(values)), column=column)


def read_npz(
    path: Path, table: Table | None, columns: Mapping[str, tuple[str, tuple[int, ...]]], extra: Iterable[str]
) -> dict[str, Any]:
    """Write the arrays of a ``.npz`` file over columns, and return those numbers beside them that are there.

    Args:
        path: the file.
        table: where the columns are; None if there are none.
        columns: by the array's name in the file: the table's column and the array's shape.
        extra: names of numbers.

    Raises:
        ValueError: an array is missing or has another shape, or the file is damaged or holds pickled objects.
        TypeError: an array's dtype is not its column's. In all cases the columns are as before.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
            missing = [name for name in columns if name not in sizes]
            if missing:
                raise ValueError(
                    f"{str(path)!r} has arrays {list(sizes)}, but {missing} is needed; was it another optimizer's?"
                )
            # Everything is looked at before anything is written.
            for name, (column, shape) in columns.items():
                assert table is not None
                with archive.open(f"{name}.npy") as member:
                    found, dtype = _header(member, path)
                    _check_array(found, dtype, f"{name} in {path.name}", table, column, shape)
                    nbytes = sizes[name] - member.tell()
                    if nbytes != math.prod(shape) * dtype.itemsize:
                        raise ValueError(f"{str(path)!r} is damaged: {name} has {nbytes} bytes for shape {shape}")
            numbers = {}
            for name in set(extra) & sizes.keys():
                with archive.open(f"{name}.npy") as member:
                    numbers[name] = _number(member, path, name)
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"{str(path)!r} is damaged: the checksum of {damaged} does not match")
            for name, (column, _) in columns.items():
                assert table is not None
                with archive.open(f"{name}.npy") as member:
                    _, dtype = _header(member, path)
                    _write_column(table, table.columns[column], member, dtype)
            return numbers
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{str(path)!r} is not a .npz file of saveCupy: {error}") from error


def _write_column(table: Table, column: Column, stream: IO[bytes], dtype: np.dtype[Any]) -> None:
    for rows in row_slices(len(table), column.row_bytes):
        data = stream.read((rows.stop - rows.start) * column.width * dtype.itemsize)
        values = torch.from_numpy(np.frombuffer(bytearray(data), dtype=dtype))
        table.write(rows.start, _rows_for(column, values), column=column.name)


def _write_array(stream: IO[bytes], table: Table, column: str, shape: tuple[int, ...]) -> None:
    dtype = _file_dtype(table, column)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for rows in row_slices(len(table), table.columns[column].row_bytes):
        stream.write(as_numpy(table.read(rows.start, rows.stop, column=column)).tobytes())


def _rows_for(column: Column, values: Tensor) -> Tensor:
    return values.reshape(-1, *column.row_shape).to(column.dtype)


def _file_dtype(table: Table, column: str) -> np.dtype[Any]:
    return as_numpy(torch.empty(0, dtype=table.columns[column].dtype)).dtype


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


def _check_array(
    found: tuple[int, ...], dtype: np.dtype[Any], name: str, table: Table, column: str, shape: tuple[int, ...]
) -> None:
    if tuple(found) != shape:
        raise ValueError(f"{name} has shape {tuple(found)}, but the collection has {shape}; give a file of that shape")
    wanted = _file_dtype(table, column)
    if dtype != wanted:
        raise TypeError(f"{name} holds {dtype}, but the collection is saved as {wanted}; convert it with astype")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside ``path`` that takes its place when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "xb") as stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
