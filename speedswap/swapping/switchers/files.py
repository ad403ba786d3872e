"""Whole columns of a table as ``.npy`` and ``.npz`` files, read and written in pieces."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from speedswap.tables import Table
from speedswap.tables.files.whole import write_whole
from speedswap.tables.whole_table import as_numpy

__all__ = ["ColumnArray", "read_npy", "read_npz", "with_suffix", "write_npy", "write_npz"]

_PIECE_BYTES = 64 * 2**20


class ColumnArray(NamedTuple):
    """A whole column of a table, seen as one array.

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
        """Write over the column, piece by piece.

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
        """Write over the column from a stream that holds its values and nothing else."""
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


def write_npy(path: Path, array: ColumnArray) -> None:
    """Write a column to a ``.npy`` file, which appears complete or not at all."""
    with _written(path, [array]) as stream:
        array.write(stream)


def read_npy(path: Path, array: ColumnArray) -> None:
    """Write the rows of a ``.npy`` file over a column.

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
    """Write several columns, and numbers beside them, by name to one uncompressed ``.npz`` file.

    The file appears complete or not at all.
    """
    with _written(path, arrays.values()) as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                array.write(member)
        for name, number in numbers.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(number), allow_pickle=False)


def read_npz(path: Path, arrays: Mapping[str, ColumnArray], numbers: Iterable[str]) -> dict[str, Any]:
    """Write the arrays of a ``.npz`` file over columns, and return the numbers that it has among ``numbers``.

    Raises:
        ValueError: an array is missing or has another shape, or the file is damaged or holds pickled objects.
        TypeError: an array's dtype is not its column's. In all cases the columns are unchanged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
            missing = [name for name in arrays if name not in sizes]
            if missing:
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
            damaged = archive.testzip()
            if damaged is not None:
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


@contextmanager
def _written(path: Path, arrays: Iterable[ColumnArray]) -> Iterator[IO[bytes]]:
    """Yield a stream for a file that appears when it is complete; of ranks that share a table, the first one writes."""
    joint = next((array.table.store.joint for array in arrays), None)
    with (
        nullcontext(True) if joint is None else joint.saving() as writes,
        write_whole(path) if writes else nullcontext(cast("BinaryIO", _Nowhere())) as stream,
    ):
        yield stream


class _Nowhere(io.RawIOBase):
    """A stream that forgets what is written to it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return len(memoryview(data).cast("B"))
