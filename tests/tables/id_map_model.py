"""The promises of an id map, in plain Python."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """There are not as many rows as keys that need one."""


@dataclass
class Row:
    key: Any
    last: int
    count: int


@dataclass
class Model:
    capacity: int
    admit_after: int
    evict: str | None
    rows: dict[int, Row] = field(default_factory=dict)
    places: dict[Any, int] = field(default_factory=dict)
    sightings: dict[Any, int] = field(default_factory=dict)  # of keys on probation, in the order in which they came
    clock: int = 0

    def lookup(self, keys: Sequence[Any]) -> list[int]:
        return [self.places.get(key, 0) for key in keys]

    def add(self, keys: Sequence[Any]) -> tuple[list[int], list[int]]:
        """Return each key's row, and the rows that were another key's; a full map raises and stays as it was."""
        before = copy.deepcopy(self.__dict__)
        try:
            return self._add(keys)
        except Full:
            self.__dict__.update(before)
            raise

    def _add(self, keys: Sequence[Any]) -> tuple[list[int], list[int]]:
        self.clock += 1
        renewed: list[int] = []
        for key in keys:
            if key in self.places:
                self._see(key)
        known = set(self.places)
        found = []
        for key in keys:
            if key not in self.places and self._is_admitted(key):
                row = self._free_row(renewed)
                self.places[key] = row
                self.rows[row] = Row(key, self.clock, 0)
            if key in self.places and key not in known:
                self._see(key)
            found.append(self.places.get(key, 0))
        return found, sorted(renewed)

    def _see(self, key: Any) -> None:
        row = self.rows[self.places[key]]
        row.last = self.clock
        row.count += 1

    def _is_admitted(self, key: Any) -> bool:
        if self.admit_after == 1:
            return True
        if key not in self.sightings:
            if len(self.sightings) == self.capacity:
                del self.sightings[next(iter(self.sightings))]
            self.sightings[key] = 0
        self.sightings[key] += 1
        if self.sightings[key] < self.admit_after:
            return False
        del self.sightings[key]
        return True

    def _free_row(self, renewed: list[int]) -> int:
        if len(self.rows) < self.capacity:
            return len(self.rows) + 1
        others = [(row.count if self.evict == "lfu" else 0, row.last, number) for number, row in self.rows.items()]
        others = [each for each in others if each[1] != self.clock]
        if self.evict is None or not others:
            raise Full
        number = min(others)[-1]
        del self.places[self.rows[number].key]
        renewed.append(number)
        return number
