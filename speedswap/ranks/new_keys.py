"""New keys of a training lookup, which their owners give places, and the ranks together rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import Task
from speedswap.errors import IdMapFullError
from speedswap.ranks.key_route import KeyRoute
from speedswap.ranks.owned_keys import OwnedKeys

__all__ = ["FULL", "NEW", "RENEWED", "NewKeys"]

NEW, RENEWED, FULL = 1, 2, 4


class NewKeys:
    """The keys that a rank is asked about in a training lookup, in its own part of some maps.

    Attributes:
        news: whether keys are new here, whether rows start anew, and whether there are too few.
    """

    def __init__(self, maps: Sequence[OwnedKeys], route: KeyRoute) -> None:
        self._maps = maps
        self._route = route
        self._undos = [kernels.IdMapUndo() for _ in maps]
        self._had = [each._map.cursor.used for each in maps]
        self._totals = [each._used for each in maps]
        self._places: list[Tensor] = []
        self.news = 0

    def add(self) -> None:
        """Give places in the own maps to the keys that are new: in all of them, or in none."""
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
        """Give rows to the keys that are new, in the order of ranks and of their batches; every rank calls this.

        A key's row is given by the rank that has it first: there its turn is known.
        """
        route, maps = self._route, self._maps
        first = torch.cat([_is_first(places, had) for places, had in zip(self._places, self._had, strict=True)])
        sizes = [len(places) for places in self._places]
        mine = route.before_ordering(route.bring(task, torch.split(first.to(torch.uint8), sizes))).bool()
        counts = torch.tensor([int(part.sum()) for part in route.by_part(mine)])
        size = len(task.lane.ranks)
        of_ranks = task.send(counts.repeat(size, 1), [1] * size, [1] * size)
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
        """Return the row of each key that this rank is asked about."""
        return [each._rows[places] for each, places in zip(self._maps, self._places, strict=True)]

    def renewed(self) -> list[Tensor]:
        """Return the rows of own keys that start anew, for each map."""
        renewed = []
        for each, had in zip(self._maps, self._had, strict=True):
            places = torch.cat([each._stale, each._renewed_since(each._map.cursor._replace(used=had))])
            renewed.append(each._rows[kernels.unique(places)[0]].long())
        return renewed

    def accept(self) -> None:
        """Let the batch have come."""
        self._undos = []
        for each, total in zip(self._maps, self._totals, strict=True):
            each._used = total
            each._stale = each._stale[:0]

    def take_back(self) -> None:
        """Let the batch not have come, unless it was accepted."""
        for each, undo in zip(self._maps, self._undos, strict=False):
            each._map.undo(undo)


def _is_first(places: Tensor, had: int) -> Tensor:
    """Return whether each key is the first that has its place, among the places after the first ``had``."""
    if not len(places):
        return torch.empty(0, dtype=torch.bool)
    highest = torch.cat([torch.tensor([had]), places.cummax(0).values[:-1]])
    return places > highest.clamp(min=had)


def _written(rows: Tensor, begin: int, values: Tensor) -> Tensor:
    """Return rows with values from a place on, in memory that grows by an eighth at least."""
    if begin + len(values) > len(rows):
        longer = torch.zeros(begin + len(values) + len(rows) // 8, dtype=rows.dtype)
        longer[:begin] = rows[:begin]
        rows = longer
    rows[begin : begin + len(values)] = values
    return rows
