"""The formats by name, and the one of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from speedswap.tables.formats import npy, parquet, safetensors, word2vec
from speedswap.tables.formats.pieces import Incoming, Outgoing

__all__ = ["FORMATS", "Format", "format_of"]


class Format(NamedTuple):
    """A format of files.

    Attributes:
        suffixes: of its files.
        write: writes rows to an open file.
        read: checks an open file's head, and returns its rows.
        many: True if it holds several columns.
        keys: ``"always"``, ``"maybe"`` or ``"never"``: rows have keys in it.
    """

    suffixes: tuple[str, ...]
    write: Callable[[BinaryIO, Outgoing], None]
    read: Callable[[BinaryIO, str], Incoming]
    many: bool
    keys: str


FORMATS = {
    "npy": Format((".npy",), npy.write, npy.read, False, "never"),
    "safetensors": Format((".safetensors",), safetensors.write, safetensors.read, True, "never"),
    "word2vec": Format((".txt", ".vec"), word2vec.write, word2vec.read, False, "always"),
    "word2vec-binary": Format((".bin",), word2vec.write_binary, word2vec.read_binary, False, "always"),
    "parquet": Format((".parquet", ".pq"), parquet.write, parquet.read, True, "maybe"),
}


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
