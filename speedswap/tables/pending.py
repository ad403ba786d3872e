"""The order of a store's pending transfers, and the rows that are forwarded between them.

A gather that runs ahead may read rows that a write changes at the same time or later. So every write that may not have
arrived when a gather began is forwarded to it: the rows that both have are copied from the written block to the
gathered one. The result is, bit for bit, what the store holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Transfer, Transfers
from speedswap.tables.record import Block
from speedswap.tables.store import Found, Prefetched


class Gathered(NamedTuple):
    """The result of a prefetch.

    Attributes:
        found: the rows.
        expected: the block of the prefetch before, if the rows that both have were left to its write.
        places: of the rows among those of some blocks.
    """

    found: Found
    expected: Block | None = None
    places: Sequence[tuple[Block, Tensor]] = ()

    def places_among(self, block: Block) -> Tensor | None:
        """Return each row's place among the rows of a block that is written, or None if it is not known."""
        return next((places for other, places in self.places if other is block), None)


class PendingWrite(Transfer[None]):
    """A step's rows on their way into the store.

    Args:
        block: the lease that is written; its rows are ascending.
        values: the columns' blocks, which nothing changes until they have arrived.
        forms: how the store holds the columns, and so what it makes of the values; None for as they are.
    """

    def __init__(self, block: Block, values: Mapping[str, Tensor], forms: Mapping[str, kernels.Stored | None]) -> None:
        super().__init__()
        self.block = block
        self.rows = block.rows.to(torch.int64).contiguous()  # as they are forwarded
        self._values = values
        self._forms = forms

    def has_arrived(self) -> bool:
        """Return whether the rows are in the store. A write that failed never is."""
        try:
            return self.done() and self.result() is None
        except Exception:
            return False

    def has(self, columns: Iterable[str]) -> bool:
        """Return whether all of these columns are written: a block without others can take its rows from here alone."""
        return all(name in self._values for name in columns)

    def forward(self, block: Block, places: Tensor | None = None) -> None:
        """Copy the rows that a block shares with these into it; ``places`` are its rows' among these, if known."""
        device = block.rows.device
        names = [name for name in block.columns if name in self._values]
        kernels.forward(
            self.rows.to(device),
            [self._values[name].to(device) for name in names],
            block.rows,
            [block.columns[name] for name in names],
            [self._forms[name] for name in names],
            places,
        )


class Prefetch(Transfer["Gathered | None"], Prefetched):
    """A gather that runs ahead of its step; its result is None if an id is out of range.

    Args:
        pending: the store's transfers.
        writes: those that may arrive after the rows were read, and have to be forwarded.
    """

    def __init__(self, pending: PendingTransfers, writes: Iterable[PendingWrite]) -> None:
        super().__init__()
        self.is_stale = False  # something other than a step's write has changed the store since
        self.is_taken = False
        self.writes = list(writes)
        self._pending = pending
        self._taken: Block | None = None

    def take(self) -> Found | None:
        was_taken, self.is_taken = self.is_taken, True
        if was_taken or self.is_stale:  # taken: by a call that was interrupted, and nothing is forwarded since
            return None
        result = self.result()
        writes, self.writes = self.writes, []
        if result is None:
            return None
        (block, local), expected, places = result
        kernels.used_here([local, block.rows, *block.columns.values(), *(each for _, each in places)])
        if expected is not None and not any(write.block is expected and write.has(block.columns) for write in writes):
            self._pending.steps_write_what_they_read = False
            return None
        for write in writes:
            write.forward(block, result.places_among(write.block))
        self._taken = block
        return block, local

    def block_so_far(self) -> Block | None:
        """Return the block, for a prefetch that was given to the same thread later; None where there are none."""
        result = self.result_so_far()
        return None if result is None else result.found[0]

    def is_written_by(self, write: PendingWrite) -> bool:
        """Return whether a step has written the block that was taken, in every column."""
        return self._taken is write.block and write.has(write.block.columns)


class PendingTransfers:
    """Transfers to and from one store that may not be done.

    Attributes:
        steps_write_what_they_read: whether steps write the very rows that were prefetched for them, as the last did.
    """

    def __init__(self) -> None:
        self.steps_write_what_they_read = False
        self._writes: list[PendingWrite] = []
        self._prefetches: list[weakref.ref[Prefetch]] = []

    @property
    def has_writes(self) -> bool:
        """True if there are writes that may not have arrived yet."""
        return bool(self._writes)

    def writes(self) -> list[PendingWrite]:
        """Return the writes that may not have arrived yet, and those that failed, until :meth:`drain` says so."""
        self._writes = [write for write in self._writes if not write.has_arrived()]
        return list(self._writes)

    def add_write(self, write: PendingWrite) -> None:
        """Add a step's write, which brings the rows of prefetches up to date."""
        self._writes = [*self.writes(), write]
        for prefetch in self._alive():
            if prefetch.is_written_by(write):
                self.steps_write_what_they_read = True
            elif not prefetch.is_taken and not prefetch.is_stale:
                prefetch.writes.append(write)

    def add_prefetch(self, prefetch: Prefetch) -> None:
        """Add a prefetch, which later writes have to be forwarded to."""
        waiting = [each for each in self._alive() if not each.is_taken]
        self._prefetches = [*map(weakref.ref, waiting), weakref.ref(prefetch)]

    def _alive(self) -> list[Prefetch]:
        return [prefetch for reference in self._prefetches if (prefetch := reference()) is not None]

    def previous(self, transfers: Transfers) -> Prefetch | None:
        """Return the last prefetch on a GPU before these transfers, if its step can be expected to write its rows."""
        earlier = [reference() for reference in self._prefetches]
        earlier = [prefetch for prefetch in earlier if prefetch is None or prefetch.transfers is not transfers]
        last = earlier[-1] if earlier and self.steps_write_what_they_read else None
        return last if last is not None and last.transfers is not None and not last.is_taken else None

    def make_stale(self) -> None:
        """Let the rows of every prefetch be asked for again."""
        for prefetch in self._alive() if self._prefetches else ():
            prefetch.is_stale = True

    def finish_prefetches(self) -> None:
        """Return when no prefetch reads the memory."""
        if self._prefetches and any(not prefetch.is_taken for prefetch in self._alive()):
            kernels.finish_transfers()

    def drain(self) -> None:
        """Return when every write has arrived: the caller may read and write the memory.

        Raises:
            Exception: what the first write that failed has raised.
        """
        failure: Exception | None = None
        while self._writes:
            try:
                self._writes[0].result()  # interrupted, it is waited for again
            except Exception as error:
                failure = failure or error
            del self._writes[0]
        if failure is not None:
            raise failure
