"""SpeedTorch's views of whole collections: CuPy, NumPy and torch arrays, and torch's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.compat.npy_files import NpyStore
from speedswap.swapping import OptimizerFactory
from speedswap.swapping.switchers.collection import Collection
from speedswap.tables import Column, Table
from speedswap.tables.init import Initializer
from speedswap.tables.whole_table import as_numpy

__all__ = ["CupyMethods", "DiskMethods", "TorchMethods"]


def _views(collection: Collection) -> dict[str, Tensor]:
    """Return the collection's own memory, by name, as tensors of all rows."""
    table = collection.table
    return {name: table.view(column).view(shape) for name, (column, shape) in collection.columns().items()}


def _as_cupy(view: Tensor, pinned: bool) -> Any:
    """Return the same memory as a CuPy array if possible, else as a NumPy array."""
    if not kernels.cuda_ready()[0] or not (view.is_cuda or pinned):
        return view.numpy()
    import cupy

    if view.is_cuda:
        return cupy.from_dlpack(view)
    item_bytes = view.element_size()
    strides = tuple(stride * item_bytes for stride in view.stride())
    nbytes = sum((size - 1) * stride for size, stride in zip(view.shape, strides, strict=True)) + item_bytes
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(view.data_ptr(), nbytes, view), 0)
    dtype = as_numpy(torch.empty(0, dtype=view.dtype)).dtype
    return cupy.ndarray(tuple(view.shape), dtype, memory, strides=strides)


def _one_or_all(collection: Collection, found: dict[str, Any]) -> Any:
    return found if isinstance(collection, OptimizerFactory) else found["weight"]


class CupyMethods(Collection):
    """A collection with its memory as a CuPy array."""

    def getCupyVar(self) -> Any:
        """Return the collection itself, not a copy: a CuPy array with CuPy and a GPU, else a NumPy array."""
        return _one_or_all(self, {k: _as_cupy(view, self.table.pinned) for k, view in _views(self).items()})

    @property
    def CUPYcorpus(self) -> Any:
        """The result of :meth:`getCupyVar`."""
        return self.getCupyVar()


class DiskMethods(Collection):
    """A collection in the first free directory ``<diskname><number>.memmap``, with a ``.npy`` file per column."""

    diskname: str | os.PathLike[str]
    fileName: str

    def new_table(self, init: Initializer, seed: int) -> Table:
        number = 0
        while os.path.lexists(f"{os.fspath(self.diskname)}{number}.memmap"):
            number += 1
        self.fileName = f"{os.fspath(self.diskname)}{number}.memmap"
        weight = Column("weight", (self.width,), self.row_dtype, init)
        return Table(NpyStore.create_in(Path(self.fileName), self.num_rows, weight, seed, self.name))

    def open_table(self, path: Path) -> Table:
        return Table(NpyStore.opened_at(path, self.num_rows, self.table_columns(), self.name))

    def getCupyMM(self) -> Any:
        """Return the collection itself as a NumPy array over its file."""
        return _one_or_all(self, {name: view.numpy() for name, view in _views(self).items()})

    @property
    def CUPYmemmap(self) -> Any:
        """The result of :meth:`getCupyMM`."""
        return self.getCupyMM()


class TorchMethods(Collection):
    """A collection with its memory as a torch tensor, saved and loaded in torch's files."""

    def getTorchVar(self) -> Any:
        """Return the collection itself as a torch tensor, not a copy."""
        return _one_or_all(self, _views(self))

    def saveTorch(self, saveFileName: str | os.PathLike[str]) -> None:
        """Save the whole collection with ``torch.save``, as a tensor on the CPU."""
        whole = {k: self.table.read(column=column).view(shape) for k, (column, shape) in self.columns().items()}
        torch.save(_one_or_all(self, whole), saveFileName)

    def loadTorch(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read the whole collection from a file of :meth:`saveTorch`, without an init method or after one.

        Raises:
            ValueError, TypeError: it has another shape or dtype. The collection is unchanged.
            pickle.UnpicklingError: it holds objects other than tensors.
        """
        columns = self.columns()
        loaded = torch.load(loadFileName, map_location="cpu", weights_only=True)
        if isinstance(loaded, Tensor):
            loaded = [loaded]
        if isinstance(loaded, list) and len(loaded) == len(columns):
            loaded = dict(zip(columns, loaded, strict=True))  # as SpeedTorch wrote them
        if not isinstance(loaded, dict) or loaded.keys() != columns.keys():
            names = list(loaded) if isinstance(loaded, dict) else f"{len(loaded)} tensors"
            raise ValueError(f"{os.fspath(loadFileName)!r} has {names}, but {list(columns)} is needed")
        for name, (_, shape) in columns.items():
            if tuple(loaded[name].shape) != shape:
                raise ValueError(
                    f"{name} in {os.fspath(loadFileName)!r} has shape {tuple(loaded[name].shape)}, but the collection "
                    f"has {shape}; give a file of that shape"
                )

        def load(table: Table) -> None:
            for name, (column, _) in columns.items():
                if loaded[name].dtype != table.columns[column].dtype:
                    raise TypeError(
                        f"{name} in {os.fspath(loadFileName)!r} is {loaded[name].dtype}, but the collection is "
                        f"{table.columns[column].dtype}; convert it with Tensor.to"
                    )
            for name, (column, shape) in columns.items():
                table.write(0, loaded[name].reshape(shape[0], *table.columns[column].row_shape), column=column)

        self.fill(load)
