"""Vectors in files of other programs: ``.npy``, safetensors, the word2vec formats, and Parquet through pyarrow.

Values are written bit for bit; bfloat16, which NumPy and Parquet lack, as float32. The word2vec formats are those of
word2vec.c (https://code.google.com/archive/p/word2vec), as read by gensim's ``KeyedVectors.load_word2vec_format``. The
first line holds the number of rows and the values per row; then each line is a key and its values, or in the binary
format a key, a space and float32 values in native byte order. In Parquet, columns are fixed-size lists in row groups of
bounded size, and keys are the column ``key``; values are neither compressed nor dictionary-encoded: embeddings gain
nothing from it.
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
from torch import Tensor

from speedswap import kernels
from speedswap._words import pip_install
from speedswap.errors import TableFormatError
from speedswap.kernels import Texts
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_files import DTYPES, TensorReader, TensorWriter
from speedswap.tables.init import chunks_of
from speedswap.tables.keys import as_keys
from speedswap.tables.whole_table import (
    PIECE_BYTES,
    ColumnForm,
    FilePiece,
    Incoming,
    Outgoing,
    as_numpy,
    as_texts,
    rows_in_piece,
)


def write_npy(file: BinaryIO, rows: Outgoing) -> None:
    """Write one column."""
    ((_, form),) = rows.forms.items()
    dtype = as_numpy(torch.empty(0, dtype=form.dtype)).dtype
    shape = (len(rows), *form.row_shape)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for piece in rows.pieces():
        file.write(as_numpy(*piece.values.values()).data)


class NpyRows(Incoming):
    """The rows of an array.

    Raises:
        TableFormatError: it is not an array of rows, or is damaged.
    """

    def __init__(self, file: BinaryIO, what: str) -> None:
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
            raise TableFormatError(
                f"{what} is not an array of numbers in a .npy file ({error}); save it again"
            ) from None
        if fortran_order or not shape or min(shape) < 1:
            order = "columns first" if fortran_order else "no rows"
            raise TableFormatError(
                f"{what} has shape {shape} and {order}; save np.ascontiguousarray of a matrix of rows"
            )
        first, size = file.tell(), os.fstat(file.fileno()).st_size
        if size - first != math.prod(shape) * dtype.itemsize:
            raise TableFormatError(
                f"{what} is damaged: it has {size - first} bytes of data for {shape} of {dtype}; make or copy it again"
            )
        self.num_rows, self.columns = shape[0], {"weight": form}
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


KEY = "key"
_MOST_TIMES, _HARMLESS_BYTES = 200, 1 << 25  # the largest expansion accepted, and the bytes accepted from any file
_BUFFER_BYTES = 1 << 20


def write_parquet(file: BinaryIO, rows: Outgoing) -> None:
    """Write all columns.

    Raises:
        TypeError: the format lacks a column's dtype.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pa = _pyarrow()
    from pyarrow import parquet

    fields = [] if rows.keys is None else [(KEY, pa.int64() if rows.keys.kind == "int64" else pa.large_string())]
    for name, form in rows.forms.items():
        fields.append((name, _lists(torch.empty(0, *form.row_shape, dtype=form.dtype), name).type))
    schema = pa.schema(fields)
    with parquet.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        for piece in rows.pieces():
            columns = [] if piece.keys is None else [_key_array(piece.keys)]
            columns += [_lists(values, name) for name, values in piece.values.items()]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema), row_group_size=len(piece))


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ModuleNotFoundError(f"Parquet needs pyarrow: {pip_install('pyarrow', extra='parquet')}") from None
    return pyarrow


def _lists(values: Tensor, name: str) -> Any:
    """Return rows as a pyarrow array of numbers or of fixed-size lists."""
    pa = _pyarrow()
    try:
        found = pa.array(as_numpy(values).reshape(-1))
    except pa.ArrowException:
        raise TypeError(
            f"column {name!r} holds {values.dtype}, which Parquet does not have; export it as .npy"
        ) from None
    for size in reversed(values.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found


def _key_array(keys: Tensor | Texts) -> Any:
    pa = _pyarrow()
    if isinstance(keys, Tensor):
        return pa.array(keys.numpy())
    text, offsets = keys
    buffers = [None, pa.py_buffer(offsets.numpy()), pa.py_buffer(text.numpy())]
    found = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    try:
        found.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"keys are bytes that are no text, which Parquet's strings must be ({error})") from None
    return found


