"""Arrays in files, bit for bit: NumPy's ``.npy`` for one column; safetensors, with a tensor per column.

bfloat16, which NumPy lacks, is written to ``.npy`` as float32.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from speedswap.errors import TableFormatError
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_file import DTYPES, TensorReader, TensorWriter
from speedswap.tables.formats.pieces import ColumnForm, FilePiece, Incoming, Outgoing, rows_in_piece
from speedswap.tables.whole_table import as_numpy


def write_npy(file: BinaryIO, rows: Outgoing) -> None:
    """Write one column."""
    ((_, form),) = rows.forms.items()
    dtype = as_numpy(torch.empty(0, dtype=form.dtype)).dtype
    shape = (len(rows), *form.row_shape)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in rows.pieces():
        file.write(as_numpy(*piece.values.values()).data)


def read_npy(file: BinaryIO, what: str) -> Incoming:
    """Check the head of a file.

    Raises:
        TableFormatError: it is not an array of rows, or is damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0
            shape, fortran_order, dtype = (read_header if version == (1, 0) else np.lib.format.read_array_header_2_0)(
                file
            )
            form = ColumnForm(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, tuple(shape[1:]))
    except OSError:
        raise
    except Exception as error:  # whatever NumPy's parser raises
        raise TableFormatError(f"{what} is not an array of numbers in a .npy file ({error}); save it again") from None
    if fortran_order or not shape or min(shape) < 1:
        order = "columns first" if fortran_order else "no rows"
        raise TableFormatError(f"{what} has shape {shape} and {order}; save np.ascontiguousarray of a matrix of rows")
    first, size = file.tell(), os.fstat(file.fileno()).st_size
    if size - first != math.prod(shape) * dtype.itemsize:
        raise TableFormatError(
            f"{what} is damaged: it has {size - first} bytes of data for {shape} of {dtype}; make or copy it again"
        )
    return _Array(file, what, shape[0], form, dtype)


class _Array(Incoming):
    """The rows of an array."""

    def __init__(self, file: BinaryIO, what: str, num_rows: int, form: ColumnForm, dtype: np.dtype[Any]) -> None:
        self.num_rows = num_rows
        self.columns = {"weight": form}
        self._file, self._what, self._dtype = file, what, dtype

    def pieces(self, columns: Sequence[str]) -> Iterator[FilePiece]:
        (name,) = columns
        form = self.columns[name]
        step = rows_in_piece([form])
        for start in range(0, self.num_rows, step):
            shape = (min(step, self.num_rows - start), *form.row_shape)
            values = np.empty(shape, self._dtype)
            if self._file.readinto(values.data.cast("B")) != values.nbytes:  # type: ignore[attr-defined]
                raise TableFormatError(f"{self._what} was cut short as it was read")
            yield FilePiece(start, {name: torch.from_numpy(values.astype(self._dtype.newbyteorder("="), copy=False))})


def write_safetensors(file: BinaryIO, rows: Outgoing) -> None:
    """Write all columns.

    Raises:
        TypeError: the format lacks a column's dtype.
    """
    for name, form in rows.forms.items():
        if form.dtype not in DTYPES:
            raise TypeError(f"column {name!r} holds {form.dtype}, which safetensors does not have; export it as .npy")
    shapes = {name: (form.dtype, (len(rows), *form.row_shape)) for name, form in rows.forms.items()}
    writer = TensorWriter(OpenFile(os.dup(file.fileno())), shapes)
    for piece in rows.pieces():
        for name, values in piece.values.items():
            writer.write(name, values, first_row=piece.start)


def read_safetensors(file: BinaryIO, what: str) -> Incoming:
    """Check the head of a file.

    Raises:
        TableFormatError: it is damaged, or has no tensor with rows.
    """
    return _Tensors(TensorReader(OpenFile(os.dup(file.fileno())), what), what)


class _Tensors(Incoming):
    """The rows of a file's tensors; the first requested tensor gives their number."""

    def __init__(self, reader: TensorReader, what: str) -> None:
        self._reader, self._what = reader, what
        places = {name: place for name, place in reader.places.items() if place.shape and place.nbytes}
        if unread := [name for name in reader.others if not places or name == "weight"]:
            raise TableFormatError(reader.unread(unread[0]))
        if not places:
            raise TableFormatError(f"{what} has no tensor with rows; give another file")
        self.columns = {name: ColumnForm(place.dtype, place.shape[1:]) for name, place in places.items()}

    def choose(self, columns: Sequence[str]) -> None:
        counts = {name: self._reader.places[name].shape[0] for name in columns}
        self.num_rows = counts[columns[0]]
        if set(counts.values()) != {self.num_rows}:
            raise TableFormatError(f"{self._what} has tensors of different numbers of rows: {counts}; choose columns")

    def pieces(self, columns: Sequence[str]) -> Iterator[FilePiece]:
        step = rows_in_piece([self.columns[name] for name in columns])
        for start in range(0, self.num_rows, step):
            stop = min(start + step, self.num_rows)
            yield FilePiece(start, {name: self._reader.read_rows(name, start, stop) for name in columns})
