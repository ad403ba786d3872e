"""Rows held in the cache: prefetched from disk, or kept between a step's gather and its scatter.

A prefetch only loads rows into the cache; the step itself gathers them from there. So writes of earlier steps, which go
to the same cache, need not be forwarded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Lookup, Transfer, Transfers
from speedswap.tables.disk.cache import LogCache
from speedswap.tables.record import Block
from speedswap.tables.store import Found, Prefetched

_CPU = torch.device("cpu")


class HeldRows(NamedTuple):
    """A block's rows in the cache: their places, and the work that pins them there."""

    bringing: kernels.Bringing
    places: Tensor


class _Brought(NamedTuple):
    """A batch's rows, and the work that holds them in the cache; None if the cache had no room for them."""

    rows: Tensor
    local: Tensor
    held: HeldRows | None


class RowsAheadOfStep(Transfer["_Brought | None"], Prefetched):
    """Rows being read from disk for a later batch.

    Args:
        held: holds the rows once they have been taken.
        cache: the cache they are loaded into.
        device: the block's device.
    """

    def __init__(self, held: RowsHeld, cache: LogCache, device: torch.device) -> None:
        super().__init__()
        self.is_stale = False
        self._held = held
        self._cache = cache
        self._on = device

    def begin(self, lookup: Lookup) -> Callable[[], _Brought]:
        """Start to read the rows of a lookup; return the function that waits for them."""
        assert lookup.found is not None
        rows, local = lookup.found
        bringing = self._cache.bring_ahead(rows.to(_CPU))

        def finish() -> _Brought:
            # Rows without values get them here: others that bring them wait for that.
            held = None if bringing is None else HeldRows(bringing, self._cache.settled(bringing))
            return _Brought(rows, local, held)

        return finish

    def take(self) -> Found | None:
        if self.is_stale:
            return None
        self.is_stale = True  # from now on: it is taken once
        found = self.result()
        if found is None:
            return None
        kernels.used_here([found.local, found.rows])
        fields = self._cache.fields(tuple(self._cache.layout.columns))
        blocks = {
            name: kernels.empty((len(found.rows), *field.row_shape), field.dtype, self._on)
            for name, field in fields.items()
        }
        if found.held is None:
            self._cache.gather(found.rows.to(_CPU), fields, blocks)
        else:
            self._cache.gather_places(found.held.places, fields, blocks)
            self._held.keep(found.held)
        return Block(found.rows, blocks, found.held), found.local

    def abandon(self) -> None:
        """Release the rows; they must be requested again."""
        if not self.is_stale:
            self.is_stale = True
            with suppress(Exception):  # the next gather of these rows raises it again
                found = self.result()
                if found is not None and found.held is not None:
                    found.held.bringing.release()


class RowsHeld:
    """The rows of one store that later steps, and the step that gathered last, hold in its cache."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[RowsAheadOfStep]] = []
        self._last: HeldRows | None = None

    def keep(self, held: HeldRows) -> HeldRows:
        """Hold the rows that a step has gathered and will probably scatter; release those of the step before."""
        self.taken(None)
        self._last = held
        return held

    def taken(self, place: HeldRows | None) -> HeldRows | None:
        """Return a block's rows if they are still held, and stop holding any."""
        last, self._last = self._last, None
        if last is not None and last is not place:
            last.bringing.release()
        return last if last is place else None

    def add(self, cache: LogCache, lookup: Lookup, transfers: Transfers) -> RowsAheadOfStep:
        """Start loading a lookup's rows, with the other transfers of its batch."""
        prefetch = RowsAheadOfStep(self, cache, lookup.device)
        transfers.add(prefetch, lambda: prefetch.begin(lookup), lookup.device, inputs=[lookup.ids], lookup=lookup)
        self._waiting = [each for each in self._waiting if (other := each()) is not None and not other.is_stale]
        self._waiting.append(weakref.ref(prefetch))
        return prefetch

    def stop(self) -> None:
        """Wait until nothing uses the cache; every prefetch must be requested again."""
        self.taken(None)
        if any(each() is not None for each in self._waiting):
            kernels.finish_transfers()
        for each in self._waiting:
            prefetch = each()
            if prefetch is not None:
                prefetch.abandon()
        self._waiting = []
