"""The way of a batch's keys between the rank that has them and their owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Task
from speedswap.kernels import Texts
from speedswap.tables.keys import Keys, select_texts

__all__ = ["KeyRoute", "owners_of_keys", "sent_texts"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio


def owners_of_keys(numbers: Tensor, world_size: int) -> Tensor:
    """Return the rank that owns each key, int64: a function of the key and of the number of ranks alone.

    Args:
        numbers: the keys, or the hashes of strings, int64.
        world_size: ranks.
    """
    spread = (numbers ^ (numbers >> 32)) * _GOLDEN  # Fibonacci hashing (Knuth, volume 3, 6.4)
    return ((spread >> 32 & 0xFFFFFFFF) * world_size) >> 32


@dataclass(frozen=True)
class KeyRoute:
    """The keys of several maps that this rank asks the owners about, and those that it is asked about.

    Attributes:
        of_map: the map of each part of the keys.
        places: of each part's keys among those of it that were sent.
        firsts: where each part begins among the keys sent, before they are ordered; and their number.
        order: of the keys sent by their owners.
        sent, received: how many keys go to each rank, and come from it.
        asked: for each map the keys asked about here, part after part, in the order of ranks: numbers and texts.
        by_map: of the keys received, the order in which ``asked`` has them.
    """

    of_map: list[int]
    places: list[Tensor]
    firsts: list[int]
    order: Tensor
    sent: list[int]
    received: list[int]
    asked: list[tuple[Tensor, Texts | None]]
    by_map: Tensor

    @classmethod
    def of(cls, task: Task, keys: Sequence[Keys], once: Sequence[bool], parts: Sequence[Sequence[int]]) -> KeyRoute:
        """Ask the owners of keys about them, which every rank does at once.

        Args:
            task: the ranks' common one.
            keys: a batch for each map.
            once: for each map, True to send a key once however often it occurs in a part.
            parts: of each batch, the number of keys in each part: all ranks' first parts come before their second ones.
        """
        size = len(task.lane.ranks)
        of_map = [index for index, some in enumerate(parts) for _ in some]
        given = [part for some, counts in zip(keys, parts, strict=True) for part in _parted(some, counts)]
        sent_keys, places = [], []
        for index, part in zip(of_map, given, strict=True):
            distinct, of_given = _distinct(part) if once[index] else (part, torch.arange(len(part)))
            sent_keys.append(distinct)
            places.append(of_given)
        counts = torch.tensor([len(part) for part in sent_keys])
        numbers = torch.cat([part.numbers for part in sent_keys])
        owner = owners_of_keys(numbers, size)
        order = owner.argsort(stable=True)
        of_part = torch.repeat_interleave(torch.arange(len(given)), counts)
        to_each = torch.bincount(owner * len(given) + of_part, minlength=size * len(given)).view(size, -1)
        from_each = task.send(to_each, [1] * size, [1] * size)
        sent, received = to_each.sum(1).tolist(), from_each.sum(1).tolist()
        came = task.send(numbers[order], sent, received)
        by_map = torch.repeat_interleave(torch.arange(len(given)).repeat(size), from_each.view(-1)).argsort(stable=True)
        of_maps = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, torch.tensor(of_map), from_each.sum(0))
        asked: list[tuple[Tensor, Texts | None]] = []
        texts = None
        if any(some.texts is not None for some in keys):
            found = sent_texts(task, select_texts(_joined(sent_keys), order), sent, received)
            texts = select_texts(found, by_map)
        begin = 0
        for some, own in zip(keys, torch.split(came[by_map], of_maps.tolist()), strict=True):
            within = torch.arange(begin, begin + len(own))
            asked.append((own, None if some.texts is None or texts is None else select_texts(texts, within)))
            begin += len(own)
        firsts = [0, *counts.cumsum(0).tolist()]
        return cls(of_map, places, firsts, order, sent, received, asked, by_map)

    def bring(self, task: Task, answers: Sequence[Tensor]) -> Tensor:
        """Send an answer for each key asked about here; return those of the keys sent, by their owners.

        Args:
            task: the ranks' common one.
            answers: for each map, shape (n,), of one dtype.
        """
        return task.send(_put(torch.cat(list(answers)), self.by_map), self.received, self.sent)

    def before_ordering(self, answers: Tensor) -> Tensor:
        """Return the answers of the keys sent map after map, as they were given."""
        return _put(answers, self.order)

    def send_back(self, task: Task, values: Tensor, chosen: Tensor, wanted: Tensor) -> Tensor:
        """Send a value for some of the keys that were sent, to their owners, and return those that came here.

        Args:
            task: the ranks' common one.
            values: for the chosen keys, in the order before ordering, shape (m,).
            chosen: bool, of the keys that were sent, before ordering.
            wanted: bool, of the keys asked about here, map after map: those that a value comes for.

        Returns:
            The values of the wanted keys, map after map.
        """
        of_all = torch.zeros(len(chosen), dtype=values.dtype).masked_scatter_(chosen, values)
        leaving, coming = chosen[self.order], _put(wanted, self.by_map)
        sent = [int(part.sum()) for part in torch.split(leaving, self.sent)]
        received = [int(part.sum()) for part in torch.split(coming, self.received)]
        came = task.send(of_all[self.order][leaving], sent, received)
        return torch.zeros(len(coming), dtype=values.dtype).masked_scatter_(coming, came)[self.by_map][wanted]

    def given(self, answers: Tensor) -> list[Tensor]:
        """Return, for each map, the answer of every key that was given, out of those that :meth:`bring` has brought."""
        found: list[list[Tensor]] = [[] for _ in self.asked]
        for index, places, part in zip(
            self.of_map, self.places, self.by_part(self.before_ordering(answers)), strict=True
        ):
            found[index].append(part[places])
        return [torch.cat(own) for own in found]

    def by_part(self, values: Tensor) -> list[Tensor]:
        """Return values of the keys sent, before ordering, for each part."""
        return [values[begin:end] for begin, end in pairwise(self.firsts)]


def _parted(keys: Keys, counts: Sequence[int]) -> Iterator[Keys]:
    """Yield the parts of a batch."""
    if len(counts) == 1:
        yield keys
        return
    ends = list(accumulate(counts, initial=0))
    for begin, end in pairwise(ends):
        texts = None if keys.texts is None else select_texts(keys.texts, torch.arange(begin, end))
        yield Keys(keys.numbers[begin:end], (end - begin,), keys.device, texts)


def _distinct(keys: Keys) -> tuple[Keys, Tensor]:
    """Return each key once, in the order of its first occurrence, and the place of each given one among them."""
    seen = kernels.KeyMap(max(1, len(keys)), keys.texts is not None, 1, None)
    rows = seen.add(keys.numbers, keys.texts)
    assert rows is not None
    once = seen.save(False)
    return Keys(once.numbers, tuple(once.numbers.shape), keys.device, once.texts), rows - 1


def _joined(batches: Sequence[Keys]) -> Texts:
    """Return the texts of all keys, empty ones where a map has numbers."""
    texts: list[Tensor] = []
    lengths: list[Tensor] = []
    for some in batches:
        text, offsets = some.texts or (torch.empty(0, dtype=torch.uint8), torch.zeros(len(some) + 1, dtype=torch.int64))
        texts.append(text)
        lengths.append(offsets.diff())
    return torch.cat(texts), _offsets(torch.cat(lengths))


def sent_texts(task: Task, texts: Texts, sent: Sequence[int], received: Sequence[int]) -> Texts:
    """Send texts to each rank, and return those that came; as :meth:`Task.send` does rows."""
    text, offsets = texts
    lengths = task.send(offsets.diff(), sent, received)
    to_each = [int(part.sum()) for part in torch.split(offsets.diff(), list(sent))]
    from_each = [int(part.sum()) for part in torch.split(lengths, list(received))]
    return task.send(text, to_each, from_each), _offsets(lengths)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _put(values: Tensor, places: Tensor) -> Tensor:
    """Return values in the places that they belong to."""
    return torch.empty_like(values).index_copy_(0, places, values)
