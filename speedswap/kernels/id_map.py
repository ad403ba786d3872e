"""The loops behind :class:`speedswap.IdMap`, and the texts of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels._C import IdMapUndo
from speedswap.kernels.host import address, from_buffer, get_num_threads

_EVICT = {None: 0, "lru": 1, "lfu": 2}

Texts = tuple[Tensor, Tensor]
"""Strings side by side, uint8, and where each begins and the last ends, int64, shape (n + 1,)."""


class Cursor(NamedTuple):
    """The counters of a map.

    Attributes:
        used: rows that have a key.
        clock: batches that were added.
        probation_used: places that have had a key on probation.
        last_place: the last of those places to be assigned.
    """

    used: int
    clock: int
    probation_used: int
    last_place: int


class SavedKeys(NamedTuple):
    """The keys of a map's rows, or those on probation, ordered by row or place.

    Attributes:
        numbers: int64.
        last: the last batch that contained each key, uint32; None for a map without eviction.
        counts: sightings of each, uint32; 0 marks a place without a key; None where they are not counted.
        texts: of exact strings.
    """

    numbers: Tensor
    last: Tensor | None
    counts: Tensor | None
    texts: Texts | None

    def pointers(self) -> tuple[int, int, int, int, int]:
        text, offsets = self.texts or (None, None)
        return (_pointer(self.numbers), _pointer(self.last), _pointer(self.counts), _pointer(offsets), _pointer(text))


class KeyMap:
    """Keys to rows, in host memory; csrc/id_map.h documents each function. One thread at a time changes it.

    Args:
        capacity: rows, 1 to 2**31 - 1; row 0 stands for keys without a row.
        exact: True if keys are strings.
        admit_after: sightings before a key gets a row.
        evict: None, ``"lru"`` or ``"lfu"``.
        most_on_probation: keys without a row whose sightings are counted; the oldest is forgotten for one more.
            ``capacity`` by default.
    """

    def __init__(
        self, capacity: int, exact: bool, admit_after: int, evict: str | None, most_on_probation: int | None = None
    ) -> None:
        self._map = _C.IdMap(capacity, exact, admit_after, _EVICT[evict], most_on_probation or capacity)
        self._exact = exact
        self._evict = evict

    def find(self, numbers: Tensor, texts: Texts | None) -> Tensor:
        """Return the row of each key, int64, shape (n,)."""
        rows = torch.empty(len(numbers), dtype=torch.int64)
        self._map.find(_keys(numbers, texts), address(rows), get_num_threads())
        return rows

    def add(self, numbers: Tensor, texts: Texts | None, *, undo: IdMapUndo | None = None) -> Tensor | None:
        """Return the row of each key, after new ones were given theirs.

        Args:
            numbers: int64, shape (n,).
            texts: of exact strings.
            undo: filled with what :meth:`undo` needs.

        Returns:
            The rows; None, with nothing changed, if too few rows are free.
        """
        rows = torch.empty(len(numbers), dtype=torch.int64)
        return rows if self._map.add(_keys(numbers, texts), address(rows), undo, get_num_threads()) else None

    @property
    def renewed(self) -> Tensor:
        """The rows that the last batch took from other keys, int64, shape (n,)."""
        return from_buffer(self._map.renewed(), torch.int64)

    def undo(self, undo: IdMapUndo) -> None:
        """Restore the map to its state before a batch, once; later batches must have been undone already."""
        self._map.undo(undo)

    @property
    def cursor(self) -> Cursor:
        """The counters."""
        return Cursor(*self._map.cursor())

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._map.bytes()

    def changed(self, on_probation: bool, since: Cursor, also: range = range(0)) -> Tensor:
        """Return the rows, or places on probation, that may have changed.

        Args:
            on_probation: True for places.
            since: this map's counters at the earlier time; its clock must not have restarted since.
            also: rows or places to return as well.

        Returns:
            int32, shape (n,), ascending.
        """
        return from_buffer(self._map.changed(on_probation, since, also.start, also.stop), torch.int32)

    def save(self, on_probation: bool, cells: Tensor | None = None) -> SavedKeys:
        """Return the keys of rows, or those on probation: of all, or in some ``cells``, int32."""
        count = self.cursor.probation_used if on_probation else self.cursor.used
        some = (0, count) if cells is None else (address(cells), len(cells))
        saved = self.room(on_probation, some[1], self._map.text_bytes(on_probation, *some) if self._exact else 0)
        self._map.save(on_probation, *some, saved.pointers())
        return saved

    def room(self, on_probation: bool, count: int, text_bytes: int) -> SavedKeys:
        """Return memory for the keys of ``count`` rows or places."""
        has_last = not on_probation and self._evict is not None
        has_counts = on_probation or self._evict == "lfu"
        texts = None
        if self._exact:
            texts = torch.empty(text_bytes, dtype=torch.uint8), torch.empty(count + 1, dtype=torch.int64)
        return SavedKeys(
            torch.empty(count, dtype=torch.int64),
            torch.empty(count, dtype=torch.uint32) if has_last else None,
            torch.empty(count, dtype=torch.uint32) if has_counts else None,
            texts,
        )

    def restore(self, cursor: Cursor, rows: SavedKeys, probation: SavedKeys) -> bool:
        """Fill an empty map; return False if a key occurs twice."""
        return self._map.restore(cursor, rows.pointers(), probation.pointers())


def add_to_maps(
    maps: Sequence[KeyMap], keys: Sequence[tuple[Tensor, Texts | None]], undos: Sequence[IdMapUndo]
) -> tuple[list[Tensor], int]:
    """Add a batch of keys to each of several maps, concurrently, as :meth:`KeyMap.add` does: to all or none.

    Args:
        maps: distinct maps.
        keys: numbers and texts for each.
        undos: filled with what :meth:`KeyMap.undo` needs.

    Returns:
        The rows of each batch, and -1; or the index of the first map that lacks rows, with nothing changed.
    """
    counts = [len(numbers) for numbers, _ in keys]
    rows = torch.empty(sum(counts), dtype=torch.int64)
    batches = [(each._map, _keys(*some), undo) for each, some, undo in zip(maps, keys, undos, strict=True)]
    full = _C.add_to_maps(batches, address(rows), get_num_threads())
    return list(torch.split(rows, counts)), full


def _pointer(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


def _keys(numbers: Tensor, texts: Texts | None) -> tuple[int, int, int, int]:
    text, offsets = (0, 0) if texts is None else (texts[0].data_ptr(), texts[1].data_ptr())
    return numbers.data_ptr(), len(numbers), text, offsets


# ---- strings ---------------------------------------------------------------------------------------------------------


def hash_texts(texts: Texts) -> Tensor:
    """Return the hash of each text: XXH64 with seed 0 (Collet's specification of xxHash); int64, shape (n,).

    >>> hex(int(hash_texts(texts_of(["abc"]))))
    '0x44bc2cf5ad770999'
    """
    text, offsets = texts
    out = torch.empty(len(offsets) - 1, dtype=torch.int64)
    _C.hash_texts(text.data_ptr(), offsets.data_ptr(), len(out), address(out), get_num_threads())
    return out


def texts_of(strings: Sequence[str | bytes]) -> Texts:
    """Return the texts of a sequence, str as UTF-8.

    Raises:
        TypeError: an item is something else.

    >>> texts_of(["ab", b"", "c"])[1]
    tensor([0, 2, 2, 3])
    """
    text, offsets = _C.texts_of(strings)
    return from_buffer(text, torch.uint8), from_buffer(offsets, torch.int64)


def texts_of_fixed(strings: NDArray[Any]) -> Texts:
    """Return the texts of an array of NumPy's fixed-width strings, any shape, str as UTF-8."""
    ucs4 = strings.dtype.kind == "U"
    strings = np.ascontiguousarray(strings)
    width = strings.dtype.itemsize // (4 if ucs4 else 1)
    text, offsets = _C.texts_of_fixed(strings.ctypes.data, strings.size, width, ucs4)
    return from_buffer(text, torch.uint8), from_buffer(offsets, torch.int64)
