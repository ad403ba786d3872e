"""Parquet, through pyarrow: columns as fixed-size lists, in row groups of bounded size; keys as column ``key``.

bfloat16, which the format lacks, is written as float32. Values are neither compressed nor dictionary-encoded:
embeddings gain nothing from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from speedswap._words import pip_install
from speedswap.errors import TableFormatError
from speedswap.kernels import Texts
from speedswap.tables.keys import as_keys
from speedswap.tables.pieces import ColumnForm, FilePiece, Incoming, Outgoing, rows_in_piece
from speedswap.tables.whole_table import as_numpy

KEY = "key"
_MOST_TIMES, _HARMLESS_BYTES = 200, 1 << 25  # the largest expansion accepted, and the bytes accepted from any file
_BUFFER_BYTES = 1 << 20


def write(file: BinaryIO, rows: Outgoing) -> None:
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


def read(file: BinaryIO, what: str) -> Incoming:
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
        self.columns = {}
        for name in schema.names:
            form = None if name == KEY and self.key_kind else self._form(name, schema.field(name).type)
            if form is not None:
                self.columns[name] = form
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
        if (
            not (pa.types.is_primitive(kind) and (pa.types.is_integer(kind) or pa.types.is_floating(kind)))
            or 0 in shape
        ):
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
