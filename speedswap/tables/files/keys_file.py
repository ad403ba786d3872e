"""The bytes of a saved id map: a line with a checksum, a line of JSON, and arrays; never trusted.

The arrays are little-endian, each from a multiple of 8 bytes on, and their sizes follow from the JSON alone: a file of
any other size is damaged, and nothing larger than the file is allocated for it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.kernels import Cursor, KeyMap, SavedKeys, hash_texts

__all__ = ["SavedMap", "decode", "encode", "restored"]

_MAGIC = b"speedswap-keys 1 "
_ALIGNMENT = 8
_MOST_ROWS = 2**31 - 1
_MOST_TEXT = 2**62
_MAX_HEADER = 4096


class SavedMap(NamedTuple):
    """A map as it is saved.

    Attributes:
        settings: the arguments that it was made with.
        cursor: its counters.
        rows: the keys of its rows.
        probation: the keys on probation.
        stale: rows that start anew when the next keys are added, int64.
        free_rows_are_stale: True if rows without a key may hold values.
    """

    settings: dict[str, Any]
    cursor: Cursor
    rows: SavedKeys
    probation: SavedKeys
    stale: Tensor
    free_rows_are_stale: bool

    def arrays(self) -> Iterator[Tensor]:
        """Yield every array, in the order of the file."""
        for keys in (self.rows, self.probation):
            text, offsets = keys.texts or (None, None)
            for array in (keys.numbers, keys.last, keys.counts, offsets, text):
                if array is not None:
                    yield array
        yield self.stale


def encode(saved: SavedMap) -> Tensor:
    """Return a map's bytes, uint8."""
    header = json.dumps(
        {
            **saved.settings,
            **saved.cursor._asdict(),
            "text_bytes": [len(keys.texts[0]) if keys.texts else 0 for keys in (saved.rows, saved.probation)],
            "stale": len(saved.stale),
            "free_rows_are_stale": saved.free_rows_are_stale,
        }
    ).encode()
    begin = _aligned(len(_MAGIC) + 9 + len(header) + 1)
    out = torch.zeros(begin + sum(_aligned(array.nbytes) for array in saved.arrays()), dtype=torch.uint8)
    place = begin
    for array in saved.arrays():
        out[place : place + array.nbytes] = array.reshape(-1).view(torch.uint8)
        place += _aligned(array.nbytes)
    raw = out.numpy().data
    first = len(_MAGIC) + 9
    raw[first : first + len(header) + 1] = header + b"\n"
    raw[:first] = _MAGIC + b"%08x\n" % zlib.crc32(raw[first:])
    return out


def decode(raw: Tensor, what: str) -> SavedMap:
    """Check a map's bytes and return it; its arrays are views of them.

    Args:
        raw: uint8, shape (n,), contiguous, in host memory.
        what: their place, for messages.

    Raises:
        TableFormatError: they are damaged.
    """
    try:
        return _checked(raw)
    except _Damage as error:
        problem = str(error)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise TableFormatError(f"{what} is damaged: {problem}; restore it from a copy")


def _checked(raw: Tensor) -> SavedMap:
    memory = raw.numpy().data
    first = len(_MAGIC) + 9
    _require(bytes(memory[: len(_MAGIC)]) == _MAGIC, "it holds no keys of this version")
    line, newline, _ = bytes(memory[first : first + _MAX_HEADER]).partition(b"\n")
    _require(newline == b"\n", "its header has no end")
    header = json.loads(line)
    _require(isinstance(header, dict), "its header is not an object")
    settings, cursor = _settings(header), _cursor(header)
    text_bytes, stale = header["text_bytes"], header["stale"]
    _require(isinstance(text_bytes, list) and len(text_bytes) == 2, f"text_bytes is {text_bytes!r}")
    _require(all(_is_int(each, 0, _MOST_TEXT) for each in text_bytes), f"text_bytes is {text_bytes!r}")
    _require(_is_int(stale, 0, settings["capacity"]), f"stale is {stale!r}")
    _require(isinstance(header["free_rows_are_stale"], bool), "free_rows_are_stale is neither true nor false")
    arrays = _Arrays(raw, _aligned(first + len(line) + 1))
    rows = arrays.keys(settings, False, cursor.used, text_bytes[0])
    probation = arrays.keys(settings, True, cursor.probation_used, text_bytes[1])
    saved = SavedMap(settings, cursor, rows, probation, arrays.take(stale, torch.int64), header["free_rows_are_stale"])
    _require(arrays.place == len(raw), f"it has {len(raw)} bytes, not {arrays.place}")
    _require(bytes(memory[len(_MAGIC) : first]) == b"%08x\n" % zlib.crc32(memory[first:]), "its checksum is wrong")
    _check_values(saved)
    return saved


