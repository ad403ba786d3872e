"""A cache of hot rows in GPU memory, in front of pinned records; the kernels are in csrc/hot.cuh.

A row is in a slot of the cache or at home, in its host record, and kernels that move rows look it up. Scatters count
rows; every few scatters an admission swaps rows that are scattered often for rows that no longer are. It changes where
rows are, not what they hold, so that every gather returns the same bits with and without a cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda import driver
from speedswap.kernels.cuda.driver import Fence, host_limit, index_of, launch_kernel, multiprocessors
from speedswap.kernels.cuda.pinning import PinnedMemory
from speedswap.kernels.cuda.shapes import THREADS_PER_BLOCK, BlockPart, grid_of, launch_shape
from speedswap.kernels.host import deferred_interrupts

MOST_SLOTS = 2**24 - 1
# Scatters between two admissions: at first few, until the cache may be full.
EVERY, EVERY_AT_FIRST = 64, 4
# Rows per admission: a sixteenth of the slots, so that about as many admissions fill the cache.
FIRST_ADMISSIONS = 16
LEAST_LIMIT = 32768

# As in csrc/hot.cuh, in numbers of 8 bytes.
_MOVED, _BINS, _COPIES = 8, 512, 32
_SCATTERED_MISSES, _SCATTERED_BYTES, _USED = 4, 5, _MOVED
_STATE = _MOVED + 15 + _BINS + _COPIES * _BINS
_ONE_SCATTER = 1 << 24


class HotCounts(NamedTuple):
    """Counts of a cache of hot rows since it was made.

    Attributes:
        slots: the rows that it has room for.
        gathered_hits: rows gathered from the cache.
        gathered_misses: rows gathered from the host's records.
        gathered_bytes: the bytes of those.
        scattered_hits: rows scattered to the cache.
        scattered_misses: rows scattered to the host's records.
        scattered_bytes: the bytes of those.
        admitted: records copied into the cache.
        evicted: records copied back from it to make room.
    """

    slots: int
    gathered_hits: int = 0
    gathered_misses: int = 0
    gathered_bytes: int = 0
    scattered_hits: int = 0
    scattered_misses: int = 0
    scattered_bytes: int = 0
    admitted: int = 0
    evicted: int = 0


class Home(NamedTuple):
    """The host's records of one group, which the cache is in front of, as in :class:`speedswap.kernels.Records`."""

    pointer: int
    stride: int
    num_rows: int
    fence: Fence | None


class HotRecords(NamedTuple):
    """A cache as the moves of one record group see it.

    Attributes:
        rows: the cache.
        arena: the slots of this group's records.
        counts: True in one of the groups, whose moves count the rows.
    """

    rows: HotRows
    arena: Tensor
    counts: bool

    def argument(self, row_bytes: int) -> tuple[int, int, int, int, int]:
        """Return the kernels' ``Hot``.

        Args:
            row_bytes: bytes of a row that cross the bus if it is at home; 0 in the second launch of a move and later.
        """
        words, state = self.rows.pointers
        return words, self.arena.data_ptr(), state, row_bytes, int(self.counts and row_bytes > 0)


