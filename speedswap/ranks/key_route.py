"""The route of a batch's keys from the requesting rank to their owners, which assign places to new keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Task
from speedswap.kernels import Texts
from speedswap.tables import Keys
from speedswap.tables.keys import select_texts

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
    """Return the number of keys that each rank can own: an equal share, or the number it has, if greater.

    If some have more, the others share the rest equally. Shares do not change as ranks fill them, so a training run
    evicts the same keys after it is reloaded.

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
        places: for each part, the index of each key among the part's sent keys.
        counts: the number of keys sent per part.
        order: the order of the sent keys by owner.
        sent, received: the number of keys sent to, and received from, each rank.
        asked: the keys received for each map, part by part, in rank order: numbers and texts.
        by_map: the order that sorts the received keys into that of ``asked``.
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
            task: the ranks' common task.
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
            task: the ranks' common task.
            answers: for each map, shape (n,), all of the same dtype.
        """
        return _put(task.send(_put(torch.cat(list(answers)), self.by_map), self.received, self.sent), self.order)

    def send_back(self, task: Task, values: Tensor, chosen: Tensor, wanted: Tensor) -> Tensor:
        """Send values for some of the sent keys to their owners; return the values received here.

        Args:
            task: the ranks' common task.
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
        """Return, for each map, the answer for every given key, from what :meth:`bring` returned."""
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
    """Return values scattered to their places."""
    return torch.empty_like(values).index_copy_(0, places, values)