def _settings(header: dict[str, Any]) -> dict[str, Any]:
    settings = {name: header[name] for name in ("capacity", "keys", "admit_after", "evict")}
    _require(_is_int(settings["capacity"], 1, _MOST_ROWS), f"capacity is {settings['capacity']!r}")
    _require(_is_int(settings["admit_after"], 1, _MOST_ROWS), f"admit_after is {settings['admit_after']!r}")
    _require(settings["keys"] in ("int64", "hashed", "exact"), f"keys is {settings['keys']!r}")
    _require(settings["evict"] in (None, "lru", "lfu"), f"evict is {settings['evict']!r}")
    return settings


def _cursor(header: dict[str, Any]) -> Cursor:
    cursor = Cursor(header["used"], header["clock"], header["probation_used"], header["last_place"])
    capacity = header["capacity"]
    _require(_is_int(cursor.used, 0, capacity), f"used is {cursor.used!r}")
    _require(_is_int(cursor.clock, 0, 2**32 - 1), f"clock is {cursor.clock!r}")
    most = capacity if header["admit_after"] > 1 else 0
    _require(_is_int(cursor.probation_used, 0, most), f"probation_used is {cursor.probation_used!r}")
    _require(_is_int(cursor.last_place, 0, cursor.probation_used), f"last_place is {cursor.last_place!r}")
    return cursor


class _Arrays:
    """The arrays of a file, one after the other."""

    def __init__(self, raw: Tensor, place: int) -> None:
        self.place = place
        self._raw = raw

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        nbytes = count * dtype.itemsize
        _require(self.place + nbytes <= len(self._raw), f"it ends at byte {len(self._raw)}, within an array")
        found = self._raw[self.place : self.place + nbytes]
        self.place += _aligned(nbytes)
        return found.view(dtype) if count else torch.empty(0, dtype=dtype)

    def keys(self, settings: dict[str, Any], on_probation: bool, count: int, text_bytes: int) -> SavedKeys:
        numbers = self.take(count, torch.int64)
        last = self.take(count, torch.uint32) if settings["evict"] and not on_probation else None
        counts = self.take(count, torch.uint32) if on_probation or settings["evict"] == "lfu" else None
        if settings["keys"] != "exact":
            _require(text_bytes == 0, f"it has {text_bytes} bytes of texts")
            return SavedKeys(numbers, last, counts, None)
        offsets = self.take(count + 1, torch.int64)
        return SavedKeys(numbers, last, counts, (self.take(text_bytes, torch.uint8), offsets))


def _check_values(saved: SavedMap) -> None:
    rows, probation, cursor = saved.rows, saved.probation, saved.cursor
    if rows.last is not None and len(rows.last):
        _require(int(rows.last.long().max()) <= cursor.clock, "a batch is later than the last one")
    if len(probation.numbers):
        assert probation.counts is not None
        most = int(probation.counts.long().max())
        _require(most < saved.settings["admit_after"], f"a key is on probation after {most} sightings")
    if len(saved.stale):
        lowest, highest = torch.aminmax(saved.stale)
        _require(1 <= int(lowest) <= int(highest) <= cursor.used, "a stale row has no key")
    for keys in (rows, probation):
        if keys.texts is None:
            continue
        text, offsets = keys.texts
        is_ascending = int(offsets[0]) == 0 and int(offsets[-1]) == len(text) and bool((offsets.diff() >= 0).all())
        _require(is_ascending, "its texts do not lie side by side")
        taken = slice(None) if keys is rows or keys.counts is None else keys.counts.long() > 0
        _require(torch.equal(hash_texts(keys.texts)[taken], keys.numbers[taken]), "a text has another hash")


def restored(saved: SavedMap, what: str) -> KeyMap:
    """Return the loops' map with what was saved.

    Raises:
        TableFormatError: a key occurs twice.
    """
    settings = saved.settings
    found = KeyMap(settings["capacity"], settings["keys"] == "exact", settings["admit_after"], settings["evict"])
    if not found.restore(saved.cursor, saved.rows, saved.probation):
        raise TableFormatError(f"{what} is damaged: a key occurs twice; restore it from a copy")
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


class _Damage(Exception):
    """A problem of the bytes."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _Damage(problem)
