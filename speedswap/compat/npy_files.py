"""Collections in ``.npy`` files that NumPy opens: a directory with a file per column, mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedswap import kernels
from speedswap.tables import Column, LocalStore
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.memory import Memory
from speedswap.tables.record import RecordLayout
from speedswap.tables.record_groups import RecordGroup, RecordGroups
from speedswap.tables.store import Checked, Files
from speedswap.tables.whole_table import numpy_dtype

__all__ = ["NpyStore"]


class _NpyMemory(Memory):
    """The rows of a column, mapped from its file."""

    def __init__(self, array: np.memmap[Any, Any]) -> None:
        self.array = array
        self.bytes = torch.from_numpy(array.reshape(-1).view(np.uint8))

    def close(self) -> None:
        super().close()
        self.array.flush()


class NpyStore(LocalStore, Files):
    """Rows in the files ``<column>.npy`` of a directory. A process that is killed may leave a step half-written, and
    nothing keeps two processes from writing.

    Args:
        path: the directory, which :meth:`create_in` makes.
        num_embeddings: rows.
        seed: of the initial values.
        name: the table's.
    """

    def __init__(self, path: Path, num_embeddings: int, seed: int, name: str) -> None:
        super().__init__(RecordGroups(num_embeddings, "pageable", seed, name, written=True))
        self.storage = "disk"
        self._path = path

    @classmethod
    def create_in(cls, path: Path, num_embeddings: int, weight: Column, seed: int, name: str) -> NpyStore:
        """Make the directory and the file of the first column, with its initial values."""
        path.mkdir(parents=True)
        store = cls(path, num_embeddings, seed, name)
        try:
            store.add_columns([weight])
        except BaseException:
            store._file_of(weight).unlink(missing_ok=True)
            path.rmdir()
            raise
        return store

    @classmethod
    def opened_at(cls, path: Path, num_embeddings: int, columns: Sequence[Column], name: str) -> NpyStore:
        """Continue with the files of some columns.

        Raises:
            ValueError: one is missing, or holds other rows than these.
        """
        store = cls(path, num_embeddings, 0, name)
        for column in columns:
            file = store._file_of(column)
            if not file.is_file():
                raise ValueError(f"{str(path)!r} has no {file.name}; was it another optimizer's?")
            with says_if_full(file):
                _take_room(file)
            array = np.lib.format.open_memmap(file, mode="r+")
            wanted = _shape_of(column, num_embeddings), _dtype_of(column)
            if (array.shape, array.dtype) != wanted or not array.flags.c_contiguous:
                raise ValueError(f"{str(file)!r} has shape and dtype {(array.shape, array.dtype)}, not {wanted}")
            store._adopt(column, array)
        return store

    @property
    def files(self) -> Files:
        return self

    def verify(self, advance: Callable[[float], object]) -> Checked:
        return Checked()  # nothing has a checksum

    @property
    def path(self) -> Path:
        return self._path

    def lives_at(self, path: str | os.PathLike[str]) -> bool:
        return os.path.realpath(path) == os.path.realpath(self._path)

    def add_columns(self, columns: Sequence[Column]) -> None:
        for column in columns:
            shape, dtype = _shape_of(column, self.num_embeddings), _dtype_of(column)
            with says_if_full(self._file_of(column)):
                array = np.lib.format.open_memmap(self._file_of(column), mode="w+", dtype=dtype, shape=shape)
                _take_room(self._file_of(column))
            self._adopt(column, array)
            if not column.init.is_zero:
                self.reset_columns([column])

    def flush(self) -> None:
        self.drain()
        for group in self.groups:
            assert isinstance(group.memory, _NpyMemory)
            group.memory.array.flush()

    def flush_at_end(self) -> None:
        if not self.closed and not kernels.in_transfer_thread():  # which the garbage collector may run in
            self.flush()

    def remove(self) -> None:
        for column in self.columns.values():
            self._file_of(column).unlink(missing_ok=True)
        self._path.rmdir()

    def _adopt(self, column: Column, array: np.memmap[Any, Any]) -> None:
        layout = RecordLayout((column,), (0,), column.row_bytes)
        self.groups.adopt(RecordGroup(layout, _NpyMemory(array), self.num_embeddings))

    def _file_of(self, column: Column) -> Path:
        return self._path / f"{column.name}.npy"


def _take_room(file: Path) -> None:
    """Let the disk keep room for all of a file: a store into a hole of a mapped one would end the process."""
    with open(file, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _shape_of(column: Column, num_embeddings: int) -> tuple[int, ...]:
    return (num_embeddings, *column.row_shape)


def _dtype_of(column: Column) -> np.dtype[Any]:
    dtype = numpy_dtype(column.dtype)
    if dtype is None:
        raise TypeError(f"column {column.name!r} is {column.dtype}, which .npy files do not hold; choose another dtype")
    return dtype
