"""Safetensors: each column as a tensor of its name, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from speedswap.errors import TableFormatError
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_file import DTYPES, TensorReader, TensorWriter
from speedswap.tables.formats.pieces import ColumnForm, Incoming, Outgoing, Piece, rows_in_piece

__all__ = ["read", "write"]


def write(file: BinaryIO, rows: Outgoing) -> None:
    """Write all columns.

    Raises:
        TypeError: the format has not the dtype of one of them.
    """
    for name, form in rows.forms.items():
        if form.dtype not in DTYPES:
            raise TypeError(f"column {name!r} holds {form.dtype}, which safetensors does not have; export it as .npy")
    shapes = {name: (form.dtype, (len(rows), *form.row_shape)) for name, form in rows.forms.items()}
    writer = TensorWriter(OpenFile(os.dup(file.fileno())), shapes)
    for piece in rows.pieces():
        for name, values in piece.values.items():
            writer.write(name, values, first_row=piece.start)


def read(file: BinaryIO, what: str) -> Incoming:
    """Check the head of a file.

    Raises:
        TableFormatError: it is damaged, or has no tensor with rows.
    """
    return _Tensors(TensorReader(OpenFile(os.dup(file.fileno())), what), what)


class _Tensors(Incoming):
    """The rows of a file's tensors, as many as the first that is asked for has."""

    def __init__(self, reader: TensorReader, what: str) -> None:
        self._reader, self._what = reader, what
        places = {name: place for name, place in reader.places.items() if place.shape and place.nbytes}
        if not places:
            raise TableFormatError(f"{what} has no tensor with rows; give another file")
        self.columns = {name: ColumnForm(place.dtype, place.shape[1:]) for name, place in places.items()}

    def choose(self, columns: Sequence[str]) -> None:
        counts = {name: self._reader.places[name].shape[0] for name in columns}
        self.num_rows = counts[columns[0]]
        if set(counts.values()) != {self.num_rows}:
            raise TableFormatError(f"{self._what} has tensors of different numbers of rows: {counts}; choose columns")

    def pieces(self, columns: Sequence[str]) -> Iterator[Piece]:
        step = rows_in_piece([self.columns[name] for name in columns])
        for start in range(0, self.num_rows, step):
            stop = min(start + step, self.num_rows)
            yield Piece(start, {name: self._reader.read_rows(name, start, stop) for name in columns})
