"""Labelled values over time: snapshots of memory, or of anything else."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from speedswap.monitor.snapshots import MemorySnapshot, memory_snapshot
from speedswap.monitor.writers import as_plain, write_csv

__all__ = ["Entry", "History", "memory_history"]

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A value that was recorded.

    Attributes:
        label: what it was recorded as.
        seconds: when, since the history began.
        value: the value.
    """

    label: str
    seconds: float
    value: T


class History(Generic[T]):
    """Values with labels, in the order they were recorded.

    As a context manager it records ``"begin"`` and ``"end"``.

    Args:
        take: gives the value to record: a number, a mapping of names to numbers, or a dataclass.
        limit: how many entries are kept; the oldest go. None for all.

    Attributes:
        entries: what was recorded.

    >>> tasks = []
    >>> history = History(lambda: len(tasks))
    >>> _ = history.record("empty"); tasks += ["read", "write"]; _ = history.record("two more")
    >>> history.deltas()
    [('two more', {'value': 2})]
    """

    def __init__(self, take: Callable[[], T], *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1, or None for no limit")
        self._take = take
        self._limit = limit
        self._begin = time.perf_counter()
        self.entries: list[Entry[T]] = []

    def record(self, label: str) -> T:
        """Take a value, keep it under this label, and return it."""
        value = self._take()
        self.add(label, value)
        return value

    def add(self, label: str, value: T) -> None:
        """Keep a value that was taken elsewhere."""
        self.entries.append(Entry(label, time.perf_counter() - self._begin, value))
        if self._limit is not None:
            del self.entries[: max(0, len(self.entries) - self._limit)]

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Record before and after what is inside, also when that fails."""
        self.record(f"{label}: begin")
        try:
            yield
        finally:
            self.record(f"{label}: end")

    def __enter__(self) -> History[T]:
        self.record("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self.record("end")

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Entry[T]:
        return self.entries[index]

    def deltas(self) -> list[tuple[str, dict[str, float]]]:
        """For each entry but the first its label, and by how much its numbers differ from those of the one before."""
        changes = []
        for before, entry in zip(self.entries, self.entries[1:], strict=False):
            old, new = _numbers(before.value), _numbers(entry.value)
            changes.append((entry.label, {name: new[name] - old[name] for name in new if name in old}))
        return changes

    def between(self, first: str, last: str) -> dict[str, float]:
        """By how much the numbers changed from the newest entry of one label to the newest of another.

        Raises:
            KeyError: there is no such label.
        """
        newest = {entry.label: entry.value for entry in self.entries}
        for label in (first, last):
            if label not in newest:
                raise KeyError(f"no entry has the label {label!r}; there are {', '.join(newest) or 'none'}")
        old, new = _numbers(newest[first]), _numbers(newest[last])
        return {name: new[name] - old[name] for name in new if name in old}

    def rows(self) -> list[dict[str, Any]]:
        """The entries as flat dictionaries: label, seconds, and the value's fields."""
        return [
            {"label": entry.label, "seconds": entry.seconds, **as_plain(_fields(entry.value))} for entry in self.entries
        ]

    def to_json(self, path: str | Path) -> None:
        """Write the rows as a JSON list."""
        Path(path).write_text(json.dumps(self.rows(), indent=1) + "\n")

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV, with a header."""
        write_csv(path, self.rows())

    def __str__(self) -> str:
        if not self.entries:
            return "no entries"
        names = ["label", *(name for name in _fields(self.entries[0].value))]
        table = [names, *([entry.label, *map(_cell, _fields(entry.value).values())] for entry in self.entries)]
        widths = [max(len(row[column]) for row in table) for column in range(len(names))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        )


def memory_history(
    device: Any = None, *, synchronize: bool = True, limit: int | None = None
) -> History[MemorySnapshot]:
    """A history of a device's memory, as :func:`speedswap.monitor.memory_snapshot` takes it."""
    return History(lambda: memory_snapshot(device, synchronize=synchronize), limit=limit)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {"value": value}


def _numbers(value: Any) -> dict[str, float]:
    fields = as_plain(_fields(value))
    return {name: v for name, v in fields.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
