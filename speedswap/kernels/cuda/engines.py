"""Engines that move rows between host memory and a GPU.

zero_copy: a kernel reads or writes pinned memory directly, over the bus.
staged: CPU threads gather into pinned buffers, and the copy engine transfers those; for any host memory.

The first rows of a move use zero_copy, and at the same time the others are staged; in which shares, the records say.
Memory that is not pinned is always staged: the wanted columns of each record are packed in their stored form, cross the
bus in one copy for many rows, and a kernel splits them into the columns' blocks, converting them. A scatter reverses
this. A few buffers rotate: while the CPU fills one, the copy engine reads another, and the kernel splits a third. The
rotation is C++ (csrc/staging.cpp), without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import driver, moves
from speedswap.kernels.cuda.driver import HOST_MULTIPROCESSORS, Direction, index_of, side_stream
from speedswap.kernels.cuda.hot import HotRecords
from speedswap.kernels.cuda.pinning import PinnedMemory
from speedswap.kernels.host import get_num_threads
from speedswap.kernels.records import Part, Records, Shares, WantedColumns, What

_BUFFERS = 4
_BUFFER_BYTES = 8 << 20
# A smaller copy takes hardly less time.
_LEAST_BYTES = 1 << 19
_ALIGNMENT = 16

_log = logging.getLogger("speedswap")


class ByteRun(NamedTuple):
    """Contiguous bytes of a record: their offset, number, and offset when packed."""

    offset: int
    width: int
    packed: int


class Packing(NamedTuple):
    """The layout of packed records: bytes per record, the runs, and the columns' offsets."""

    stride: int
    runs: list[ByteRun]
    offsets: list[int]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Packing:
        """Pack columns. Each keeps its offset within 16 bytes, so that it can be moved in the same words."""
        runs: list[ByteRun] = []
        offsets = [0] * len(parts)
        end = 0
        for i in sorted(range(len(parts)), key=lambda i: parts[i].offset):
            offset, width = parts[i].offset, parts[i].width
            if runs and runs[-1].offset + runs[-1].width == offset:
                runs[-1] = runs[-1]._replace(width=runs[-1].width + width)
            else:
                runs.append(ByteRun(offset, width, _aligned(end) + offset % _ALIGNMENT))
            offsets[i] = runs[-1].packed + offset - runs[-1].offset
            end = runs[-1].packed + runs[-1].width
        return cls(_aligned(end), runs, offsets)


def rows_of(parts: Sequence[Part], rows: slice) -> list[Part]:
    """Return the parts of a slice of the rows."""
    return [part._replace(block=part.block[rows]) for part in parts]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _Buffer(NamedTuple):
    """Pinned memory, and the same amount on a GPU. Unpinned memory works as well, through the driver's buffers."""

    host: PinnedMemory
    near: Tensor


