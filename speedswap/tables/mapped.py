"""Rows of safetensors files, read in place: the file is mapped privately, so only written rows take memory."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.tables.files.tensor_files import MappedTensor, TensorFiles
from speedswap.tables.init import Unknown
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import Memory, RecordGroup
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.store import RowStore, StoreFacts


class FileMemory(Memory):
    """A tensor's bytes in a file as a table's memory.

    Args:
        tensor: the bytes.
    """

    def __init__(self, tensor: MappedTensor) -> None:
        self._tensor, self.bytes = tensor, tensor.bytes

    def check(self) -> None:
        """Raise TableClosedError if the file has been written since it was opened."""
        self._tensor.check()

    def read_ahead(self, start: int, stop: int) -> None:
        """Start reading some of the bytes, which are otherwise read a page at a time."""
        kernels.read_ahead(self.bytes[start:stop].unsqueeze(0), torch.zeros(1, dtype=torch.int64, device="cpu"))

    def close(self) -> None:
        super().close()
        self._tensor.close()


class FileStore(LocalStore):
    """Rows that are a tensor in a safetensors file, read in place; written rows and other columns are in memory.

    Args:
        files: the files.
        name: the tensor's name.

    Raises:
        ValueError: no tensor has that name.
        TypeError: it is not a matrix of floating-point rows.
        FileNotFoundError, TableFormatError: as for :class:`TensorFiles`.
    """

    written_rows = RowStore.written_rows  # which reads ahead

    def __init__(self, files: TensorFiles, name: str) -> None:
        place = files.place(name)
        if len(place.shape) != 2 or not place.nbytes or not place.dtype.is_floating_point or place.dtype.itemsize < 2:
            raise TypeError(
                f"tensor {name!r} of {files.what} is {place.shape} of {place.dtype}, but rows in place are a matrix of "
                "floating-point numbers of 16 bits or more; Table.from_file(file, columns=[name], dtype=…) copies them"
            )
        rows, width = place.shape
        super().__init__(StoreFacts(rows, "file", name=name), written=True)
        weight = Column("weight", (width,), place.dtype, Unknown('{"kind": "given"}'))
        self._memory = FileMemory(files.mapped(name))
        self._hold(RecordGroup(RecordLayout((weight,), (0,), weight.row_bytes), self._memory, rows))

    def check(self, *, writing: bool = False) -> bool:
        self._memory.check()
        return super().check(writing=writing)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        if column == "weight" and start < stop:
            stride = self.group_of(column).layout.stride
            self._memory.read_ahead(start * stride, stop * stride)
        return super().read(column, start, stop, device)
