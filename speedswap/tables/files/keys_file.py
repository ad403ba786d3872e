"""The bytes of a saved id map or a part of it, never trusted: a line with a checksum, a line of JSON, and arrays.

The arrays are little-endian and aligned to 8 bytes, and their sizes follow from the JSON alone: a file of any other
size is damaged, and nothing larger than the file is allocated for it. A table in a log saves a map as several
consecutive pieces, each aligned to 4,096 bytes, so that no two pieces share a sector.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels
from speedswap.errors import TableFormatError
from speedswap.kernels import Cursor, KeyMap, SavedKeys, Texts, hash_texts
from speedswap.tables.files.damage import ints, is_int, mended_text, ranges_of, require, says_damaged
from speedswap.tables.keys import KINDS, select_texts

_MAGIC = b"speedswap-keys 1 "
_ALIGNMENT = 8
PIECE_BYTES = 4096
"""Pieces begin at multiples of this."""
_MOST_ROWS = 2**31 - 1
_MOST_TEXT = 2**62
_MAX_HEADER = 4096
_LEAST_CELLS = 4096
_REMEDY = "; restore it from a copy"


class SavedMap(NamedTuple):
    """The contents of a saved map.

    Attributes:
        settings: the arguments it was created with.
        cursor: its counters.
        rows: the keys of its rows.
        probation: the keys on probation.
        stale: rows to reset when the next keys are added, int64.
        free_rows_are_stale: True if rows without a key may hold values.
        own_rows: in a part with the keys that one of several ranks owns, the row of each key, int32. ``stale`` then
            holds indices into the keys.
        cells: in a piece, the rows and probation slots whose keys it holds, int32, ascending; None for all.
    """

    settings: dict[str, Any]
    cursor: Cursor
    rows: SavedKeys
    probation: SavedKeys
    stale: Tensor
    free_rows_are_stale: bool
    own_rows: Tensor | None = None
    cells: tuple[Tensor, Tensor] | None = None

    def arrays(self) -> Iterator[Tensor]:
        """Yield every array, in file order."""
        for keys in (self.rows, self.probation):
            text, offsets = keys.texts or (None, None)
            for array in (keys.numbers, keys.last, keys.counts, offsets, text):
                if array is not None:
                    yield array
        yield self.stale
        if self.own_rows is not None:
            yield self.own_rows
        yield from self.cells or ()


def encode(saved: SavedMap, multiple: int = 1) -> Tensor:
    """Return a map's bytes, uint8, padded to a multiple of the alignment."""
    header = json.dumps(
        {
            **saved.settings,
            **saved.cursor._asdict(),
            "text_bytes": [len(keys.texts[0]) if keys.texts else 0 for keys in (saved.rows, saved.probation)],
            "stale": len(saved.stale),
            "free_rows_are_stale": saved.free_rows_are_stale,
            **({} if saved.own_rows is None else {"is_part": True}),
            **({} if saved.cells is None else {"cells": [len(each) for each in saved.cells]}),
        }
    ).encode()
    begin = _aligned(len(_MAGIC) + 9 + len(header) + 1)
    # NumPy copies: a step waits for this, and on a busy machine each of torch's threads would wait for a core.
    nbytes = begin + sum(_aligned(array.nbytes) for array in saved.arrays())
    out = torch.empty(_aligned(nbytes, multiple), dtype=torch.uint8).numpy()
    out[:begin] = out[nbytes:] = 0
    place = begin
    for array in saved.arrays():
        end, until = place + array.nbytes, place + _aligned(array.nbytes)
        out[place:end] = array.numpy().reshape(-1).view(np.uint8)
        out[end:until] = 0
        place = until
    raw = out.data
    first = len(_MAGIC) + 9
    raw[first : first + len(header) + 1] = header + b"\n"
    raw[:first] = _MAGIC + b"%08x\n" % zlib.crc32(raw[first:])
    return torch.from_numpy(out)


def decode(raw: Tensor, what: str) -> SavedMap:
    """Check a map's bytes and return it; its arrays are views of them.

    Args:
        raw: uint8, shape (n,), contiguous, in host memory.
        what: their place, for messages.

    Raises:
        TableFormatError: they are damaged.
    """
    with says_damaged(what, _REMEDY):
        saved, end = _parsed(raw, 1)
        require(end == len(raw), f"it has {len(raw)} bytes, not {end}")
        check_values(saved)
    return saved


