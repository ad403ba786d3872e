"""NumPy's ``.npy``: one column as one array. bfloat16, which NumPy does not have, is written as float32."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from speedswap.errors import TableFormatError
from speedswap.tables.formats.pieces import ColumnForm, Incoming, Outgoing, Piece, rows_in_piece
from speedswap.tables.whole_table import as_numpy

__all__ = ["read", "write"]


def write(file: BinaryIO, rows: Outgoing) -> None:
    """Write the one column."""
    ((_, form),) = rows.forms.items()
    dtype = as_numpy(torch.empty(0, dtype=form.dtype)).dtype
    shape = (len(rows), *form.row_shape)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in rows.pieces():
        file.write(as_numpy(*piece.values.values()).data)


def read(file: BinaryIO, what: str) -> Incoming:
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
    except Exception as error:  # of whatever kind NumPy's parser has
        raise TableFormatError(f"{what} is not an array of numbers in a .npy file ({error}); save it anew") from None
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

    def pieces(self, columns: Sequence[str]) -> Iterator[Piece]:
        (name,) = columns
        form = self.columns[name]
        step = rows_in_piece([form])
        for start in range(0, self.num_rows, step):
            shape = (min(step, self.num_rows - start), *form.row_shape)
            values = np.empty(shape, self._dtype)
            if self._file.readinto(values.data.cast("B")) != values.nbytes:  # type: ignore[attr-defined]
                raise TableFormatError(f"{self._what} was cut short as it was read")
            yield Piece(start, {name: torch.from_numpy(values.astype(self._dtype.newbyteorder("="), copy=False))})