def read_parquet(file: BinaryIO, what: str) -> Incoming:
    """Check the head of a file.

    Raises:
        TableFormatError: it is damaged, has no column of rows, or would expand far beyond its size.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pa = _pyarrow()
    from pyarrow import parquet

    try:
        return _Groups(parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES), file, what)
    except (pa.ArrowException, OSError) as error:
        raise TableFormatError(f"{what} is not a whole Parquet file ({error}): make it or copy it again") from error


class _Groups(Incoming):
    """The rows of a file's row groups."""

    def __init__(self, opened: Any, file: BinaryIO, what: str) -> None:
        self._opened, self._what = opened, what
        self._size = os.fstat(file.fileno()).st_size
        self.num_rows = opened.metadata.num_rows
        schema = opened.schema_arrow
        if twice := [name for name in schema.names if len(schema.get_all_field_indices(name)) > 1]:
            raise TableFormatError(f"{what} has several columns {twice[0]!r}; give each its own name")
        if KEY in schema.names:
            self.key_kind = _key_kind(schema.field(KEY).type)
        if self.num_rows < 1:
            raise TableFormatError(f"{what} has no rows; give another file")
        names = [name for name in schema.names if name != KEY or not self.key_kind]
        forms = {name: self._form(name, schema.field(name).type) for name in names}
        self.columns = {name: form for name, form in forms.items() if form is not None}
        if not self.columns:
            raise TableFormatError(
                f"{what} has no column of numbers or of lists of them, but {', '.join(schema.names)}"
            )

    def _form(self, name: str, kind: Any) -> ColumnForm | None:
        """Return the form of a column, taken from the first row if lists vary in length; None if it holds no values."""
        pa = _pyarrow()
        shape: list[int] = []
        while pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        if not shape and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            first = next(self._batches([name], 1)).column(name)[0]
            shape, kind = [len(first) if first.is_valid else 0], kind.value_type
        if 0 in shape or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return None
        return ColumnForm(torch.from_numpy(np.empty(0, kind.to_pandas_dtype())).dtype, tuple(shape))

    def require_readable_keys(self, columns: Sequence[str]) -> None:
        is_key = KEY in self._opened.schema_arrow.names and not self.key_kind and KEY not in columns
        if is_key and not (KEY in self.columns and self.columns[KEY].row_shape):  # else lists of numbers: values
            raise TableFormatError(
                f"{self._what}: column {KEY!r} is {self._opened.schema_arrow.field(KEY).type}, which is not read as "
                "keys; cast it to int64 or string, or give keys='drop' (--keys drop)"
            )

    def choose(self, columns: Sequence[str]) -> None:
        nbytes = self.num_rows * sum(self.columns[name].row_bytes for name in columns)
        if nbytes > max(_HARMLESS_BYTES, _MOST_TIMES * self._size):
            raise TableFormatError(
                f"{self._what} would become {nbytes} bytes, more than {_MOST_TIMES} times its size; if that is right, "
                "write it again without compression"
            )

    def pieces(self, columns: Sequence[str]) -> Iterator[FilePiece]:
        wanted = [KEY, *columns] if self.key_kind else [*columns]
        row = 0
        for batch in self._batches(wanted, rows_in_piece([self.columns[name] for name in columns])):
            values = {name: self._values(batch.column(name), name, row) for name in columns}
            keys = self._keys(batch.column(KEY), row) if self.key_kind else None
            yield FilePiece(row, values, keys)
            row += len(batch)
        if row != self.num_rows:
            raise TableFormatError(f"{self._what} is damaged: it has {row} rows, not {self.num_rows}; copy it again")

    def _batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        pa = _pyarrow()
        try:
            yield from self._opened.iter_batches(rows, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise TableFormatError(f"{self._what} is damaged ({error}): make it or copy it again") from error

    def _values(self, column: Any, name: str, row: int) -> Tensor:
        form, found = self.columns[name], column
        for size in form.row_shape:
            self._refuse_nulls(found, name, row)
            if not hasattr(found.type, "list_size"):
                lengths = found.value_lengths().to_numpy(zero_copy_only=False)
                if len(wrong := np.flatnonzero(lengths != size)):
                    raise TableFormatError(
                        f"{self._what}, row {row + wrong[0]}: column {name!r} has {lengths[wrong[0]]} values, and the "
                        f"first row {size}; give each row as many"
                    )
            found = found.flatten()
        self._refuse_nulls(found, name, row)
        return torch.from_numpy(np.array(found.to_numpy(zero_copy_only=False))).view(-1, *form.row_shape)

    def _refuse_nulls(self, column: Any, name: str, row: int) -> None:
        if column.null_count:
            raise TableFormatError(
                f"{self._what}: column {name!r} has {column.null_count} nulls in or after row {row}; fill them"
            )

    def _keys(self, column: Any, row: int) -> Tensor | Texts:
        self._refuse_nulls(column, KEY, row)
        if self.key_kind == "int64":
            return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)).astype(np.int64))
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        texts = as_keys(column, "exact").texts
        assert texts is not None
        return texts


def _key_kind(kind: Any) -> str | None:
    """Return the kind of the keys in a column; None if its type cannot be read as keys."""
    pa = _pyarrow()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if any(is_kind(kind) for is_kind in texts):
        return "exact"
    return "int64" if pa.types.is_integer(kind) and kind.bit_width <= 64 and not pa.types.is_uint64(kind) else None