def pieces(raw: Tensor, what: str) -> list[SavedMap]:
    """Return the pieces of a map, with values still unchecked; arguments and errors are those of :func:`decode`."""
    found, begin = [], 0
    with says_damaged(what, _REMEDY):
        while begin < len(raw):
            saved, end = _parsed(raw[begin:], PIECE_BYTES)
            found.append(saved)
            begin += end
    return found


def pieces_left(raw: bytes, nbytes: int, what: str, problems: list[str]) -> list[SavedMap]:
    """Return the pieces of a file that may be damaged, and record a problem for each loss.

    Args:
        raw: what is left of the file.
        nbytes: its valid length in bytes.
        what: the file's name, for problems.
        problems: the list that problems are added to.
    """
    found, magic = [], int.from_bytes(_MAGIC, "little")
    begins = [
        at
        for at in range(0, len(raw), PIECE_BYTES)
        if (int.from_bytes(raw[at : at + len(_MAGIC)], "little") ^ magic).bit_count() <= 1
    ]
    if begins[:1] != [0] or len(raw) < nbytes:
        problems.append(f"{what} has lost keys at its beginning or its end")
    for begin, end in pairwise([*begins, len(raw)]):
        data = mended_text(raw[begin:end], _MAGIC)
        is_sound, body = data is not None, raw[begin + len(_MAGIC) + 9 : end]
        data = data or _MAGIC + b"%08x\n" % zlib.crc32(body) + body
        try:
            with says_damaged(what):
                saved, stop = _parsed(torch.frombuffer(bytearray(data), dtype=torch.uint8), PIECE_BYTES)
                require(stop == len(data), f"a piece ends at byte {begin + stop}, not {end}")
                if not is_sound:
                    saved, rows = _doubted(saved)
                    wrong = ", ".join(f"{each.start} to {each.stop - 1}" for each in ranges_of(rows.numpy()))
                    problems.append(f"{what} is damaged: the keys of rows {wrong or 'on probation'} may be wrong")
        except TableFormatError as error:
            problems.append(f"{error}; keys are lost, or as they were before")
        else:
            found.append(saved)
    return found


def _doubted(saved: SavedMap) -> tuple[SavedMap, Tensor]:
    """Return a piece with a wrong checksum, and the rows whose keys may be wrong: for strings, where hashes differ."""
    rows = torch.arange(1, len(saved.rows.numbers) + 1) if saved.cells is None else saved.cells[0]
    for name in ("rows", "probation"):
        keys = getattr(saved, name)
        if keys.texts is not None:
            _require_side_by_side(keys.texts)
            hashes = hash_texts(keys.texts)
            rows = rows[hashes != keys.numbers] if name == "rows" else rows
            saved = saved._replace(**{name: keys._replace(numbers=hashes)})
    check_values(saved)
    return saved, rows


def _parsed(raw: Tensor, multiple: int) -> tuple[SavedMap, int]:
    """Return the map, or piece, at the start of some bytes, and its end, rounded up to the alignment."""
    memory = raw.numpy().data
    first = len(_MAGIC) + 9
    require(bytes(memory[: len(_MAGIC)]) == _MAGIC, "it holds no keys of this version")
    line, newline, _ = bytes(memory[first : first + _MAX_HEADER]).partition(b"\n")
    require(newline == b"\n", "its header has no end")
    header = json.loads(line)
    require(isinstance(header, dict), "its header is not an object")
    settings, cursor = _settings(header), _cursor(header)
    (stale,) = ints(header, stale=(0, settings["capacity"]))
    text_bytes, counts = header["text_bytes"], header.get("cells", [cursor.used, cursor.probation_used])
    mosts = (_MOST_TEXT, _MOST_TEXT), (cursor.used, cursor.probation_used)
    for name, pair, most in zip(("text_bytes", "cells"), (text_bytes, counts), mosts, strict=True):
        require(isinstance(pair, list) and len(pair) == 2, f"{name} is {pair!r}")
        require(all(map(is_int, pair, (0, 0), most)), f"{name} is {pair!r}")
    require(isinstance(header["free_rows_are_stale"], bool), "free_rows_are_stale is neither true nor false")
    arrays = _Arrays(raw, _aligned(first + len(line) + 1))
    rows = arrays.keys(settings, False, counts[0], text_bytes[0])
    probation = arrays.keys(settings, True, counts[1], text_bytes[1])
    saved = SavedMap(settings, cursor, rows, probation, arrays.take(stale, torch.int64), header["free_rows_are_stale"])
    if header.get("is_part", False):
        saved = saved._replace(own_rows=arrays.take(counts[0], torch.int32))
    if "cells" in header:
        saved = saved._replace(cells=(arrays.take(counts[0], torch.int32), arrays.take(counts[1], torch.int32)))
    end = _aligned(arrays.place, multiple)
    require(end <= len(raw), f"it ends at byte {len(raw)}, not {end}")
    require(bytes(memory[len(_MAGIC) : first]) == b"%08x\n" % zlib.crc32(memory[first:end]), "its checksum is wrong")
    return saved, end


