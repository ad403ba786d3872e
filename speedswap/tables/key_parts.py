"""Saved id maps, taken apart and put together: the keys of some rows, those of several parts, and later pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Cursor, SavedKeys
from speedswap.tables.files.damage import require, says_damaged
from speedswap.tables.files.keys_file import SavedMap, check_values
from speedswap.tables.keys import select_texts

__all__ = ["Sweep", "assembled", "joined", "selected"]

_LEAST_CELLS = 4096


def selected(saved: SavedMap, is_wanted: Callable[[Tensor], Tensor]) -> SavedMap:
    """Return the part of a map with some of its keys.

    Args:
        saved: a map, or a part of one.
        is_wanted: returns a mask for keys, int64, or the hashes of strings.
    """
    wanted = is_wanted(saved.rows.numbers)
    on_probation = saved.probation.counts is not None and saved.probation.counts.long() > 0
    waiting = is_wanted(saved.probation.numbers) & on_probation
    rows = _rows_of(saved)
    is_stale = torch.zeros(len(rows) + 1, dtype=torch.bool).index_fill_(0, saved.stale, True)[1:]
    places = wanted.nonzero().squeeze(1)
    stale = is_stale[places].nonzero().squeeze(1) + 1
    return _map_of(saved, _at(saved.rows, places), _in_turn(saved, waiting), rows[places], stale)


def joined(parts: Sequence[SavedMap], most_on_probation: int) -> SavedMap:
    """Return the parts of a map as one, with its keys in the order of their rows.

    Args:
        parts: of one map, at least one.
        most_on_probation: keys that are kept on probation: of each part about as many, the last to come.
    """
    rows = torch.cat([_rows_of(part) for part in parts])
    order = rows.argsort()
    keys = _at(_side_by_side([part.rows for part in parts]), order)
    is_stale = torch.cat(
        [torch.zeros(len(_rows_of(part)) + 1, dtype=torch.bool).index_fill_(0, part.stale, True)[1:] for part in parts]
    )
    stale = is_stale[order].nonzero().squeeze(1) + 1
    probation = _side_by_side([part.probation for part in parts])
    # Keys of several parts take turns: one is forgotten after as many others.
    turns = torch.cat([torch.arange(-len(part.probation.numbers), 0) for part in parts]).argsort(stable=True)
    probation = _at(probation, turns[max(0, len(turns) - most_on_probation) :])
    whole = parts[0]._replace(
        cursor=parts[0].cursor._replace(clock=max(part.cursor.clock for part in parts)),
        free_rows_are_stale=any(part.free_rows_are_stale for part in parts),
    )
    return _map_of(whole, keys, probation, rows[order], stale)


def assembled(pieces: Sequence[SavedMap], what: str) -> SavedMap:
    """Return the map that was saved in pieces, of which later ones replace what earlier ones have.

    Args:
        pieces: in the order in which they were saved.
        what: their place, for messages.

    Raises:
        TableFormatError: they do not make up a map.
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
    """Return where each cell's key is that was saved last, among the keys of all pieces side by side."""
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


def _map_of(settings: SavedMap, keys: SavedKeys, probation: SavedKeys, rows: Tensor, stale: Tensor) -> SavedMap:
    waiting = len(probation.numbers)
    cursor = Cursor(len(rows), settings.cursor.clock, waiting, waiting)
    return settings._replace(cursor=cursor, rows=keys, probation=probation, stale=stale, own_rows=rows.to(torch.int32))


def _in_turn(saved: SavedMap, waiting: Tensor) -> SavedKeys:
    """Return keys on probation in the order in which they came: the ring begins after the last place given out."""
    places = torch.arange(len(waiting)).roll(-saved.cursor.last_place)
    return _at(saved.probation, places[waiting[places]])


# By NumPy: a forked process has none of torch's threads, and would wait for them.


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
    """The state of a map when some of it was saved, and how far a sweep over all of its cells has come.

    Cells are the map's rows, and its places on probation. With each commit the sweep saves a few that have not changed,
    so that in the end the pieces since its beginning are the whole map, and earlier ones are not needed any more. It
    passes two cells for each that was saved again since it had changed: the pieces of one sweep are then at most half
    as large again as the map.

    Attributes:
        token: of the map.
        cursor: the map's counters.
        passed: rows, and places, that the sweep has passed.
        until: those that it passes: what the map had when it began.
        rewritten: changed cells of the last piece that had been saved before.
    """

    token: object
    cursor: kernels.Cursor
    passed: tuple[int, int]
    until: tuple[int, int]
    rewritten: int = 0

    @classmethod
    def whole(cls, token: object, cursor: kernels.Cursor) -> Sweep:
        """Return the state of a map that was saved as a whole."""
        return cls(token, cursor, (cursor.used, cursor.probation_used), (cursor.used, cursor.probation_used))

    @property
    def is_complete(self) -> bool:
        """True if the next step begins another sweep, and what was saved before this one is not needed any more."""
        return self.passed == self.until

    def is_before(self, token: object, now: kernels.Cursor) -> bool:
        """Return whether changes since then can be told: of the same map, whose clock has not begun anew."""
        return self.token is token and self.cursor.clock <= now.clock

    def step(self, loops: kernels.KeyMap) -> tuple[Sweep, tuple[Tensor, Tensor]]:
        """Return the state now, and the cells to save: those that have changed, and the next ones of the sweep.

        Args:
            loops: the map.
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
