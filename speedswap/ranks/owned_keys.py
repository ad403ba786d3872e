"""Keys that one of several ranks owns, with their rows: how they are kept, saved and taken up again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Kind, RankGroup
from speedswap.ranks.key_route import owners_of_keys, sent_texts
from speedswap.tables.files.damage import require, says_damaged
from speedswap.tables.files.keys_file import SavedMap, joined, restored, selected
from speedswap.tables.id_map import IdMap
from speedswap.tables.keys import select_texts

__all__ = ["SETTINGS", "OwnedKeys", "part_of", "shares_of"]

SETTINGS = ("capacity", "keys", "admit_after", "evict")


class OwnedKeys(IdMap):
    """The part of an id map that a rank owns: its keys, and the row of each.

    Args:
        settings: a map without keys, with the arguments; it cannot be used any more.
        group: the ranks.

    Attributes:
        number: of the map among those of the group, the same on every rank.
        share: the number of keys that this rank can own.
    """

    number: int

    def __init__(self, settings: IdMap, group: RankGroup) -> None:
        self.group = group
        self.capacity, self.evict = settings.capacity, settings.evict
        self._used_by = [0] * len(group)  # rows of what is being restored, by the rank that owns their keys
        self._last_in_parts = 0  # the last of those rows
        self.share = self._own_share()
        super().__init__(settings.capacity, keys=settings.keys, admit_after=settings.admit_after, evict=settings.evict)
        self.holder = settings.holder
        self._rows = torch.zeros(1, dtype=torch.int32)  # of each own key, by its place in the loops' map
        self._used = 0  # rows, on all ranks

    def _empty(self) -> kernels.KeyMap:
        return kernels.KeyMap(self.share, self.keys == "exact", self.admit_after, self.evict)

    def __len__(self) -> int:
        """Return the number of keys that have a row, on all ranks."""
        return self._used

    @property
    def counts(self) -> bool:
        """True if sightings of a key are counted, so that each of them is sent to its owner."""
        return self.admit_after > 1 or self.evict == "lfu"

    def _own_share(self) -> int:
        """Return the number of keys that this rank can own, with those that it has among them."""
        if self.evict is None:
            return self.capacity
        share = shares_of(self.capacity, self._used_by)[self.group.rank]
        if not share:
            raise ValueError(
                f"capacity is {self.capacity}, of which this rank, one of {len(self.group)} that evict, gets no row; "
                "give the map more rows, or use fewer ranks"
            )
        return share

    def renew_later(self, rows: Tensor) -> None:
        """Let rows that could not be reset now start anew when the next keys are added."""
        places = torch.isin(self._rows[: self._map.cursor.used + 1], rows.to(torch.int32)).nonzero().squeeze(1)
        super().renew_later(places[places > 0])

    # ------------------------------------------------------------------ saving

    def _saved(self, cells: tuple[Tensor, Tensor] | None = None) -> SavedMap:
        rows = self._rows[1 : self._map.cursor.used + 1].clone() if cells is None else self._rows[cells[0].long()]
        return super()._saved(cells)._replace(own_rows=rows)

    def _kept(self, part: SavedMap) -> SavedMap:
        rows = part.own_rows
        last = part.cursor.used if rows is None else int(rows.max()) if len(rows) else 0
        self._last_in_parts = max(self._last_in_parts, last)
        size, rank = len(self.group), self.group.rank
        used_by = owners_of_keys(part.rows.numbers, size).bincount(minlength=size).tolist()
        self._used_by = [sum(both) for both in zip(self._used_by, used_by, strict=True)]

        def is_own(numbers: Tensor) -> Tensor:
            return owners_of_keys(numbers, size) == rank

        waiting = part.probation.numbers
        if part.probation.counts is not None:  # else no key is on probation
            waiting = waiting[part.probation.counts.long() > 0]
        is_own_part = part.own_rows is not None and bool(is_own(torch.cat([part.rows.numbers, waiting])).all())
        return part if is_own_part else selected(part, is_own)

    @contextmanager
    def restoring(self, raw: Tensor | Iterable[Tensor], *, what: str = "the id map") -> Iterator[None]:
        self._used_by = [0] * len(self.group)
        self._last_in_parts = 0
        if isinstance(raw, Tensor):  # the whole map
            self.group.require_alike(raw, f"bytes of {what}")
        with super().restoring(raw, what=what):
            yield

    def _restored(self, parts: list[SavedMap], what: str) -> tuple[SavedMap, kernels.KeyMap]:
        with says_damaged(what, "; restore all parts of it from a copy"):
            require(self._last_in_parts == sum(self._used_by), "the keys of some rows are missing")
        share = self._own_share()
        own = [part for part in parts if part.cursor.used or part.cursor.probation_used]
        if len(own) == 1 and _fits_ring(own[0], share):  # as this rank has saved it, places on probation too
            saved = own[0]._replace(free_rows_are_stale=any(part.free_rows_are_stale for part in parts))
        else:
            saved = joined(parts, self.capacity)
        if len(saved.probation.numbers) > share:
            saved = joined([saved], share)
        return saved, restored(saved, what, share)

    def _adopt(self, saved: SavedMap, restored: kernels.KeyMap) -> None:
        assert saved.own_rows is not None
        super()._adopt(saved, restored)
        self.share = self._own_share()
        self._rows = torch.cat([torch.zeros(1, dtype=torch.int32), saved.own_rows])
        self._used = sum(self._used_by)

    def whole_bytes(self) -> Tensor:
        """Return the keys of all ranks as the bytes of an ordinary map; every rank calls this."""
        mine, size = self.to_bytes(), len(self.group)
        with self.group.main.task(Kind.PARTS, self.number) as task:
            lengths = task.round([len(mine)] * size).counts
            parts = torch.split(task.send(mine.repeat(size), [len(mine)] * size, lengths), lengths)
        whole = IdMap(self.capacity, keys=self.keys, admit_after=self.admit_after, evict=self.evict)
        whole.restore(parts)
        return whole.to_bytes()

    def row_keys(self) -> Tensor | kernels.Texts:
        """Return the keys of all rows, those of all ranks; every rank calls this. As :meth:`IdMap.row_keys`."""
        with self.group.main.task(Kind.PARTS, self.number) as task, self._unbroken():
            saved, size = self._map.save(False), len(self.group)
            places = torch.arange(len(saved.numbers)).repeat(size)
            sent = [len(saved.numbers)] * size
            received = task.round(sent).counts
            order = task.send(self._rows[1:][places], sent, received).argsort()
            numbers = task.send(saved.numbers[places], sent, received)[order]
            if saved.texts is None:
                return numbers
            return select_texts(sent_texts(task, select_texts(saved.texts, places), sent, received), order)

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        raise TypeError("the keys of the id map are owned by ranks, and cannot be copied; save the table")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the keys of the id map are owned by ranks, and cannot be pickled; save the table")


def _fits_ring(part: SavedMap, share: int) -> bool:
    """Return whether keys on probation can stay where they are, in a ring of so many places."""
    used = part.cursor.probation_used
    return used == share or used == part.cursor.last_place < share


def shares_of(capacity: int, used_by: Sequence[int]) -> list[int]:
    """Return the number of keys that each rank can own: an equal share, and at least those that it has.

    What is left where some have more is shared equally by the others. Shares stay the same as ranks fill them up, so
    that a training evicts the same keys after it was loaded.

    Args:
        capacity: rows of all ranks.
        used_by: rows that each rank has keys for, in their order; the sum is at most ``capacity``.
    """
    shares = [0] * len(used_by)
    within = [*range(len(used_by))]
    while within:
        each, more = divmod(
            capacity - sum(used for rank, used in enumerate(used_by) if rank not in within), len(within)
        )
        for place, rank in enumerate(within):
            shares[rank] = each + (place < more)
        beyond = [rank for rank in within if used_by[rank] > shares[rank]]
        if not beyond:
            break
        for rank in beyond:
            shares[rank] = used_by[rank]
        within = [rank for rank in within if rank not in beyond]
    return shares


def part_of(parts: Sequence[IdMap], world_size: int, rank: int) -> IdMap:
    """Return the part of a map that a rank owns, out of those that other ranks owned."""
    saved = [part.part for part in parts if part.part is not None]
    kept = [selected(each, lambda numbers: owners_of_keys(numbers, world_size) == rank) for each in saved]
    found = IdMap(**saved[0].settings)
    found.part = joined(kept, found.capacity)
    return found