def _settings(header: dict[str, Any]) -> dict[str, Any]:
    ints(header, capacity=(1, _MOST_ROWS), admit_after=(1, _MOST_ROWS))
    require(header["keys"] in KINDS, f"keys is {header['keys']!r}")
    require(header["evict"] in (None, "lru", "lfu"), f"evict is {header['evict']!r}")
    return {name: header[name] for name in ("capacity", "keys", "admit_after", "evict")}


def _cursor(header: dict[str, Any]) -> Cursor:
    capacity = header["capacity"]
    ring = capacity * 5 // 4 + 1 if header["admit_after"] > 1 else 0  # its places
    counters = ints(header, used=(0, capacity), clock=(0, 2**32 - 1), probation_used=(0, ring))
    return Cursor(*counters, *ints(header, last_place=(0, counters[-1])))


class _Arrays:
    """The consecutive arrays of a file."""

    def __init__(self, raw: Tensor, place: int) -> None:
        self.place = place
        self._raw = raw

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        nbytes = count * dtype.itemsize
        require(self.place + nbytes <= len(self._raw), f"it ends at byte {len(self._raw)}, within an array")
        found = self._raw[self.place : self.place + nbytes]
        self.place += _aligned(nbytes)
        return found.view(dtype) if count else torch.empty(0, dtype=dtype)

    def keys(self, settings: dict[str, Any], on_probation: bool, count: int, text_bytes: int) -> SavedKeys:
        numbers = self.take(count, torch.int64)
        last = self.take(count, torch.uint32) if settings["evict"] and not on_probation else None
        counts = self.take(count, torch.uint32) if on_probation or settings["evict"] == "lfu" else None
        if settings["keys"] != "exact":
            require(text_bytes == 0, f"it has {text_bytes} bytes of texts")
            return SavedKeys(numbers, last, counts, None)
        offsets = self.take(count + 1, torch.int64)
        return SavedKeys(numbers, last, counts, (self.take(text_bytes, torch.uint8), offsets))


def check_values(saved: SavedMap) -> None:
    """Require that the values of a whole map, or of a part, are possible; for use under :func:`says_damaged`."""
    rows, probation, cursor = saved.rows, saved.probation, saved.cursor
    if rows.last is not None and len(rows.last):
        require(int(rows.last.numpy().max()) <= cursor.clock, "a batch is later than the last one")
    if len(probation.numbers):
        assert probation.counts is not None
        most = int(probation.counts.numpy().max())
        require(most < saved.settings["admit_after"], f"a key is on probation after {most} sightings")
    if len(saved.stale):
        lowest, highest = torch.aminmax(saved.stale)
        require(1 <= int(lowest) <= int(highest) <= cursor.used, "a stale row has no key")
    if saved.own_rows is not None and len(saved.own_rows):
        lowest, highest = torch.aminmax(saved.own_rows)
        require(1 <= int(lowest) <= int(highest) <= saved.settings["capacity"], "a key has a row that is not there")
        require(len(torch.unique(saved.own_rows)) == len(saved.own_rows), "two keys have one row")
    for keys in (rows, probation):
        if keys.texts is None:
            continue
        _require_side_by_side(keys.texts)
        taken = slice(None) if keys is rows or keys.counts is None else keys.counts.long() > 0
        require(torch.equal(hash_texts(keys.texts)[taken], keys.numbers[taken]), "a text has another hash")


def _require_side_by_side(texts: Texts) -> None:
    text, offsets = texts
    is_ascending = int(offsets[0]) == 0 and int(offsets[-1]) == len(text) and bool((offsets.diff() >= 0).all())
    require(is_ascending, "its texts do not lie side by side")


