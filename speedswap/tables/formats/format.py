"""The formats by name, and the one of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from speedswap.tables.formats import npy, parquet, safetensors, word2vec
from speedswap.tables.formats.pieces import Incoming, Outgoing
from speedswap.tables.whole_table import numpy_dtype

__all__ = ["FORMATS", "Format", "format_of", "least_bytes"]


class Format(NamedTuple):
    """A format of files.

    Attributes:
        suffixes: of its files.
        write: writes rows to an open file.
        read: checks an open file's head, and returns its rows.
        many: True if it holds several columns.
        keys: ``"always"``, ``"maybe"`` or ``"never"``: rows have keys in it.
        item_bytes: the fewest bytes that an item of a dtype takes in it.
    """

    suffixes: tuple[str, ...]
    write: Callable[[BinaryIO, Outgoing], None]
    read: Callable[[BinaryIO, str], Incoming]
    many: bool
    keys: str
    item_bytes: Callable[[torch.dtype], float]


def _in_numpy(dtype: torch.dtype) -> int:
    return dtype.itemsize if numpy_dtype(dtype) is not None else torch.float32.itemsize


def _in_parquet(dtype: torch.dtype) -> float:
    return 1 / 8 if dtype == torch.bool else _in_numpy(dtype)


def _as_text(dtype: torch.dtype) -> int:
    return len(" 0")


FORMATS = {
    "npy": Format((".npy",), npy.write, npy.read, False, "never", _in_numpy),
    "safetensors": Format(
        (".safetensors",), safetensors.write, safetensors.read, True, "never", lambda dtype: dtype.itemsize
    ),
    "word2vec": Format((".txt", ".vec"), word2vec.write, word2vec.read, False, "always", _as_text),
    "word2vec-binary": Format(
        (".bin",), word2vec.write_binary, word2vec.read_binary, False, "always", lambda dtype: torch.float32.itemsize
    ),
    "parquet": Format((".parquet", ".pq"), parquet.write, parquet.read, True, "maybe", _in_parquet),
}


def least_bytes(form: Format, rows: Outgoing) -> int:
    """Return the fewest bytes that rows take in a format, whatever their values and keys."""
    return int(len(rows) * sum(each.width * form.item_bytes(each.dtype) for each in rows.forms.values()))


def format_of(path: Path, name: str | None) -> str:
    """Return a format's name: the one given, or by the file's suffix.

    Raises:
        ValueError: there is no such format, or no format has the suffix.
    """
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"format is {name!r}; choose one of {', '.join(FORMATS)}")
        return name
    for known, form in FORMATS.items():
        if path.suffix.lower() in form.suffixes:
            return known
    raise ValueError(f"{path.name!r} has none of the suffixes of a format; give format, one of {', '.join(FORMATS)}")