class HotRows:
    """The cache of one table's hot rows on one GPU.

    Threads may move rows at the same time: each launches its moves within :meth:`turn`, and streams wait for one
    another by events. The host waits for nothing.

    Args:
        groups: the table's pinned record groups, which share the slots' numbers.
        slots: how many rows there is room for, 1 to the number of rows, at most :data:`MOST_SLOTS`.
        device: the GPU.

    Attributes:
        slots: how many rows there is room for.
        pointers: the addresses of the words and of the state.

    Raises:
        torch.OutOfMemoryError: the GPU has no room for it.
    """

    def __init__(self, groups: Sequence[Home], slots: int, device: torch.device) -> None:
        self.slots = slots
        self._device = torch.device("cuda", index_of(device))
        self._groups = groups
        self._limit = min(slots, max(LEAST_LIMIT, slots // FIRST_ADMISSIONS))
        with torch.inference_mode(False):
            self._words = torch.zeros(groups[0].num_rows, dtype=torch.int32, device=device)
            self._state = torch.zeros(_STATE, dtype=torch.int64, device=device)
            self._row_of = torch.empty(slots, dtype=torch.int64, device=device)
            self._plan = torch.empty(3, self._limit, dtype=torch.int64, device=device)
            self._arenas = [torch.empty(slots * each.stride, dtype=torch.uint8, device=device) for each in groups]
        self._seen = PinnedMemory(8 * _MOVED)
        self.pointers = self._words.data_ptr(), self._state.data_ptr()
        self._lock, self._in_place = threading.Lock(), threading.Lock()
        self._settled = torch.cuda.Event()  # type: ignore[no-untyped-call]  # after rows have last changed places
        self._seen_at = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ahead: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._waited: set[torch.cuda.Stream] = set()  # streams that need not wait for `settled`
        self._settled.record(torch.cuda.current_stream(device))
        self._until_admission, self._admissions = EVERY_AT_FIRST, 0
        self._holds_rows = self._is_ahead_of_home = False  # anything, and newer than the host's records
        self._counts = HotCounts(slots)

    def of_groups(self) -> list[HotRecords]:
        """Return the cache as each group's moves see it."""
        return [HotRecords(self, arena, number == 0) for number, arena in enumerate(self._arenas)]

    # ------------------------------------------------------------------ moves

    @contextmanager
    def turn(self, stream: torch.cuda.Stream, *, writes: bool, ahead: bool) -> Iterator[None]:
        """Surround the launch of a move on a stream: meanwhile no row changes places.

        Args:
            stream: where the move is queued.
            writes: True for a scatter.
            ahead: True for a gather that the fence does not know of.

        Raises:
            ValueError: the stream is of another GPU.
        """
        if stream.device != self._device:
            raise ValueError(
                f"hot_bytes was given for a table whose hot rows are on {self._device}, but rows move to or from "
                f"{stream.device}; train a table on one GPU, or leave hot_bytes out"
            )
        with self._lock:
            self._wait_until_settled(stream)
            self._is_ahead_of_home |= writes and self._holds_rows
            yield
            if ahead:
                self._ahead.setdefault(stream, torch.cuda.Event()).record(stream)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_place(self, stream: torch.cuda.Stream, ids: Tensor) -> Iterator[Tensor]:
        """Surround a scatter whose rows the host writes in part: meanwhile no row changes places.

        Args:
            stream: the scatter's, which is torch's current one; the host waits for it.
            ids: the rows: int64, shape (n,), n > 0, contiguous, on the GPU.

        Yields:
            The places in ``ids`` of the rows at home, ascending: int64, on the GPU.
        """
        with self._in_place:
            with self.turn(stream, writes=False, ahead=False):
                slots = self._words.index_select(0, ids).bitwise_and_(MOST_SLOTS)
            yield torch.nonzero(slots == 0).squeeze(1)

    def count_staged(self, stream: torch.cuda.Stream, ids: Tensor, row_bytes: int, *, counts: bool) -> None:
        """Count rows at home that no kernel scatters, as kernels count theirs.

        Args:
            stream: the scatter's, which is torch's current one.
            ids: the rows: int64, shape (n,), n > 0, unique, on the GPU.
            row_bytes: bytes of a row.
            counts: as in :class:`HotRecords`.
        """
        self._state[_SCATTERED_BYTES] += len(ids) * row_bytes
        if counts:
            self._state[_SCATTERED_MISSES] += len(ids)
            self._launch(stream, "hot_expect", len(ids), self.pointers[0], ids.data_ptr(), len(ids))

    def _wait_until_settled(self, stream: torch.cuda.Stream) -> None:
        if stream not in self._waited:
            stream.wait_event(self._settled)
            for tensor in (self._words, self._state, self._row_of, self._plan, *self._arenas):
                tensor.record_stream(stream)
            self._waited.add(stream)

    @contextmanager
    def _changing_places(self) -> Iterator[torch.cuda.Stream]:
        """Surround launches on torch's current stream that change where rows are, or copy rows home.

        They wait for every move queued before, and every move queued later waits for them.
        """
        stream = torch.cuda.current_stream(self._device)
        with deferred_interrupts(), self._in_place, self._lock:
            self._wait_until_settled(stream)
            for event in self._ahead.values():
                stream.wait_event(event)
            fences = [each.fence for each in self._groups if each.fence is not None]
            for fence in fences:
                fence.order(stream, writes=True)
            try:
                yield stream
            finally:
                self._settled.record(stream)
                self._waited = {stream}
                for fence in fences:
                    fence.queued(stream, writes=True)

    # ------------------------------------------------------------------ admissions

    def scattered(self, expected: Callable[[], Sequence[Tensor]] = tuple) -> None:
        """Admit rows, if it is time, after a scatter queued on torch's current stream.

        Args:
            expected: returns the rows of batches to come, for :meth:`admit`.
        """
        self._until_admission -= 1
        if self._until_admission > 0:
            return
        self._admissions += 1
        self._until_admission = EVERY_AT_FIRST if self._admissions < FIRST_ADMISSIONS else EVERY
        self.admit(expected())

    def admit(self, expected: Sequence[Tensor] = ()) -> None:
        """Swap hot rows at home for the least hot rows in slots, on torch's current stream.

        Args:
            expected: the rows of batches to come, which count as scattered: int64, unique, each shape (n,), on the GPU;
                the current stream waits for them.
        """
        num_rows, limit = len(self._words), self._limit
        (words, state), plan = self.pointers, self._plan.data_ptr()
        with self._changing_places() as stream:
            for rows in expected:
                rows.record_stream(stream)
                self._launch(stream, "hot_expect", len(rows), words, rows.data_ptr(), len(rows))
            self._launch(stream, "hot_count", num_rows, words, num_rows, state)
            launch_kernel(self._device, stream, "hot_choose", 1, _BINS, state, self.slots, limit)
            self._launch(stream, "hot_pick", num_rows, words, num_rows, state, plan, limit)
            self._swap(stream, [each.data_ptr() for each in self._plan], self._limit)
            self._holds_rows = True
            driver.copy(self._device.index, self._seen.pointer, state, 8 * _MOVED, driver.DEVICE_TO_HOST, stream)
            self._seen_at.record(stream)

    def _launch(self, stream: torch.cuda.Stream, name: str, threads: int, *arguments: int) -> None:
        if threads:
            grid = grid_of(threads, multiprocessors(index_of(self._device)))
            launch_kernel(self._device, stream, name, grid, THREADS_PER_BLOCK, *arguments)

    def _swap(self, stream: torch.cuda.Stream, plan: Sequence[int], count: int) -> None:
        """Queue ``hot_swap`` in each group.

        Args:
            stream: the stream.
            plan: the addresses of the lists of rows, slots and victims.
            count: the most slots concerned.
        """
        limit = host_limit(multiprocessors(index_of(self._device)))
        for number, (records, arena) in enumerate(zip(self._groups, self._arenas, strict=True)):
            whole = [BlockPart(0, records.stride, 0, 0)]
            shape = launch_shape(records.pointer, records.stride, count, whole, multiprocessors=limit, host=True)
            changes = plan[0] and number == len(self._arenas) - 1  # once the rows of all groups have moved
            launch_kernel(
                self._device, stream, f"hot_swap_w{shape.word_bytes}", shape.grid, shape.threads_per_block,
                records.pointer, records.stride // shape.word_bytes, arena.data_ptr(), self._state.data_ptr(), *plan,
                shape.lanes, self._words.data_ptr() if changes else 0, self._row_of.data_ptr(),
            )  # fmt: skip

    # ------------------------------------------------------------------ the host

    def bring_home(self, *, clear: bool) -> None:
        """Queue a copy of all rows in slots to the host's records, on torch's current stream.

        Args:
            clear: leave the slots empty, so that the host may write its records.
        """
        if not self._holds_rows or not (clear or self._is_ahead_of_home):
            return
        with self._changing_places() as stream:
            self._swap(stream, [0, 0, self._row_of.data_ptr()], self.slots)
            self._is_ahead_of_home = False
            if clear:
                self._words.bitwise_and_(-_ONE_SCATTER)
                self._state[_USED].zero_()
                self._holds_rows = False
                self._until_admission, self._admissions = EVERY_AT_FIRST, 0

    def counts(self) -> HotCounts:
        """Return the counts as of the last admission that has completed, without waiting."""
        with self._lock:
            if self._seen_at.query():  # type: ignore[no-untyped-call]
                self._counts = HotCounts(self.slots, *self._seen.bytes[: 8 * _MOVED].view(torch.int64).tolist())
            return self._counts