def restored(saved: SavedMap, what: str, capacity: int | None = None, most_on_probation: int | None = None) -> KeyMap:
    """Return the compiled map rebuilt from what was saved.

    Args:
        saved: a map, or a part of one.
        what: its place, for messages.
        capacity: the most keys it can hold; by default the whole map's capacity.
        most_on_probation: the most keys on probation; by default ``capacity``.

    Raises:
        TableFormatError: a key occurs twice.
    """
    settings = saved.settings
    most, is_exact = capacity or settings["capacity"], settings["keys"] == "exact"
    found = KeyMap(most, is_exact, settings["admit_after"], settings["evict"], most_on_probation)
    with says_damaged(what, _REMEDY):
        require(found.restore(saved.cursor, saved.rows, saved.probation), "a key occurs twice")
    return found


def _aligned(nbytes: int, multiple: int = _ALIGNMENT) -> int:
    return -(-nbytes // multiple) * multiple


def selected(saved: SavedMap, is_wanted: Callable[[Tensor], Tensor]) -> SavedMap:
    """Return a part of a map: the keys that a mask selects.

    Args:
        saved: a map, or a part of one.
        is_wanted: returns a mask for keys, int64, or the hashes of strings.
    """
    wanted = is_wanted(saved.rows.numbers)
    on_probation = saved.probation.counts is not None and saved.probation.counts.long() > 0
    waiting = is_wanted(saved.probation.numbers) & on_probation
    places = wanted.nonzero().squeeze(1)
    keys, rows = _at(saved.rows, places), _rows_of(saved)[places]
    return _map_of(saved, keys, _in_turn(saved, waiting), rows, _are_stale(saved)[places])


def joined(parts: Sequence[SavedMap], most_on_probation: int) -> SavedMap:
    """Join the parts of a map, with keys in row order.

    Args:
        parts: of one map, at least one.
        most_on_probation: the most keys to keep on probation: the newest of each part, about equally many per part.
    """
    rows = torch.cat([_rows_of(part) for part in parts])
    order = rows.argsort()
    keys = _at(_side_by_side([part.rows for part in parts]), order)
    are_stale = torch.cat([_are_stale(part) for part in parts])[order]
    probation = _side_by_side([part.probation for part in parts])
    # Interleave the parts' keys, so that each is forgotten after the same number of others.
    turns = torch.cat([torch.arange(-len(part.probation.numbers), 0) for part in parts]).argsort(stable=True)
    probation = _at(probation, turns[max(0, len(turns) - most_on_probation) :])
    whole = parts[0]._replace(
        cursor=parts[0].cursor._replace(clock=max(part.cursor.clock for part in parts)),
        free_rows_are_stale=any(part.free_rows_are_stale for part in parts),
    )
    return _map_of(whole, keys, probation, rows[order], are_stale)


def assembled(pieces: Sequence[SavedMap], what: str) -> SavedMap:
    """Assemble a map that was saved in pieces; later pieces override earlier ones.

    Args:
        pieces: the pieces, in saving order.
        what: their place, for messages.

    Raises:
        TableFormatError: they do not form a map.
    """
    with says_damaged(what, "; restore it from a copy"):
        require(len(pieces) > 0, "it is empty")
        last = pieces[-1]
        for each in pieces:
            is_alike = each.settings == last.settings and (each.own_rows is None) == (last.own_rows is None)
            require(is_alike, "its pieces are of several maps")
        if len(pieces) > 1 or last.cells is not None:
            rows, probation = (_newest(pieces, on_probation) for on_probation in (False, True))
            own_rows = [each.own_rows for each in pieces if each.own_rows is not None]
            last = last._replace(
                rows=_at(_side_by_side([each.rows for each in pieces]), rows),
                probation=_at(_side_by_side([each.probation for each in pieces]), probation),
                own_rows=_of(_joined(own_rows), rows) if own_rows else None,
                cells=None,
            )
        check_values(last)
    return last


def _newest(pieces: Sequence[SavedMap], on_probation: bool) -> Tensor:
    """Return the index of each cell's latest key in the concatenated keys of all pieces."""
    used = pieces[-1].cursor.probation_used if on_probation else pieces[-1].cursor.used
    newest, begin = np.full(used + 1, -1), 0
    for piece in pieces:
        count = len((piece.probation if on_probation else piece.rows).numbers)
        cells = np.arange(1, count + 1) if piece.cells is None else piece.cells[on_probation].numpy()
        if count:
            require(int(cells[0]) >= 1 and int(cells[-1]) <= used, "a piece has more cells than the map")
            require(bool((np.diff(cells) > 0).all()), "the cells of a piece are not in order")
        newest[cells] = np.arange(begin, begin + count)
        begin += count
    require(bool((newest[1:] >= 0).all()), "a cell is in no piece")
    return torch.from_numpy(newest[1:])


def _rows_of(saved: SavedMap) -> Tensor:
    """Return the row of each key."""
    return torch.arange(1, saved.cursor.used + 1) if saved.own_rows is None else saved.own_rows.long()


def _are_stale(saved: SavedMap) -> Tensor:
    """Return a mask of the keys whose rows are to be reset."""
    return torch.zeros(len(_rows_of(saved)) + 1, dtype=torch.bool).index_fill_(0, saved.stale, True)[1:]


def _map_of(settings: SavedMap, keys: SavedKeys, probation: SavedKeys, rows: Tensor, are_stale: Tensor) -> SavedMap:
    stale = are_stale.nonzero().squeeze(1) + 1
    waiting = len(probation.numbers)
    cursor = Cursor(len(rows), settings.cursor.clock, waiting, waiting)
    return settings._replace(cursor=cursor, rows=keys, probation=probation, stale=stale, own_rows=rows.to(torch.int32))


def _in_turn(saved: SavedMap, waiting: Tensor) -> SavedKeys:
    """Return keys on probation in arrival order: the ring starts after the slot assigned last."""
    places = torch.arange(len(waiting)).roll(-saved.cursor.last_place)
    return _at(saved.probation, places[waiting[places]])


# Use NumPy: a forked process lacks torch's threads and would wait for them.


def _at(keys: SavedKeys, places: Tensor) -> SavedKeys:
    last, counts = (None if each is None else _of(each, places) for each in (keys.last, keys.counts))
    texts = None if keys.texts is None else select_texts(keys.texts, places)
    return SavedKeys(_of(keys.numbers, places), last, counts, texts)


def _of(values: Tensor, places: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy()[places.numpy()])


def _side_by_side(keys: Sequence[SavedKeys]) -> SavedKeys:
    last = [each.last for each in keys if each.last is not None]
    counts = [each.counts for each in keys if each.counts is not None]
    texts = [each.texts for each in keys if each.texts is not None]
    lengths = [np.diff(offsets.numpy()) for _, offsets in texts]
    ends = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    return SavedKeys(
        _joined([each.numbers for each in keys]),
        _joined(last) if last else None,
        _joined(counts) if counts else None,
        (_joined([text for text, _ in texts]), torch.from_numpy(ends)) if texts else None,
    )


def _joined(arrays: Sequence[Tensor]) -> Tensor:
    return torch.from_numpy(np.concatenate([each.numpy() for each in arrays]))


class Sweep(NamedTuple):
    """The state of a map at a partial save, and the progress of a sweep over all of its cells.

    Cells are the map's rows and its probation slots. With each commit the sweep saves a few unchanged cells, so that at
    its end the pieces written since its start make up the whole map, and earlier ones are no longer needed. It advances
    by two cells for each changed cell that is saved again, which limits the pieces of one sweep to 1.5 times the map.

    Attributes:
        token: the map's token.
        cursor: the map's counters.
        passed: number of rows, and of slots, that the sweep has passed.
        until: the numbers it ends at: the map's when the sweep began.
        rewritten: changed cells of the last piece that had been saved before.
    """

    token: object
    cursor: kernels.Cursor
    passed: tuple[int, int]
    until: tuple[int, int]
    rewritten: int = 0

    @property
    def is_complete(self) -> bool:
        """True if the next step begins another sweep, and nothing saved before this one is needed."""
        return self.passed == self.until

    def is_before(self, token: object, now: kernels.Cursor) -> bool:
        """Return whether changes since then are known: the map is the same, and its clock has not restarted."""
        return self.token is token and self.cursor.clock <= now.clock

    def step(self, loops: kernels.KeyMap) -> tuple[Sweep, tuple[Tensor, Tensor]]:
        """Return the new state, and the cells to save: the changed ones, and the next ones of the sweep.

        Args:
            loops: the compiled map.
        """
        had = self.cursor.used, self.cursor.probation_used
        begin, until = ((0, 0), had) if self.is_complete else (self.passed, self.until)
        room = _LEAST_CELLS + 2 * self.rewritten
        rows = min(begin[0] + room, until[0])
        places = min(begin[1] + room - (rows - begin[0]), until[1])
        cells = (
            loops.changed(False, self.cursor, range(begin[0] + 1, rows + 1)),
            loops.changed(True, self.cursor, range(begin[1] + 1, places + 1)),
        )
        again = sum(int((some <= most).sum()) for some, most in zip(cells, had, strict=True))
        rewritten = max(0, again - (rows + places - sum(begin)))
        return Sweep(self.token, loops.cursor, (rows, places), until, rewritten), cells
