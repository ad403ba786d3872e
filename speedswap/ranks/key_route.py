"""The route of a batch's keys from the requesting rank to their owners, which assign places to new keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Task
from speedswap.errors import IdMapFullError
from speedswap.kernels import Texts
from speedswap.tables import Keys
from speedswap.tables.keys import select_texts

if TYPE_CHECKING:
    from speedswap.ranks.keys import ShardedIdMap

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio


def owners_of_keys(numbers: Tensor, world_size: int) -> Tensor:
    """Return the rank that owns each key, int64; it depends only on the key and the number of ranks.

    Args:
        numbers: the keys, or the hashes of strings, int64.
        world_size: the number of ranks.
    """
    spread = (numbers ^ (numbers >> 32)) * _GOLDEN  # Fibonacci hashing (Knuth, volume 3, 6.4)
    return ((spread >> 32 & 0xFFFFFFFF) * world_size) >> 32


def shares_of(capacity: int, used_by: Sequence[int]) -> list[int]:
    """Return the number of keys that each rank can own: an equal share, or all that it has, if more.

    If some have more, the others share the rest equally. Shares do not change as ranks fill them up, so that a training
    run evicts the same keys after it is reloaded.

    Args:
        capacity: rows over all ranks.
        used_by: number of rows with keys on each rank, in rank order; the sum is at most ``capacity``.
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


@dataclass(frozen=True)
class KeyRoute:
    """The keys of several maps that this rank sends to their owners, and those that it receives.

    Attributes:
        of_map: the map that each part of the keys belongs to.
        places: for each part, the indices of its keys within those of it that were sent.
        counts: the number of keys sent per part.
        order: the order of the sent keys by owner.
        sent, received: the number of keys sent to, and received from, each rank.
        asked: the keys received for each map, part by part, in rank order: numbers and texts.
        by_map: the order that sorts the received keys as in ``asked``.
    """

    of_map: list[int]
    places: list[Tensor]
    counts: list[int]
    order: Tensor
    sent: list[int]
    received: list[int]
    asked: list[tuple[Tensor, Texts | None]]
    by_map: Tensor

    @classmethod
    def of(cls, task: Task, keys: Sequence[Keys], once: Sequence[bool], parts: Sequence[Sequence[int]]) -> KeyRoute:
        """Send keys to their owners; every rank must call this together.

        Args:
            task: the ranks' common one.
            keys: a batch of keys for each map.
            once: for each map, True to send a key only once per part.
            parts: for each batch, the number of keys in each part: all ranks' first parts precede their second ones.
        """
        size = len(task.lane.ranks)
        of_map = [index for index, some in enumerate(parts) for _ in some]
        given = [part for some, counts in zip(keys, parts, strict=True) for part in _parted(some, counts)]
        sent_keys, places = zip(
            *(
                _distinct(part) if once[index] else (part, torch.arange(len(part)))
                for index, part in zip(of_map, given, strict=True)
            ),
            strict=True,
        )
        counts = torch.tensor([len(part) for part in sent_keys])
        numbers = torch.cat([part.numbers for part in sent_keys])
        owner = owners_of_keys(numbers, size)
        order = owner.argsort(stable=True)
        of_part = torch.repeat_interleave(torch.arange(len(given)), counts)
        to_each = torch.bincount(owner * len(given) + of_part, minlength=size * len(given)).view(size, -1)
        from_each = task.send(to_each, [1] * size, [1] * size)
        sent, received = to_each.sum(1).tolist(), from_each.sum(1).tolist()
        came, texts = task.send(numbers[order], sent, received), None
        if any(some.texts is not None for some in keys):
            texts = sent_texts(task, select_texts(_joined(sent_keys), order), sent, received)
        by_map = torch.repeat_interleave(torch.arange(len(given)).repeat(size), from_each.view(-1)).argsort(stable=True)
        of_maps = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.tensor(of_map), from_each.sum(0))
        asked = [
            (came[own], None if some.texts is None or texts is None else select_texts(texts, own))
            for some, own in zip(keys, torch.split(by_map, of_maps.tolist()), strict=True)
        ]
        return cls(of_map, [*places], counts.tolist(), order, sent, received, asked, by_map)

    def bring(self, task: Task, answers: Sequence[Tensor]) -> Tensor:
        """Send an answer for each received key; return the answers for the sent keys, part by part.

        Args:
            task: the ranks' common one.
            answers: for each map, shape (n,), all of the same dtype.
        """
        return _put(task.send(_put(torch.cat(list(answers)), self.by_map), self.received, self.sent), self.order)

    def send_back(self, task: Task, values: Tensor, chosen: Tensor, wanted: Tensor) -> Tensor:
        """Send values for some of the sent keys to their owners; return the values received here.

        Args:
            task: the ranks' common one.
            values: values of the chosen keys, part by part, shape (m,).
            chosen: a mask of the sent keys, part by part.
            wanted: a mask of the received keys, map by map: those for which a value arrives.

        Returns:
            The values of the wanted keys, map by map.
        """
        of_all = torch.zeros(len(chosen), dtype=values.dtype).masked_scatter_(chosen, values)
        leaving, coming = chosen[self.order], _put(wanted, self.by_map)
        sent = [int(part.sum()) for part in torch.split(leaving, self.sent)]
        received = [int(part.sum()) for part in torch.split(coming, self.received)]
        came = task.send(of_all[self.order][leaving], sent, received)
        return torch.zeros(len(coming), dtype=values.dtype).masked_scatter_(coming, came)[self.by_map][wanted]

    def given(self, answers: Tensor) -> list[Tensor]:
        """Return, for each map, the answer for every given key, from those that :meth:`bring` returned."""
        found: list[list[Tensor]] = [[] for _ in self.asked]
        for index, places, part in zip(self.of_map, self.places, torch.split(answers, self.counts), strict=True):
            found[index].append(part[places])
        return [torch.cat(own) for own in found]


