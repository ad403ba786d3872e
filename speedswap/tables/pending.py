"""Pending transfers of a store: their order, and the rows forwarded between them.

A prefetch may read rows that a write changes at the same time or later. So every write that may not have arrived when
the prefetch began is forwarded to it: the rows they share are copied from the written block to the gathered one. The
result is bitwise equal to the store's rows.

A GPU's write to host memory leaves out the rows of the next batch, which its step will write again. It has not arrived
until that step's write is queued. If another write comes first, or anything waits for this one, those rows are written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import Transfer, Transfers
from speedswap.tables.record import Block
from speedswap.tables.store import Found, Prefetched

LEAST_BYTES = 4 << 20  # of a write that leaves rows out: finding them takes time as well
# Adds a transfer that scatters the rows that a function returns by then, and skips -1; and whether that may wait.
Queue = Callable[[Transfer[None], Transfers, Callable[[], Tensor], bool], None]


class Gathered(NamedTuple):
    """The result of a prefetch.

    Attributes:
        found: the rows.
        expected: the block of the previous prefetch, if shared rows were left to its write.
        places: indices of the rows within the rows of some blocks.
    """

    found: Found
    expected: Block | None = None
    places: Sequence[tuple[Block, Tensor]] = ()

    def places_among(self, block: Block) -> Tensor | None:
        """Return each row's index within the rows of a written block, or None if unknown."""
        return next((places for other, places in self.places if other is block), None)


class PendingWrite(Transfer[None]):
    """A step's rows being written to the store.

    Args:
        block: the written lease; its rows are ascending.
        values: the columns' blocks, unchanged until they have arrived.
        forms: how the store converts the columns' values; None to store them unchanged.

    Attributes:
        device: of the values.
        is_replaced: True once another write has all rows that this one leaves out.
    """

    is_replaced = False

    def __init__(self, block: Block, values: Mapping[str, Tensor], forms: Mapping[str, kernels.Stored | None]) -> None:
        super().__init__()
        self.block = block
        self.rows = block.rows.to(torch.int64).contiguous()  # in the form that is forwarded
        self.values = values
        self.device = [*values.values(), self.rows][0].device
        self._made_on = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.forms = forms
        self._rows_made: torch.cuda.Event | None = None
        self._next: weakref.ref[Prefetch] | None = None  # whose step is to write the rows left out
        self._written: Tensor | None = None  # the rows, with -1 for those left out; None if none are
        self._queue: Queue
        self._rest: Transfer[None] | None = None  # the scatter of the rows left out

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values.values())

    # ------------------------------------------------------------------ rows left out

    def leave_rows_to(self, prefetch: Prefetch, queue: Queue) -> None:
        """Leave out the rows of a prefetch, whose step will write them; ``queue`` writes them if it does not."""
        self._next, self._queue = weakref.ref(prefetch), queue

    def rows_to_write(self, following: Prefetch | None) -> Tensor:
        """Return the rows, with -1 for those left out, for torch's current stream; wait until they are known.

        Args:
            following: the prefetch whose rows are left out.
        """
        if following is not None:
            following.wait_until_begun()
            if (others := following.rows_so_far()) is not None and others.device == self.rows.device:
                with suppress(torch.OutOfMemoryError):  # a model that barely fits trains as it would without
                    self._written = kernels.shared_places(self.rows, [others])[0]
        return self.rows if self._written is None else self._written

    def _rows_left_out(self) -> Tensor:
        if self._written is None:
            return torch.full_like(self.rows, -1)
        return self._written.neg_().add_(self.rows).sub_(1)  # -1 for the others, without taking memory

    def is_replaced_by(self, write: PendingWrite) -> bool:
        """Return whether a write has all rows left out, if there are any."""
        if self._next is None or self.is_replaced or self._rest is not None:
            return True
        prefetch = self._next()
        return prefetch is not None and prefetch.is_written_by(write) and write.has(self.values)

    def queue_rest(self, transfers: Transfers) -> None:
        """Write the rows left out after all."""
        rest = Transfer[None]()
        self._queue(rest, transfers, self._rows_left_out, not self.is_queued())
        self._rest = rest

    def has_arrived(self) -> bool:
        if not super().has_arrived():
            return False
        if self._rest is not None:
            return self._rest.has_arrived()
        return self._written is None or self.is_replaced

    def result(self) -> None:
        super().result()
        if self._written is not None and not self.is_replaced and self._rest is None:
            self.queue_rest(Transfers("out"))
        if self._rest is not None:
            self._rest.result()
            self.event = self._rest.event

    # ------------------------------------------------------------------ forwarding

    def note_rows_made(self) -> None:
        """Record that the rows are made by what torch's current stream has queued, and not by a prefetch."""
        if self.rows.is_cuda:
            self._rows_made = torch.cuda.current_stream(self.rows.device).record_event()

    def rows_here(self) -> Tensor:
        """Return the rows once torch's current stream may read them."""
        if self._rows_made is not None:
            torch.cuda.current_stream(self.rows.device).wait_event(self._rows_made)
        kernels.used_here([self.rows])
        return self.rows

    def has(self, columns: Mapping[str, object]) -> bool:
        """Return whether this writes all of the given columns, so a block of them needs no other source."""
        return columns.keys() <= self.values.keys()

    def forward(self, block: Block, places: Tensor | None = None) -> None:
        """Copy shared rows into a block; ``places`` are the indices of its rows within these, if known."""
        device = block.rows.device
        names = [name for name in block.columns if name in self.values]
        if self._made_on is not None and (here := torch.cuda.current_stream(self.device)) != self._made_on:
            here.wait_stream(self._made_on)
            kernels.used_here([self.rows, *self.values.values()])
        rows, values = self.rows.to(device), [self.values[name] for name in names]
        if device != self.device:
            values = [value.to(device) for value in values]
        targets, forms = [block.columns[name] for name in names], [self.forms[name] for name in names]
        kernels.forward(rows, values, block.rows, targets, forms, places)


