"""Arrays, tensors and vectors in files: ``.npy``, safetensors, and the word2vec formats, a key and a vector per row.

Values are written bit for bit; bfloat16, which NumPy lacks, to ``.npy`` as float32. The word2vec formats are those of
word2vec.c (https://code.google.com/archive/p/word2vec), as read by gensim's ``KeyedVectors.load_word2vec_format``. The
first line holds the number of rows and the values per row; then each line is a key and its values, or in the binary
format a key, a space and float32 values in native byte order.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch

from speedswap import kernels
from speedswap.errors import TableFormatError
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_files import DTYPES, TensorReader, TensorWriter
from speedswap.tables.init import chunks_of
from speedswap.tables.pieces import PIECE_BYTES, ColumnForm, FilePiece, Incoming, Outgoing, as_texts, rows_in_piece
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
            is_first = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(file)
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
        for rows in chunks_of(self.num_rows, rows_in_piece([form])):
            values = np.empty((len(rows), *form.row_shape), self._dtype)
            if self._file.readinto(values.data.cast("B")) != values.nbytes:  # type: ignore[attr-defined]
                raise TableFormatError(f"{self._what} was cut short as it was read")
            yield FilePiece(
                rows.start, {name: torch.from_numpy(values.astype(self._dtype.newbyteorder("="), copy=False))}
            )


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


class SafetensorsRows(Incoming):
    """The rows of a file's tensors; the first requested tensor gives their number.

    Raises:
        TableFormatError: the file is damaged, or has no tensor with rows.
    """

    def __init__(self, file: BinaryIO, what: str) -> None:
        reader = TensorReader(OpenFile(os.dup(file.fileno())), what)
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
        for rows in chunks_of(self.num_rows, rows_in_piece([self.columns[name] for name in columns])):
            read = partial(self._reader.read_rows, start=rows.start, stop=rows.stop)
            yield FilePiece(rows.start, {name: read(name) for name in columns})


_HEAD = re.compile(rb"(?:\xef\xbb\xbf)?([0-9]{1,18})[ \t]+([0-9]{1,18})[ \t]*\r?\n")
_HEAD_BYTES = 100
_KEY_BYTES = 1 << 16
_VALUE_BYTES = 64  # bytes of a value's text, averaged over a row

_FAULTS = {
    "no key": "has no key, or one with whitespace",
    "width": "has not a key and {width} values",
    "number": "has a value that float32 cannot hold",
}


def write_word2vec(file: BinaryIO, rows: Outgoing, *, binary: bool = False) -> None:
    """Write text, each value as the shortest decimal that reads back to its bits; or float32 in the binary format.

    Dtypes narrower than float32 are written as float32.
    """
    ((name, form),) = rows.forms.items()
    is_double = form.dtype == torch.float64
    if not form.dtype.is_floating_point or (binary and is_double):
        kind = "float32" if binary else "floating-point numbers"
        raise TypeError(f"column {name!r} holds {form.dtype}, but the format {kind}; export it as .npy")
    file.write(b"%d %d\n" % (len(rows), form.width))
    for piece in rows.pieces():
        values = piece.values[name].reshape(-1, form.width)
        assert piece.keys is not None
        file.write(kernels.write_vectors(as_texts(piece.keys), values if is_double else values.float(), binary=binary))


class Word2vecRows(Incoming):
    """The rows of a file of vectors.

    Raises:
        TableFormatError: it is in another format, or is too short for the rows it declares.
    """

    key_kind = "exact"

    def __init__(self, file: BinaryIO, what: str, *, binary: bool = False) -> None:
        self._file, self._what, self._binary = file, what, binary
        head = file.readline(_HEAD_BYTES)
        found = _HEAD.fullmatch(head)
        if found is None:
            raise TableFormatError(
                f"{what} begins with {head[:40]!r}, not with the number of rows and of values in each: put that line "
                "in front of vectors of another program, and unpack a compressed file"
            )
        self.num_rows, width = int(found[1]), int(found[2])
        row_bytes = 2 + (4 if binary else 2) * width - (0 if binary else 1)  # the shortest row, without newline
        size = os.fstat(file.fileno()).st_size - len(head)
        if self.num_rows < 1 or width < 1 or self.num_rows * row_bytes > size:
            raise TableFormatError(
                f"{what} is damaged: it declares {self.num_rows} rows of {width} values, which do not fit the {size} "
                "bytes after that; make or copy it again"
            )
        self.columns = {"weight": ColumnForm(torch.float32, (width,))}
        self._size, self._has_ended = size, False

    def pieces(self, columns: Sequence[str]) -> Iterator[FilePiece]:
        (name,) = columns
        form = self.columns[name]
        width, most = form.width, rows_in_piece([form])
        longest = _KEY_BYTES + width * (4 if self._binary else _VALUE_BYTES)
        buffer, end, row = bytearray(min(max(PIECE_BYTES, longest), self._size + 1)), 0, 0
        while row < self.num_rows:
            end += self._more(buffer, end)
            start = 0
            while row < self.num_rows:
                read = kernels.read_vectors(
                    buffer, width, min(most, self.num_rows - row), binary=self._binary, start=start, stop=end
                )
                if not len(read.values):
                    break
                yield FilePiece(row, {name: read.values}, read.keys)
                start, row = read.end, row + len(read.values)
            if row < self.num_rows:
                self._check_progress(read.fault, row, width, bytes(buffer[start : start + 60]), end - start < longest)
            buffer[: end - start] = buffer[start:end]
            end -= start
        if buffer[:end].strip() or self._file.read(1 << 10).strip():
            raise TableFormatError(f"{self._what} is damaged: there is more after its {self.num_rows} rows")

    def _more(self, buffer: bytearray, end: int) -> int:
        """Read more into a buffer from ``end``; append the newline if the last line lacks it."""
        count = self._file.readinto(memoryview(buffer)[end:])  # type: ignore[attr-defined]
        if not count and not self._binary and end and end < len(buffer) and buffer[end - 1] != ord("\n"):
            buffer[end] = ord("\n")
            return 1
        self._has_ended = not count
        return int(count)

    def _check_progress(self, fault: str | None, row: int, width: int, begin: bytes, is_short: bool) -> None:
        """Raise TableFormatError if the next row cannot be valid, whatever follows."""
        where = f"row {row}" if self._binary else f"line {row + 2}"
        if fault is not None:
            problem = _FAULTS[fault].format(width=width)
        elif self._has_ended:
            problem, begin = f"is missing: the file ends after {row} of {self.num_rows} rows", b""
        elif is_short:
            return
        else:
            problem = "is too long"
        shown = f" ({begin!r})" if begin else ""
        raise TableFormatError(f"{self._what}, {where}, {problem}{shown}: correct it, or make or copy the file again")