def _parted(keys: Keys, counts: Sequence[int]) -> Iterator[Keys]:
    """Yield the parts of a batch."""
    if len(counts) == 1:
        yield keys
        return
    for within in torch.split(torch.arange(len(keys)), list(counts)):
        texts = None if keys.texts is None else select_texts(keys.texts, within)
        yield Keys(keys.numbers[within], (len(within),), keys.device, texts)


def _distinct(keys: Keys) -> tuple[Keys, Tensor]:
    """Return the distinct keys, in order of first occurrence, and each given key's index among them."""
    seen = kernels.KeyMap(max(1, len(keys)), keys.texts is not None, 1, None)
    rows = seen.add(keys.numbers, keys.texts)
    assert rows is not None
    once = seen.save(False)
    return Keys(once.numbers, tuple(once.numbers.shape), keys.device, once.texts), rows - 1


def _joined(batches: Sequence[Keys]) -> Texts:
    """Return the texts of all keys, empty for maps of numbers."""
    texts: list[Tensor] = []
    lengths: list[Tensor] = []
    for some in batches:
        text, offsets = some.texts or (torch.empty(0, dtype=torch.uint8), torch.zeros(len(some) + 1, dtype=torch.int64))
        texts.append(text)
        lengths.append(offsets.diff())
    return torch.cat(texts), _offsets(torch.cat(lengths))


def sent_texts(task: Task, texts: Texts, sent: Sequence[int], received: Sequence[int]) -> Texts:
    """Send texts to each rank, as :meth:`Task.send` does rows, and return those received."""
    text, offsets = texts
    lengths = task.send(offsets.diff(), sent, received)
    to_each = [int(part.sum()) for part in torch.split(offsets.diff(), list(sent))]
    from_each = [int(part.sum()) for part in torch.split(lengths, list(received))]
    return task.send(text, to_each, from_each), _offsets(lengths)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _put(values: Tensor, places: Tensor) -> Tensor:
    """Scatter values to their places."""
    return torch.empty_like(values).index_copy_(0, places, values)


NEW, RENEWED, FULL = 1, 2, 4


