"""The keys of rows: taken from an id map or a vocabulary to a file, and from a file to an id map or a vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.errors import TableFormatError
from speedswap.kernels import Texts
from speedswap.tables.files.whole import open_regular, write_whole
from speedswap.tables.id_map import IdMap
from speedswap.tables.keys import Keys

__all__ = ["KeySink", "KeySource", "RowKeys", "as_texts", "key_at", "keys_of_map", "opened_keys", "vocabulary_file"]

KeySource = str | os.PathLike[str] | IdMap | Sequence[str]
"""``"rows"``, the path of a vocabulary, an id map, or the keys themselves."""

_LINE_BYTES = 1 << 16


class RowKeys:
    """The keys of some rows of a table, in order.

    Attributes:
        rows: the rows.
        kind: ``"int64"`` or ``"exact"``.
    """

    def __init__(self, rows: range, keys: Tensor | Texts | Sequence[str] | None) -> None:
        self.rows = rows
        self._keys = keys
        self.kind = "int64" if keys is None or isinstance(keys, Tensor) else "exact"

    def take(self, start: int, stop: int) -> Tensor | Texts:
        """Return the keys of rows that are taken one piece after the other: those of ``rows[start:stop]``."""
        keys = self._keys
        if keys is None:
            return torch.arange(self.rows[start], self.rows[stop - 1] + 1)
        if isinstance(keys, Tensor):
            return keys[start:stop]
        if isinstance(keys, tuple):
            text, offsets = keys
            first, last = int(offsets[start]), int(offsets[stop])
            return text[first:last], offsets[start : stop + 1] - first
        return kernels.texts_of(keys[start:stop])


class _Vocabulary(RowKeys):
    """Keys that are the lines of a file, read as they are taken."""

    def __init__(self, rows: range, file: BinaryIO, path: Path) -> None:
        super().__init__(rows, ())
        self._file = file
        count = sum(1 for _ in self._lines(path))
        if count != len(rows):
            raise ValueError(f"keys is {str(path)!r} with {count} lines, but the table has {len(rows)} rows")
        file.seek(0)
        self._taken = self._lines(path)

    def _lines(self, path: Path) -> Iterator[bytes]:
        while line := self._file.readline(_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) == _LINE_BYTES:
                raise ValueError(f"keys is {str(path)!r}, which has a line of more than {_LINE_BYTES} bytes")
            yield line.rstrip(b"\r\n")

    def take(self, start: int, stop: int) -> Texts:
        return kernels.texts_of([*islice(self._taken, stop - start)])


@contextmanager
def opened_keys(given: KeySource | RowKeys, num_rows: int) -> Iterator[RowKeys]:
    """Provide the keys of a table's rows.

    Args:
        given: ``"rows"`` for the rows' numbers; an id map, whose rows are those that have a key; the path of a text
            with a key per line, or a sequence of keys, one per row.
        num_rows: of the table.

    Raises:
        ValueError, TypeError: they are not the table's, or cannot be told.
        OSError: the file cannot be read.
    """
    if isinstance(given, RowKeys):
        yield given
    elif isinstance(given, IdMap):
        yield keys_of_map(given, num_rows)
    elif isinstance(given, str) and given == "rows":
        yield RowKeys(range(num_rows), None)
    elif isinstance(given, str | os.PathLike):
        with open_regular(Path(given)) as file:
            yield _Vocabulary(range(num_rows), file, Path(given))
    elif isinstance(given, Sequence):
        if len(given) != num_rows:
            raise ValueError(f"keys has {len(given)} keys, but the table has {num_rows} rows")
        yield RowKeys(range(num_rows), given)
    else:
        raise TypeError(f'keys is {a_kind(given)}; give "rows", a path, an IdMap or a list of strings')


def keys_of_map(id_map: IdMap, num_rows: int) -> RowKeys:
    """Return the keys of a map's rows; errors are those of :func:`opened_keys`."""
    if id_map.keys == "hashed":
        raise ValueError(
            'the id map keeps hashes and not the keys; give keys, a file with a key per row, or keys="rows"'
        )
    if id_map.num_rows > num_rows:
        raise ValueError(f"keys is a map to rows 0 to {id_map.capacity}, but the table has {num_rows} rows")
    keys = id_map.row_keys()
    count = len(keys) if isinstance(keys, Tensor) else len(keys[1]) - 1
    if not count:
        raise ValueError("the id map has no keys yet, so that no row has one; train first, or give keys")
    return RowKeys(range(1, count + 1), keys)


class KeySink:
    """Takes the keys of a file's rows, and refuses one that comes again.

    Args:
        kind: ``"exact"`` or ``"int64"``.
        num_rows: the number of keys to come.
        vocabulary: takes a line per key; None if they are for the map alone.
        what: the file, for messages.
    """

    def __init__(self, kind: str, num_rows: int, vocabulary: BinaryIO | None, what: str) -> None:
        self.id_map = IdMap(num_rows, keys=kind)
        self._vocabulary = vocabulary
        self._what = what

    def add(self, start: int, keys: Tensor | Texts) -> None:
        """Take the keys of rows from ``start`` on.

        Raises:
            TableFormatError: one of them occurs twice, or cannot be a line of a vocabulary.
        """
        texts = None if isinstance(keys, Tensor) else keys
        numbers = keys if isinstance(keys, Tensor) else kernels.hash_texts(keys)
        rows, _ = self.id_map.add(Keys(numbers, tuple(numbers.shape), numbers.device, texts))
        wrong = (rows != torch.arange(start + 1, start + 1 + len(rows))).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise TableFormatError(
                f"{self._what} is damaged: key {key_at(keys, place)!r} of row {start + place} is that of row "
                f"{int(rows[place]) - 1} as well; give each row a key of its own, or leave the keys "
                "out with keys='drop' (--keys drop)"
            )
        if self._vocabulary is not None:
            text, offsets = as_texts(keys)
            raw, ends = text.numpy().tobytes(), offsets.tolist()
            lines = [raw[first:last] for first, last in pairwise(ends)]
            for place, line in enumerate(lines):
                if b"\n" in line or b"\r" in line:
                    raise TableFormatError(
                        f"{self._what}: key {line[:60]!r} of row {start + place} has several lines, which a file "
                        "with a key per line cannot hold"
                    )
            self._vocabulary.write(b"".join(line + b"\n" for line in lines))


@contextmanager
def vocabulary_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open a vocabulary that takes its name when the block ends without an error; None for none."""
    if path is None:
        yield None
    else:
        with write_whole(path) as file:
            yield file


def as_texts(keys: Tensor | Texts) -> Texts:
    """Return keys as texts, numbers in decimal."""
    return kernels.texts_of([*map(str, keys.tolist())]) if isinstance(keys, Tensor) else keys


def key_at(keys: Tensor | Texts, place: int) -> str | int:
    """Return one key, for messages."""
    if isinstance(keys, Tensor):
        return int(keys[place])
    text, offsets = keys
    raw = bytes(text[int(offsets[place]) : int(offsets[place + 1])].numpy())
    return raw.decode(errors="backslashreplace")[:60]