class Prefetch(Transfer["Gathered | None"], Prefetched):
    """A gather ahead of its step; its result is None if an id is out of range.

    Args:
        pending: the store's transfers.
        writes: the writes that may arrive after the rows were read and so must be forwarded.
    """

    def __init__(self, pending: PendingTransfers, writes: Iterable[PendingWrite]) -> None:
        super().__init__()
        self.is_stale = False  # the store was changed since by something other than a step's write
        self.is_taken = False
        self.writes = list(writes)
        self._pending = pending
        self._taken: Block | None = None
        self._found: tuple[Tensor, torch.cuda.Event] | None = None

    def take(self) -> Found | None:
        was_taken, self.is_taken = self.is_taken, True
        if was_taken or self.is_stale:  # taken by an interrupted call; nothing is forwarded to it since
            return None
        result = self.result()
        writes, self.writes = self.writes, []
        if result is None:
            return None
        (block, local), expected, places = result
        kernels.used_here([local, block.rows, *block.columns.values(), *[each for _, each in places]])
        if expected is not None and not any(write.block is expected and write.has(block.columns) for write in writes):
            self._pending.steps_write_what_they_read = False
            return None
        for write in writes:
            write.forward(block, result.places_among(write.block))
        self._taken = block
        return block, local

    def block_so_far(self) -> Block | None:
        """Return the block, for a prefetch queued later on the same thread; None if there is no block."""
        result = self.result_so_far()
        return None if result is None else result.found[0]

    def has_made(self, block: Block) -> bool:
        """Return whether this has gathered a block, and found its rows on the stream for ids."""
        return self._taken is block

    def note_found(self, rows: Tensor) -> None:
        """Record the rows that torch's current stream has found."""
        if rows.is_cuda:
            self._found = rows, torch.cuda.current_stream(rows.device).record_event()

    def rows_so_far(self) -> Tensor | None:
        """Return the rows, for work on torch's current stream; None if no GPU has found them so far."""
        if self._found is None:
            return None
        rows, found = self._found
        torch.cuda.current_stream(rows.device).wait_event(found)
        kernels.used_here([rows])
        return rows

    def is_written_by(self, write: PendingWrite) -> bool:
        """Return whether a step has written every column of the taken block."""
        return self.has_made(write.block) and write.has(write.block.columns)