class NewKeys:
    """The keys that a rank receives in a training lookup, for its part of some maps.

    Attributes:
        news: whether keys are new here, whether rows are reset, and whether there are too few rows.
    """

    def __init__(self, maps: Sequence[ShardedIdMap], route: KeyRoute) -> None:
        self._maps = maps
        self._route = route
        self._undos = [kernels.IdMapUndo() for _ in maps]
        self._had = [each._map.cursor.used for each in maps]
        self._totals = [each._used for each in maps]
        self._places: list[Tensor] = []
        self.news = 0

    def add(self) -> None:
        """Assign places in this rank's maps to new keys: in all of the maps, or in none."""
        maps, asked = self._maps, self._route.asked
        self._places, full = kernels.add_to_maps([each._map for each in maps], asked, self._undos)
        if full >= 0:
            self.news = FULL
            return
        new = [each._map.cursor.used - had for each, had in zip(maps, self._had, strict=True)]
        are_stale = any(each._free_rows_are_stale for each in maps)
        has_renewed = any(len(each._map.renewed) or len(each._stale) for each in maps)
        self.news = NEW * any(new) | RENEWED * (has_renewed or (are_stale and any(new)))

    def number(self, task: Task) -> None:
        """Assign rows to new keys, in the order of ranks and of their batches; every rank must call this.

        The first rank that has a key assigns its row, since that rank knows its turn.
        """
        route, maps = self._route, self._maps
        first = torch.cat([_is_first(places, had) for places, had in zip(self._places, self._had, strict=True)])
        sizes = [len(places) for places in self._places]
        mine = route.bring(task, torch.split(first.to(torch.uint8), sizes)).bool()
        counts = torch.stack([part.sum() for part in torch.split(mine, route.counts)])
        of_ranks = torch.stack(task.share_numbers(counts))
        before = of_ranks[: task.lane.rank].sum(0).tolist()
        totals, given = list(self._totals), []
        for index, start, own, of_all in zip(
            route.of_map, before, counts.tolist(), of_ranks.sum(0).tolist(), strict=True
        ):
            first_row = totals[index] + start + 1
            given.append(torch.arange(first_row, first_row + own))
            totals[index] += of_all
        for each, total in zip(maps, totals, strict=True):
            if total > each.capacity:
                task.finish()  # the others know
                raise IdMapFullError(
                    f"keys of all ranks has more new keys than the {each.capacity - each._used} rows that are left of "
                    f'{each.capacity}; make the map with a greater capacity, or with evict="lru" or "lfu"; nothing '
                    "was added"
                )
        rows = route.send_back(task, torch.cat(given).to(torch.int32), mine, first)
        new = [each._map.cursor.used - had for each, had in zip(maps, self._had, strict=True)]
        for each, had, own in zip(maps, self._had, torch.split(rows, new), strict=True):
            each._rows = _written(each._rows, had + 1, own)
        self._totals = totals

    def rows(self) -> list[Tensor]:
        """Return the row of each received key."""
        return [each._rows[places] for each, places in zip(self._maps, self._places, strict=True)]

    def renewed(self) -> list[Tensor]:
        """Return, for each map, the rows of this rank's keys to reset."""
        renewed = []
        for each, had in zip(self._maps, self._had, strict=True):
            places = torch.cat([each._stale, each._renewed_since(each._map.cursor._replace(used=had))])
            renewed.append(each._rows[kernels.unique(places)[0]].long())
        return renewed

    def accept(self) -> None:
        """Accept the batch."""
        self._undos = []
        for each, total in zip(self._maps, self._totals, strict=True):
            each._used = total
            each._stale = each._stale[:0]

    def take_back(self) -> None:
        """Undo the batch, unless it was accepted."""
        for each, undo in zip(self._maps, self._undos, strict=False):
            each._map.undo(undo)


def _is_first(places: Tensor, had: int) -> Tensor:
    """Return, for each key, whether it is the first with its place, among places from ``had`` on."""
    if not len(places):
        return torch.empty(0, dtype=torch.bool)
    highest = torch.cat([torch.tensor([had]), places.cummax(0).values[:-1]])
    return places > highest.clamp(min=had)


def _written(rows: Tensor, begin: int, values: Tensor) -> Tensor:
    """Write values into rows from a place on, in memory that grows by at least an eighth; return the rows."""
    if begin + len(values) > len(rows):
        longer = torch.zeros(begin + len(values) + len(rows) // 8, dtype=rows.dtype)
        longer[:begin] = rows[:begin]
        rows = longer
    rows[begin : begin + len(values)] = values
    return rows
