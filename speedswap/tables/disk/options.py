"""The settings of a table on disk: its cache, and when it commits."""

from __future__ import annotations

import math
import numbers
import weakref
from dataclasses import dataclass
from typing import Protocol

from speedswap._locks import Locked
from speedswap.tables.memory.host import available_bytes
from speedswap.tables.record import whole_number

__all__ = ["DiskOptions", "cache_bytes_for", "promise"]

_LEAST_CACHE_BYTES = 16 * 2**20
_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """The settings of :class:`speedswap.Disk`.

    Raises:
        ValueError: one is of another kind, or out of range.
    """

    cache_bytes: int | None = None
    commit_every: int | None = None
    commit_seconds: float | None = 30.0
    synchronous_commit: bool = False
    scratch: bool = False

    def __post_init__(self) -> None:
        if self.cache_bytes is not None:
            remedy = "give at least 1, a whole number of bytes, or None for a share of free memory"
            whole_number("cache_bytes", self.cache_bytes, 1, remedy=remedy)
        if self.commit_every is not None:
            remedy = "give at least 1 step, a whole number, or None to go by time alone"
            whole_number("commit_every", self.commit_every, 1, remedy=remedy)
        if self.commit_seconds is not None and not _is_duration(self.commit_seconds):
            raise ValueError(
                f"commit_seconds is {self.commit_seconds!r}; give a number, 0 or more, or None to go by steps alone"
            )
        for name in ("synchronous_commit", "scratch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give True or False")


def _is_duration(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


class _Cached(Protocol):
    @property
    def cache_bytes(self) -> int: ...


_open: weakref.WeakSet[_Cached] = weakref.WeakSet()
_promises = Locked()  # the threads that count what these hold, or add to them


def cache_bytes_for(table_bytes: int, asked: int | None) -> int:
    """Return the bytes of a new table's cache.

    Args:
        table_bytes: of all rows, more than which a cache never has.
        asked: by the user; by default a quarter of the memory that is free and not promised to other tables' caches,
            or 16 MiB.
    """
    if asked is None:
        with _promises.lock:
            promised = sum(each.cache_bytes for each in _open)
        asked = max((available_bytes() - promised) // _SHARE, _LEAST_CACHE_BYTES)
    return min(asked, table_bytes)


def promise(store: _Cached) -> None:
    """Count a store's cache among the promised memory, as long as the store is there."""
    with _promises.lock:
        _open.add(store)
