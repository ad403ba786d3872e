"""SpeedTorch's views of whole collections: CuPy, NumPy and torch arrays, and arrays over ``.npy`` files."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap.swapping.switchers.arrays import ColumnArray
from speedswap.swapping.switchers.collection import Collection
from speedswap.tables import Column, LocalStore, Table
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.memory import Memory, RecordGroup
from speedswap.tables.record import RecordLayout
from speedswap.tables.store import Checked, Files, StoreFacts
from speedswap.tables.whole_table import as_numpy, numpy_dtype


class CupyMethods(Collection):
    """A collection with its memory as a CuPy array."""

    def getCupyVar(self) -> Any:
        """Return the collection itself, not a copy: a CuPy array with CuPy and a GPU, else a NumPy array."""
        return self.whole(lambda array: self._as_cupy(array.view()))

    @property
    def CUPYcorpus(self) -> Any:
        """The result of :meth:`getCupyVar`."""
        return self.getCupyVar()

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

    @property
    def CUPYmemmap(self) -> Any:
        """The result of :meth:`getCupyMM`."""
        return self.getCupyMM()


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
        with says_if_full(file):
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
            with says_if_full(file):
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

    def verify(self, advance: Callable[[float], object]) -> Checked:
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