class Ring:
    """The buffers of one GPU in one direction, allocated at first use and owned by one move at a time.

    Args:
        device: the GPU's number.
        direction: ``in`` to the GPU, or ``out`` of it.
    """

    def __init__(self, device: int, direction: Direction) -> None:
        self._device = torch.device("cuda", device)
        self._copies = side_stream(device, f"copies {direction}")
        self._kernels = side_stream(device, f"kernels {direction}")
        # For ids, which wait for no copy in progress; a scatter leaves none. More than 8 streams would share a queue.
        self._asking = side_stream(device, "ids in") if direction == "in" else self._kernels
        self._turns = _C.StagingRing(device, self._copies.cuda_stream, self._kernels.cuda_stream)
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._ids: PinnedMemory | None = None
        self._places: PinnedMemory | None = None
        self._copied_places = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def gather(self, records: Records, ids: Tensor, parts: Sequence[Part], ready: torch.cuda.Event) -> None:
        """Fill blocks on the GPU with host records; torch's current stream waits for them.

        Args:
            records: the records in host memory, not written during the move.
            ids: int64, shape (n,), n > 0, contiguous, on the CPU or the GPU; negative ones skip a row.
            parts: columns with blocks on the GPU.
            ready: the event after which the blocks may be written, and the ids read.
        """
        with self._turn(ready):
            kept, places = self._not_negative(self._on_host(ids, ready))
            packed, launches = self._plan("gather", kept, parts, in_order=places is None)
            pointer = 0 if places is None else places.data_ptr()
            self._turns.gather(_source(records, kept), packed, pointer, launches, get_num_threads())
            self._done.record(self._kernels)
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def scatter(
        self,
        records: Records,
        ids: Tensor,
        parts: Sequence[Part],
        ready: torch.cuda.Event,
        places: Tensor | None = None,
    ) -> None:
        """Write blocks on the GPU to host records, and return when they are written.

        Args:
            records: the records in host memory; nothing else accesses the rows during the move.
            ids: int64, shape (n,), n > 0, contiguous, on the CPU or the GPU; negative ones skip a row.
            parts: columns with blocks on the GPU.
            ready: the event after which blocks, ids and places are valid.
            places: of the blocks' rows, int64, shape (n,), contiguous, on the GPU, if no id is negative; by default the
                first n rows.
        """
        with self._turn(ready):
            on_host, kept = self._not_negative(self._on_host(ids, ready))
            if kept is not None:
                ids, places = on_host, kept
            if any(part.stored is not None and part.stored.key is not None for part in parts):
                ids = ids.to(self._device)
            packed, launches = self._plan("scatter", on_host, parts, in_order=places is None)
            near = ids.data_ptr() if ids.is_cuda else 0, 0 if places is None else places.data_ptr()
            self._turns.scatter(_source(records, on_host), packed, *near, launches, get_num_threads())

    def _plan(
        self, what: What, ids: Tensor, parts: Sequence[Part], *, in_order: bool
    ) -> tuple[_C.Packed, list[_C.Launch]]:
        """Return the layout of packed records, and the launches between those of a buffer and the blocks.

        ``in_order`` means that the blocks' rows are consecutive, so that each turn's rows follow the previous turn's.
        """
        packing = Packing.of(parts)
        at_once = self._rows_at_once(len(ids), packing.stride)
        near = self._buffers[0].near  # the others are aligned alike, and rows of a block to a word that divides them
        packed = Records(near.data_ptr(), packing.stride, at_once, self._device, False, near)
        some = [part._replace(offset=offset) for offset, part in zip(packing.offsets, parts, strict=True)]
        launches: list[_C.Launch] = []
        for each in moves.plan(what, packed, at_once, some, driver.multiprocessors(near.device.index)):
            blocks = [(place, row_bytes if in_order else 0) for place, row_bytes in each.blocks()]
            launches.append(
                (driver.kernel_handle(self._device.index, each.kernel), each.grid, each.threads_per_block, each.stride,
                 each.columns, blocks, each.lanes)
            )  # fmt: skip
        return (packing.stride, packing.runs, at_once), launches

    def _not_negative(self, on_host: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the non-negative ids; and if some are negative, the remaining rows of the blocks, on the GPU."""
        if int(on_host.min()) >= 0:
            return on_host, None
        (kept,) = torch.nonzero(on_host >= 0, as_tuple=True)
        nbytes = 8 * len(kept)
        if self._places is None or self._places.nbytes < nbytes:
            self._places = PinnedMemory(2 * nbytes + 8)
        self._copied_places.synchronize()  # the previous move's
        self._places.bytes[:nbytes].view(torch.int64).copy_(kept)
        with torch.cuda.stream(self._kernels):
            near = torch.empty(len(kept), dtype=torch.int64, device=self._device)
        to, kind = near.data_ptr(), driver.HOST_TO_DEVICE
        driver.copy(self._device.index, to, self._places.pointer, nbytes, kind, self._kernels)
        self._copied_places.record(self._kernels)
        return on_host[kept], near

    def _on_host(self, ids: Tensor, ready: torch.cuda.Event) -> Tensor:
        if ids.device.type == "cpu":
            return ids
        if self._ids is None or self._ids.nbytes < ids.nbytes:
            self._ids = PinnedMemory(2 * ids.nbytes)
        self._asking.wait_event(ready)
        places = self._ids.pointer, ids.data_ptr()
        driver.copy(self._device.index, *places, ids.nbytes, driver.DEVICE_TO_HOST, self._asking)
        self._asking.synchronize()
        return self._ids.bytes[: ids.nbytes].view(ids.dtype)

    @contextlib.contextmanager
    def _turn(self, ready: torch.cuda.Event) -> Iterator[None]:
        with self._lock:
            self._kernels.wait_event(ready)
            try:
                yield
            except BaseException:
                # Interrupted between a copy and its event: the buffers must be idle before the next move.
                for stream in (self._asking, self._copies, self._kernels):
                    stream.synchronize()
                raise

    def _rows_at_once(self, num_rows: int, stride: int) -> int:
        if not self._buffers or self._buffers[0].host.nbytes < stride:
            self._renew(max(_BUFFER_BYTES, stride))
        # At least a few turns, even if one would do: the speed comes from their overlap.
        nbytes = min(self._buffers[0].host.nbytes, max(_LEAST_BYTES, num_rows * stride // _BUFFERS))
        return max(1, min(num_rows, nbytes // stride))

    def _renew(self, nbytes: int) -> None:
        self._copies.synchronize()
        self._kernels.synchronize()
        self._buffers = []  # if interrupted, the next move begins here
        # From the copies' stream: memory just freed by another stream may still be in use there.
        with torch.cuda.stream(self._copies):
            near = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
        buffers = [_Buffer(PinnedMemory(nbytes), each) for each in near]
        self._turns.use([(buffer.host.pointer, buffer.near.data_ptr()) for buffer in buffers])
        self._buffers = buffers


def _source(records: Records, ids: Tensor) -> _C.Source:
    return records.pointer, records.stride, ids.data_ptr(), len(ids)


@functools.cache
def ring(device: int, direction: Direction) -> Ring:
    """Return the ring of a GPU for one direction: one per process."""
    return Ring(device, direction)


def move(what: What, records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns between records and blocks if either is on a GPU; see :mod:`speedswap.kernels.copies`."""
    parts = [part for part in parts if part.block.nbytes]
    if not parts:
        return
    blocks_on = parts[0].block.device
    if records.device.type == "cpu":
        move_between(what, records.direct_share(what), records, ids, parts, blocks_on)
        return
    near = parts = _detached(parts)  # with blocks next to the records
    if blocks_on != torch.device("cuda", index_of(records.device)):
        copied = torch.empty_like if what == "gather" else Tensor.to
        near = [part._replace(block=copied(part.block, device=records.device)) for part in parts]
    ids, stream = ids.to(records.device, torch.int64).contiguous(), torch.cuda.current_stream(records.device)
    _move_by_kernel(what, records, ids, near, records.device, stream)
    if near is not parts and what == "gather":
        for part, source in zip(parts, near, strict=True):
            part.block.copy_(source.block)


def move_between(
    what: What, share: float, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device
) -> None:
    """Fill blocks on a GPU with host records, or write blocks back to them, on torch's current stream.

    What a scatter writes by a kernel is queued on that stream; staged rows are written when this returns.

    Args:
        what: the direction.
        share: the share of the rows that a kernel moves directly; for pageable records 0.
        records: in host memory.
        ids: integers, shape (n,), n > 0, on the CPU or the GPU; -1 skips a row; for a scatter the others are unique.
        parts: columns that are at least a byte wide, with blocks on the GPU.
        device: the GPU.
    """
    stream, count = torch.cuda.current_stream(device), ids.shape[0]
    direct = count if share == 1 else round(share * count)
    if direct == count:
        _move_by_kernel(what, records, ids.to(device, torch.int64).contiguous(), parts, device, stream)
        return
    ids, parts = ids.to(torch.int64).contiguous(), _detached(parts)
    if records.fence is not None:
        records.fence.wait(reads=what == "scatter", forwarded=_forwarded(records, device))
    if records.hot is not None:
        _scatter_past_cache(records, records.hot, share, ids.to(device), parts, stream)
        return
    # Staged rows wait for the work queued so far, not for the rows that go directly.
    ready = stream.record_event()
    if direct:
        _move_by_kernel(what, records, ids[:direct].to(device), rows_of(parts, slice(0, direct)), device, stream)
    with torch.cuda.device(device):  # otherwise what a ring allocates takes the current GPU into use
        staged = ring(index_of(device), "in" if what == "gather" else "out")
        turn = staged.gather if what == "gather" else staged.scatter
        turn(records, ids[direct:], rows_of(parts, slice(direct, count)), ready)


def _scatter_past_cache(
    records: Records, hot: HotRecords, share: float, ids: Tensor, parts: Sequence[Part], stream: torch.cuda.Stream
) -> None:
    """Write rows by a kernel to the cache, and some of those at home; the others are staged.

    Args:
        records: in host memory.
        hot: their cache.
        share: the share of the rows at home that the kernel writes.
        ids: on the GPU, as for :func:`move_between`.
        parts, stream: as for :func:`move_between`.
    """
    with hot.rows.in_place(stream, ids) as at_home:
        places = at_home[round(share * len(at_home)) :]
        staged = ids[places]
        ready = stream.record_event()
        direct = ids.index_fill(0, places, -1)
        _move_by_kernel("scatter", records, direct, parts, ids.device, stream)
        if len(staged):
            hot.rows.count_staged(stream, staged, sum(part.width for part in parts), counts=hot.counts)
            with torch.cuda.device(ids.device):
                ring(index_of(ids.device), "out").scatter(records, staged, parts, ready, places)


def _detached(parts: Sequence[Part]) -> list[Part]:
    return [part._replace(block=part.block.detach()) for part in parts]


def _move_by_kernel(
    what: What,
    records: Records,
    ids: Tensor,
    parts: Sequence[Part],
    device: torch.device,
    stream: torch.cuda.Stream,
) -> None:
    queue = functools.partial(moves.move, what, records, ids, parts, device, stream)
    _launch(records, what == "scatter", device, stream, queue)


def copy_by_kernel(what: What, records: Records, ids: Tensor, columns: WantedColumns, blocks: Sequence[Tensor]) -> bool:
    """Queue a move of columns that a single launch copies, on torch's current stream, as most steps' moves.

    Args:
        what: the direction.
        records: in the GPU's memory, or in host memory.
        ids: as for :func:`move_between`, of any integer dtype and strides.
        columns: the columns.
        blocks: of each, contiguous, in the order of ``columns``; all on one device.

    Returns:
        True if it is queued; False if it takes more than that, and nothing was done.
    """
    copied = columns.copied
    if not copied or not ids.shape[0]:
        return False
    device = blocks[0].device
    is_near = records.device == device or (records.device.type == "cpu" and records.direct_share(what) == 1)
    if device.type != "cuda" or not is_near:
        return False
    if ids.dtype is not torch.int64 or ids.device != device or not ids.is_contiguous():
        ids = ids.to(device, torch.int64).contiguous()
    stream = torch.cuda.current_stream(device)
    addresses = [block.data_ptr() for block in blocks]
    _launch(
        records, what == "scatter", device, stream,
        functools.partial(moves.copy, what, records, ids, copied, addresses, device.index, stream),
    )  # fmt: skip
    return True


def _launch(
    records: Records, writes: bool, device: torch.device, stream: torch.cuda.Stream, queue: Callable[[], None]
) -> None:
    """Queue kernels that read or write the records, in order with those of other streams."""
    if records.hot is None:
        _launch_in_order(records, writes, device, stream, queue)
        return
    with records.hot.rows.turn(stream, writes=writes, ahead=records.ahead):
        _launch_in_order(records, writes, device, stream, queue)


def _launch_in_order(
    records: Records, writes: bool, device: torch.device, stream: torch.cuda.Stream, queue: Callable[[], None]
) -> None:
    fence = records.fence
    if fence is not None:
        forwarded = _forwarded(records, device) if records.ahead else None
        fence.order(stream, writes=writes, forwarded=forwarded)
    queue()
    if fence is not None and not records.ahead:
        fence.queued(stream, records.owner, writes=writes)


def _forwarded(records: Records, device: torch.device) -> torch.cuda.Stream | None:
    return side_stream(index_of(device), "rows out") if records.ahead else None


# ---- the shares of the engines, by measurement -----------------------------------------------------------------------

# What bounds a kernel over host memory is not its bytes alone, but distinct pages too, and both directions together. So
# the ways are timed on a table's own rows, which stay as they are, once per process for tables of about one size and
# width.
_LEAST_TABLE_BYTES = 256 << 20  # smaller ones are found by a GPU's translation of addresses, and fast by kernels
_MOVED_BYTES = 64 << 20
_REPEATS = 3
_MULTIPROCESSORS = (HOST_MULTIPROCESSORS, 8, 4)  # with narrow rows fewer may do as well, or better in both directions
_GAIN = 1.1  # over kernels alone, which leave the processors free
_known: dict[tuple[int, int, int], Shares] = {}  # by GPU, bytes of a row, and the logarithm of the table's bytes


def best_shares(records: Records, device: torch.device) -> Shares:
    """Return the shares in which rows of records move fastest to a GPU, and back while others move to it.

    Args:
        records: in pinned memory; nothing else uses them meanwhile.
        device: the GPU.
    """
    nbytes = records.num_rows * records.stride
    if not records.pinned or nbytes < _LEAST_TABLE_BYTES:
        return Shares()
    key = index_of(device), records.stride, round(math.log2(nbytes))
    if key not in _known:
        try:
            # The device is waited for before and after each move: a fence would have them wait for each other.
            _known[key] = found = _measured(records._replace(fence=None), device)
        except torch.OutOfMemoryError:  # a model that fits barely trains as it would without
            return Shares()
        _log.info(
            "%d multiprocessors move %.0f%% of rows of %d bytes to %s, and %.0f%% back; the others are staged",
            found.multiprocessors, 100 * found.gather, records.stride, device, 100 * found.scatter,
        )  # fmt: skip
    return _known[key]


def _measured(records: Records, device: torch.device) -> Shares:
    count = max(1, min(records.num_rows, _MOVED_BYTES // records.stride))
    first, second = (_rows_among(records.num_rows, count, seed).to(device) for seed in range(2))
    block, other = (torch.empty(count, records.stride, dtype=torch.uint8, device=device) for _ in range(2))
    beside = side_stream(index_of(device), "rows in")

    def gather(shares: Shares) -> None:
        shared = records._replace(shares=shares)
        move_between("gather", shares.gather, shared, first, [Part(0, block)], device)

    def scatter(shares: Shares) -> None:
        shared = records._replace(shares=shares)
        with torch.cuda.stream(beside):  # as beside a step, with other rows
            move_between("gather", shares.gather, shared, second, [Part(0, other)], device)
        move_between("scatter", shares.scatter, shared, first, [Part(0, block)], device)

    gather(Shares())  # so that a scatter leaves the rows as they are
    by_kernels = (Shares(multiprocessors=most) for most in _MULTIPROCESSORS)
    kernels = min(by_kernels, key=lambda shares: _seconds(scatter, shares, device))
    gathered = _fastest(gather, lambda share: kernels._replace(gather=share), device)
    return _fastest(scatter, lambda share: gathered._replace(scatter=share), device)


def _rows_among(num_rows: int, count: int, seed: int) -> Tensor:
    """Return distinct rows, ascending, spread over a table at random."""
    step = num_rows // count
    own = torch.randint(step, (count,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return torch.arange(count, device="cpu") * step + own


def _fastest(move: Callable[[Shares], None], given: Callable[[float], Shares], device: torch.device) -> Shares:
    """Return the shares with which a move takes the least time: all, none, or such that both ways end together."""
    direct, staged = (_seconds(move, given(share), device) for share in (1.0, 0.0))
    balanced = round(staged / (direct + staged), 2)
    others = {0.0: staged, balanced: _seconds(move, given(balanced), device)}
    best = min(others, key=lambda share: others[share])
    return given(best if _GAIN * others[best] < direct else 1.0)


def _seconds(move: Callable[[Shares], None], shares: Shares, device: torch.device) -> float:
    took = []
    for _ in range(1 + _REPEATS):  # the first takes buffers
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        move(shares)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
