"""Text read into tensors: lines of whole numbers, and keyed vectors in the word2vec formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.id_map import Texts


class Lines(NamedTuple):
    """The outcome of reading some lines.

    Attributes:
        rows: lines read.
        end: the byte of the text after them.
        lines: lines read, including blank ones.
        wrong: True if the line that begins there is malformed.
    """

    rows: int
    end: int
    lines: int
    wrong: bool


def read_lines(
    text: bytes, values: Tensor, *, bases: str, missing: Sequence[int], start: int = 0, first: int = 0
) -> Lines:
    """Read lines of numbers separated by tabs into the rows of ``values`` from ``first`` on.

    Stop when ``values`` is full, at a malformed line, or at a last line without a newline. Blank lines are skipped.

    Args:
        text: ASCII lines, ending in LF or CR LF.
        values: int64, shape (columns, rows), contiguous, on the CPU.
        bases: per column ``d`` for decimal numbers, perhaps with a minus; ``x`` for hexadecimal ones of up to 16
            digits, all but 2^64 - 1, as the bits of an int64; or ``b`` for 0 or 1, never empty.
        missing: per column, the value of an empty field.
        start: the byte of the text to begin at.
        first: the row to begin with.

    Raises:
        ValueError: shape, dtype or a number of columns is wrong.

    >>> values = torch.zeros(3, 2, dtype=torch.int64)
    >>> read_lines(b"-7\\tff\\t\\n\\tA\\t3\\n", values, bases="dxd", missing=[0, -1, 5])
    Lines(rows=2, end=12, lines=2, wrong=False)
    >>> values.T
    tensor([[ -7, 255,   5],
            [  0,  10,   3]])
    """
    columns = len(bases)
    if values.dtype != torch.int64 or values.ndim != 2 or len(values) != columns or not values.is_contiguous():
        raise ValueError(f"values is {values.dtype}, {tuple(values.shape)}; pass contiguous int64, ({columns}, rows)")
    if len(missing) != columns or set(bases) - set("bdx"):
        raise ValueError(f"bases is {bases!r} for {len(missing)} values of missing; pass one of b, d and x per column")
    room = values.shape[1] - first
    if not 0 <= first <= values.shape[1]:
        raise ValueError(f"first is {first}; pass a row of values, 0 to {values.shape[1]}")
    instead = torch.tensor(list(missing), dtype=torch.int64)
    rows, size, lines, wrong = _C.read_lines(
        text, start, bases, instead.data_ptr(), values.data_ptr() + 8 * first, values.shape[1], room
    )
    return Lines(rows, start + size, lines, wrong)


_FAULTS = (None, "no key", "width", "number")
_MOST_VALUE_BYTES = {torch.float32: 17, torch.float64: 26}  # with the space before it


class Vectors(NamedTuple):
    """The outcome of reading some rows.

    Attributes:
        values: shape (rows, width).
        keys: their texts.
        end: the byte of the input after them.
        fault: the fault of the next row: ``"no key"``, ``"width"`` for a wrong number of values, ``"number"`` for a
            value that is not a number or that the dtype cannot hold; None if the row is merely incomplete, or was not
            read.
    """

    values: Tensor
    keys: Texts
    end: int
    fault: str | None


def read_vectors(
    text: bytes | bytearray,
    width: int,
    most: int,
    *,
    dtype: torch.dtype = torch.float32,
    binary: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> Vectors:
    """Read lines of a key and ``width`` values, separated by spaces; or a key, a space and the values' bytes.

    Stop after ``most`` rows, at a malformed row, or at an incomplete one: a line without its newline.

    Args:
        text: the input.
        width: values per row, at least 1.
        most: rows to read, at least 1.
        dtype: float32; or float64 for text.
        binary: True for values as they are in memory; newlines before a key are skipped.
        start, stop: the bytes of the input to read.

    Raises:
        ValueError: a number is out of range.

    >>> read = read_vectors(b"cat 1 -2.5\\ndog 1e-3 0", width=2, most=10)
    >>> read.values.tolist(), bytes(read.keys[0].numpy()), read.end, read.fault
    ([[1.0, -2.5]], b'cat', 11, None)
    """
    stop = len(text) if stop is None else stop
    if dtype not in _MOST_VALUE_BYTES or width < 1 or most < 1:
        raise ValueError(f"dtype is {dtype}, width {width}, most {most}; pass float32 or float64, and 1 or more")
    values = torch.empty(most, width, dtype=dtype)
    keys = torch.empty(max(0, stop - start), dtype=torch.uint8)
    offsets = torch.empty(most + 1, dtype=torch.int64)
    into = (width, most, values.data_ptr(), keys.data_ptr(), offsets.data_ptr())
    rows, size, fault = _C.read_vectors(text, start, stop, not binary, dtype == torch.float64, into)
    offsets = offsets[: rows + 1]
    return Vectors(values[:rows], (keys[: int(offsets[-1])], offsets), start + size, _FAULTS[fault])


def write_vectors(keys: Texts, values: Tensor, *, binary: bool = False) -> memoryview:
    """Return keys and values as lines, each value the shortest text that reads back to its bits; or in binary.

    Args:
        keys: n texts.
        values: float32, or float64 for text; shape (n, width), contiguous, on the CPU.
        binary: True for the values' bytes, with a newline after each row.

    Raises:
        ValueError: a key is empty or has whitespace, or the values have another form.

    >>> from speedswap import kernels
    >>> bytes(write_vectors(kernels.texts_of(["cat"]), torch.tensor([[0.1, -3.0]])))
    b'cat 0.1 -3\\n'
    """
    text, offsets = keys
    rows, width = values.shape
    fits = values.dtype == torch.float32 or (values.dtype == torch.float64 and not binary)
    if not fits or not values.is_contiguous() or rows != len(offsets) - 1:
        raise ValueError(f"values is {values.dtype}, {tuple(values.shape)}; pass contiguous rows for the {rows} keys")
    value_bytes = 4 if binary else _MOST_VALUE_BYTES[values.dtype]
    out = torch.empty(len(text) + rows * (2 + width * value_bytes), dtype=torch.uint8)
    given = (width, rows, values.data_ptr(), text.data_ptr(), offsets.data_ptr())
    size, bad = _C.write_vectors(given, not binary, values.dtype == torch.float64, out.data_ptr())
    if bad >= 0:
        key = bytes(text[int(offsets[bad]) : int(offsets[bad + 1])].numpy()).decode(errors="backslashreplace")
        raise ValueError(f"key {key!r} is empty or has whitespace, which word2vec's formats end keys with")
    return out.numpy().data[:size]
