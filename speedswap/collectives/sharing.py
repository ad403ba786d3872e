"""Numbers and plain data of any length that each rank tells all others within a task, and how their settings differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.collectives.lines import digest_of
from speedswap.collectives.task import Task

__all__ = ["Difference", "difference_of", "share", "share_numbers"]

_WORD_BYTES = 8


def share_numbers(task: Task, numbers: Tensor) -> list[Tensor]:
    """Return the numbers of all ranks, in their order, on every one of them; they take part at once.

    Few numbers go along with the one round that it takes; more take two further ones.

    Args:
        task: the ranks' common one.
        numbers: that this rank tells, of 8 bytes each, shape (n,).
    """
    size, sheet = len(task.lane.ranks), task.lane.sheet
    sent = numbers.view(torch.int64).repeat(size)
    counts = task.round([len(numbers)] * size, ids=sent).counts
    if size == 1:
        came = sent
    elif max(counts) <= sheet.room:
        came = sheet.ids_that_came(counts)
    else:
        came = task.send(sent, [len(numbers)] * size, counts)
    return [each.view(numbers.dtype) for each in torch.split(came, counts)]


def share(task: Task, data: Any) -> list[Any]:
    """Return the data of all ranks, as :func:`share_numbers` does.

    Args:
        task: the ranks' common one.
        data: what this rank tells, as JSON can hold it.
    """
    content = json.dumps(data).encode()
    words = content.ljust(-(-len(content) // _WORD_BYTES) * _WORD_BYTES)
    found = share_numbers(task, torch.frombuffer(bytearray(words), dtype=torch.int64))
    return [json.loads(each.numpy().tobytes()) for each in found]


class Difference(NamedTuple):
    """Settings that two ranks do not have alike.

    Attributes:
        ranks: the first one, and the first that differs from it.
        values: what each of them has, by the setting's name; "none" where it has no such setting.
    """

    ranks: tuple[int, int]
    values: Mapping[str, tuple[str, str]]

    def text(self, begin: str = "") -> str:
        """Return what the ranks have, each list of settings after the same words."""
        sides = [", ".join(f"{name} {both[side]}" for name, both in self.values.items()) for side in (0, 1)]
        return ", but ".join(f"{begin}{side} on rank {rank}" for side, rank in zip(sides, self.ranks, strict=True))


def difference_of(task: Task, settings: Mapping[str, str]) -> Difference | None:
    """Return how the settings of the ranks differ, if they do; in one round, and more if they do.

    Args:
        task: the ranks' common one.
        settings: of this rank, as text by name.
    """
    if len({*task.round(note=digest_of(settings)).notes}) == 1:
        return None
    first, *others = share(task, dict(settings))
    place, other = next((place, each) for place, each in enumerate(others, 1) if each != first)
    both = {name: (first.get(name, "none"), other.get(name, "none")) for name in {**first, **other}}
    values = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    return Difference((task.lane.ranks[0], task.lane.ranks[place]), values)