class PendingTransfers:
    """Transfers to and from one store that may still be running.

    Attributes:
        unfinished: writes that may not have arrived, in their order.
        prefetches: references to prefetches that may still read.
        steps_write_what_they_read: True if the last step wrote exactly the rows prefetched for it.
        drained: the event after the last write that was waited for, which is forwarded no longer: whatever reads ahead
            waits for it, as for all writes before; None if no GPU wrote it.
    """

    def __init__(self) -> None:
        self.steps_write_what_they_read = False
        self.drained: torch.cuda.Event | None = None
        self.unfinished: list[PendingWrite] = []
        self.prefetches: list[weakref.ref[Prefetch]] = []

    def writes(self) -> list[PendingWrite]:
        """Return the writes that may not have arrived, including failed ones until :meth:`drain` reports them."""
        # The newest first: had it arrived after an older one was still under way, that one would be forwarded over it.
        self.unfinished = [write for write in reversed(self.unfinished) if not write.has_arrived()][::-1]
        return list(self.unfinished)

    def settle_before(self, write: PendingWrite) -> None:
        """Wait for writes that left out rows which a new write does not have."""
        if not all(earlier.is_replaced_by(write) for earlier in self.unfinished):
            self.drain()

    def queue_write(self, write: PendingWrite, transfers: Transfers, queue: Queue, *, leaves_rows: bool) -> None:
        """Queue a GPU's write, after the rows that earlier ones left out and this one does not have.

        Args:
            write: the write.
            transfers: are given it.
            queue: adds a scatter of its rows.
            leaves_rows: True if it may leave rows to the next one.
        """
        for earlier in self.unfinished:
            if not earlier.is_replaced_by(write):
                earlier.queue_rest(transfers)
        following = self._next_to_write(write) if leaves_rows else None
        if following is not None:
            write.leave_rows_to(following, queue)
        waits = not all(earlier.is_queued() for earlier in self.unfinished)
        waits |= following is not None and not following.has_begun()
        queue(write, transfers, partial(write.rows_to_write, following), waits)

    def _next_to_write(self, write: PendingWrite) -> Prefetch | None:
        """Return the prefetch whose step will probably be the next to write, as a step's write is the one before."""
        if write.nbytes < LEAST_BYTES:
            return None
        alive = self._alive()
        taken = [prefetch for prefetch in alive if prefetch.is_taken]
        waiting = next((prefetch for prefetch in alive if not prefetch.is_taken), None)
        follows = taken != [] and taken[-1].is_written_by(write) and waiting is not None and not waiting.is_stale
        return waiting if follows else None

    def add_write(self, write: PendingWrite) -> None:
        """Add a step's write, which is forwarded to prefetches under way."""
        for earlier in self.unfinished:
            earlier.is_replaced |= earlier.is_replaced_by(write)
        self.unfinished = [*self.writes(), write]
        alive = self._alive()
        if not any(prefetch.has_made(write.block) for prefetch in alive):
            write.note_rows_made()
        for prefetch in alive:
            if prefetch.is_written_by(write):
                self.steps_write_what_they_read = True
            elif not prefetch.is_taken and not prefetch.is_stale:
                prefetch.writes.append(write)

    def add_prefetch(self, prefetch: Prefetch) -> None:
        """Add a prefetch, to which later writes must be forwarded."""
        self.prefetches = [*map(weakref.ref, self.not_taken()), weakref.ref(prefetch)]

    def not_taken(self) -> list[Prefetch]:
        """Return the prefetches whose steps are to come."""
        return [prefetch for prefetch in self._alive() if not prefetch.is_taken]

    def rows_expected(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that returns the rows of these prefetches that a GPU has found by then."""
        waiting = self.not_taken()
        return lambda: [rows for prefetch in waiting if (rows := prefetch.rows_so_far()) is not None]

    def _alive(self) -> list[Prefetch]:
        return [prefetch for reference in self.prefetches if (prefetch := reference()) is not None]

    def previous(self, transfers: Transfers) -> Prefetch | None:
        """Return the last prefetch on a GPU before these transfers, if its step will probably write its rows."""
        earlier = [reference() for reference in self.prefetches]
        earlier = [prefetch for prefetch in earlier if prefetch is None or prefetch.transfers is not transfers]
        last = earlier[-1] if earlier and self.steps_write_what_they_read else None
        return last if last is not None and last.transfers is not None and not last.is_taken else None

    def make_stale(self) -> None:
        """Mark every prefetch as stale, so its rows are read again."""
        for prefetch in self._alive() if self.prefetches else ():
            prefetch.is_stale = True

    def finish_prefetches(self) -> None:
        """Wait until no prefetch reads the memory."""
        if self.prefetches and any(not prefetch.is_taken for prefetch in self._alive()):
            kernels.finish_transfers()

    def drain(self) -> None:
        """Wait until every write has arrived, or make torch's current stream wait: then the caller may use the memory.

        Raises:
            Exception: the error of the first failed write.
        """
        failure: Exception | None = None
        while self.unfinished:
            try:
                self.unfinished[0].result()  # if interrupted, wait for it again
                self.drained = self.unfinished[0].event
            except Exception as error:
                failure = failure or error
            del self.unfinished[0]
        if failure is not None:
            raise failure


class Commit:
    """The end of a step: its writes to any number of tables start together, and then each table's store commits.

    A context manager. Leaving it, even with an exception, starts the transfers and commits the tables added so far.
    """

    def __init__(self) -> None:
        self._transfers: Transfers | None = None
        self._commits: list[Callable[[], None]] = []

    @property
    def transfers(self) -> Transfers:
        """Scatters that may still run during the next step."""
        if self._transfers is None:
            self._transfers = Transfers("out")
        return self._transfers

    def add(self, commit: Callable[[], None]) -> None:
        """Add the commit of a table that the step wrote."""
        self._commits.append(commit)

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if len(self._commits) == 1:  # the usual case
            try:
                if self._transfers is not None:
                    self._transfers.start()
            finally:
                self._commits[0]()
            return
        with ExitStack() as ended:  # each table commits, even if another raises
            for commit in reversed(self._commits):
                ended.callback(commit)
            if self._transfers is not None:
                self._transfers.start()
