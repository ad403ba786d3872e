"""Pending transfers between two memories, which overlap with computation: the threads, and a GPU's streams.

On a GPU there is a stream per direction, since a bus carries both at once, and one for id lookups on the way in, so
that their answers do not wait for rows being transferred. The host waits only for results that it requests: a side
stream waits for work queued earlier on the caller's stream, and the stream that takes a result waits for the side
stream.

Between two places in host memory, the background thread of the CPU loops does its jobs in the order in which they are
queued, so a gather sees every scatter queued before it. It takes no Python lock and none of torch's threads."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from speedswap._process import EndingThread, in_child
from speedswap.kernels import _C
from speedswap.kernels.copies import round_rows
from speedswap.kernels.cuda.driver import Direction, index_of, side_stream
from speedswap.kernels.cuda.lookups import find_places
from speedswap.kernels.cuda.moves import by_launch, copy
from speedswap.kernels.host import as_ids, deferred_interrupts, get_num_threads
from speedswap.kernels.ids import find_all, order_of
from speedswap.kernels.records import Part, Records, Stored, WantedColumn, cpu_parts

T = TypeVar("T")
S = TypeVar("S")


def near(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the transfer."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Transfer(Generic[T]):
    """A pending transfer, in the background of host threads or of a GPU's computation.

    It is made first and given its work later, by :meth:`Transfers.add`, :func:`prefetch_on_cpu` or
    :func:`scatter_on_cpu`.

    Attributes:
        event: after the last of its work on a GPU; None until that is queued, and if there is none.
    """

    def __init__(self) -> None:
        self.transfers: Transfers | None = None  # those that it was added to
        self._work: _Entry[T] | _CpuWork[T] | None = None
        self.event: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def result(self) -> T:
        """Wait for the transfer: the calling thread for host work, torch's current stream for the rest.

        A transfer that was not started is started, with those that it was added to.

        Raises:
            Exception: the work's error.
        """
        if self.transfers is not None and not self.transfers.is_started:
            self.transfers.start()
        assert self._work is not None
        result = self._work.result()
        self.wait_here()
        return result

    def wait_here(self) -> None:
        """Make torch's current stream wait for all work on a GPU, which has been queued."""
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def is_queued(self) -> bool:
        """Return whether all its work on a GPU is queued, and its host work done."""
        return self._work is not None and self._work.done()

    def has_begun(self) -> bool:
        """Return whether it has begun, or never will."""
        is_started = self.transfers is None or self.transfers.is_started
        return not isinstance(self._work, _Entry) or not is_started or self._work.begun.is_set()

    def wait_until_begun(self) -> None:
        """Wait until it has begun, in a thread that it does not wait for, unless it never will."""
        if not self.has_begun():
            cast(_Entry[T], self._work).begun.wait()

    def result_so_far(self) -> T | None:
        """Return the result, if available, for work in the same direction, which is ordered after it in any case."""
        work = self._work
        return work.value if isinstance(work, _Entry) else None

    def done(self) -> bool:
        """Return whether everything is done, on the GPU too."""
        if self._work is None or not self._work.done():
            return False
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def has_arrived(self) -> bool:
        """Return whether everything is done, on the GPU too, without an error, which :meth:`result` raises."""
        try:
            if not self.done():
                return False
            assert self._work is not None
            self._work.result()
        except Exception:
            return False
        return True

    def queued_on(self, stream: torch.cuda.Stream) -> None:
        """Record that all work on a GPU is queued on this stream."""
        self._device, self.event = stream.device, stream.record_event()


@dataclass(eq=False)
class Lookup:
    """A batch's ids, checked and deduplicated when its transfer begins.

    Args:
        ids: int32 or int64, any shape, at least one, not modified afterwards.
        num_rows: ids must be 0 to num_rows - 1.
        device: the block's device.

    Attributes:
        found: the rows, ascending, and each id's index among them, both int64 on ``device``; None until they are found,
            or if an id is out of range. They may be found before.
    """

    ids: Tensor
    num_rows: int
    device: torch.device
    found: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class _Entry(Generic[T]):
    """An added transfer: the function that begins it, and its inputs; then its result or error."""

    transfer: Transfer[T]
    begin: Callable[[], Callable[[], T]]
    device: torch.device
    inputs: Sequence[Tensor]
    lookup: Lookup | None
    follows: bool
    waits: bool
    value: T | None = None

    def __post_init__(self) -> None:
        self._error: BaseException | None = None
        self._is_done = False
        self.begun = threading.Event()
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def finish(self, value: T | None, error: BaseException | None = None) -> None:
        """Keep the result or error, for those who wait for it, and nothing else."""
        self.value, self._error, self._is_done = value, error, True
        del self.transfer, self.begin, self.lookup, self.inputs
        self.begun.set()
        self._unfinished.release()

    def result(self) -> T:
        with self._unfinished:
            pass
        if self._error is None:
            return self.value  # type: ignore[return-value]
        try:
            raise self._error
        finally:
            del self  # its error's traceback holds this frame

    def done(self) -> bool:
        return self._is_done


class Transfers:
    """Transfers in one direction that run as one job per device, in the order in which they were added.

    Args:
        direction: to the device (``in``) or back (``out``).
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._waiting: deque[_Entry[Any]] = deque()
        self._common: dict[object, Any] = {}

    @property
    def is_started(self) -> bool:
        """True if no added transfer waits to be started."""
        return not (self._waiting or self._common)

    def common(self, key: object, make: Callable[[], S]) -> S:
        """Return the work shared by the transfers of one key; :meth:`start` starts it, after the others.

        Args:
            key: the work's key.
            make: creates it for the first of these transfers; its ``start`` is called without arguments.
        """
        if key not in self._common:
            self._common[key] = make()
        return cast(S, self._common[key])

    def add(
        self,
        transfer: Transfer[T],
        begin: Callable[[], Callable[[], T]],
        device: torch.device,
        *,
        inputs: Sequence[Tensor] = (),
        lookup: Lookup | None = None,
        follows: bool = True,
        waits: bool = True,
    ) -> None:
        """Add a transfer to those that :meth:`start` will start.

        Args:
            transfer: without work so far.
            begin: called on the stream for ids, once the lookup's rows are found; returns the function that transfers
                rows, which is called on the stream for rows once all transfers have begun.
            device: the GPU; on the CPU there are no streams, only the background thread.
            inputs: tensors that the functions read; they stay valid until those are done with them.
            lookup: ids whose rows are found first, for all transfers with one sort and one round trip. Where one is
                out of range the result is None, and ``begin`` is not called.
            follows: False if nothing queued on torch's current stream so far has to precede the transfer.
            waits: False if the host waits for no GPU in it, so that the caller's thread may queue it: always the same
                for transfers that must keep their order.
        """
        entry = _Entry(transfer, begin, device, inputs, lookup, follows, waits)
        transfer.transfers, transfer._work = self, entry
        self._waiting.append(entry)

    def start(self) -> None:
        """Start each added transfer once, after the work queued on torch's current stream if it follows that.

        If this raises or is interrupted, the next call, or :meth:`Transfer.result`, starts the remaining ones.
        """
        waiting: list[_Entry[Any]] = []
        try:
            with suppress(IndexError):
                # Another thread may start some of them at the same time; no interrupt comes between taking and keeping.
                waiting.extend(iter(self._waiting.popleft, None))
            for device, waits in {(entry.device, entry.waits): None for entry in waiting}:
                here = [entry for entry in waiting if entry.waits == waits and entry.device == device]
                current = torch.cuda.current_stream(device) if device.type == "cuda" else None
                ready = None if current is None else current.record_event()
                if waits or current is None:
                    _thread(self._direction).do(_run, here, device, self._direction, ready)
                    continue
                with deferred_interrupts(), torch.cuda.device(device):  # an interrupt is not the transfers' error
                    try:
                        _run(here, device, self._direction, ready)
                    finally:
                        torch.cuda.set_stream(current)
        except BaseException:
            self._waiting.extendleft(reversed(waiting))  # also those given to the thread, which runs them once
            raise
        while self._common:
            self._common.popitem()[1].start()


def _run(
    entries: Sequence[_Entry[Any]], device: torch.device, direction: Direction, ready: torch.cuda.Event | None
) -> None:
    """Run transfers on the streams of their direction: in its thread, or in the caller's if they do not wait."""
    entries = [entry for entry in entries if not entry.done()]  # an interrupted start is repeated
    ids_stream = rows_stream = None
    try:
        if ready is not None:
            index = index_of(device)
            rows_stream = side_stream(index, f"rows {direction}")
            ids_stream = side_stream(index, f"ids {direction}") if direction == "in" else rows_stream
            for tensor in [tensor for entry in entries for tensor in entry.inputs if tensor.is_cuda]:
                tensor.record_stream(ids_stream)
                if direction == "in":
                    tensor.record_stream(rows_stream)
            if any(entry.follows for entry in entries):
                ids_stream.wait_event(ready)
            torch.cuda.set_stream(ids_stream)  # and its GPU: nothing else uses the direction's thread
        with _range(f"swap {direction}"):
            with _range("ids"):
                for entry in entries:
                    if entry.lookup is not None and entry.lookup.found is not None:
                        used_here(entry.lookup.found)
                if lookups := [each.lookup for each in entries if each.lookup and each.lookup.found is None]:
                    near = [(lookup.ids.to(device, non_blocking=True), lookup.num_rows) for lookup in lookups]
                    for lookup, found in zip(lookups, find_all(near), strict=True):  # in one round trip
                        lookup.found = found
                # A lookup with an id out of range has no rows to move.
                moves = [entry.begin() if entry.lookup is None or entry.lookup.found else None for entry in entries]
            for entry in entries:
                entry.begun.set()
            if rows_stream is not None and ids_stream is not None and rows_stream is not ids_stream:
                rows_stream.wait_stream(ids_stream)
                torch.cuda.set_stream(rows_stream)
            for entry, move in zip(entries, moves, strict=True):
                result = None if move is None else move()
                if rows_stream is not None:
                    entry.transfer.queued_on(rows_stream)
                entry.finish(result)
    except BaseException as error:
        for entry in entries:
            if not entry.done():
                entry.finish(None, error)


_NO_RANGE = nullcontext()


def _range(name: str) -> AbstractContextManager[object]:
    """Name what a profile shows, which tells what overlaps the computation; without a profile that would take long."""
    return record_function(name) if profiler._is_profiler_enabled else _NO_RANGE


def used_here(tensors: Iterable[Tensor]) -> None:
    """Mark tensors made on another stream as used on the current one, so their memory is not reused."""
    here: torch.cuda.Stream | None = None
    for made in tensors:
        if made.is_cuda:
            if here is None or here.device != made.device:
                here = torch.cuda.current_stream(made.device)
            made.record_stream(here)
            if made.dtype is torch.int64 and (order := order_of(made)) is not None:
                order.record_stream(here)


class _DirectionThread(EndingThread):
    """The thread of a direction, which does one job after another."""

    def __init__(self, direction: Direction) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        super().__init__(self._work, name=f"{_NAME}{direction}", ask=lambda: self._jobs.put(None))
        self.start()

    def do(self, job: Callable[..., object], *arguments: Any) -> None:
        """Give it a job that does not raise.

        Raises:
            RuntimeError: Python is exiting.
        """
        if self._was_asked:
            raise RuntimeError("rows cannot be moved to or from a GPU ahead of their step while Python exits")
        self._jobs.put((job, arguments))

    def _work(self) -> None:
        _C.use_own_pool()  # for the CPU loops: a second OpenMP team, for this thread, would spin
        _C.allow_captures_elsewhere()
        while (work := self._jobs.get()) is not None:
            job, arguments = work
            job(*arguments)
            del work, job, arguments  # which would stay alive until the next job


_threads: dict[Direction, _DirectionThread] = {}
_NAME = "speedswap-"
in_child(_threads.clear)  # a child lacks the threads


@atexit.register
def finish_threads() -> None:
    """Wait until the threads have nothing left to launch. Queued GPU work may still run."""
    for thread in list(_threads.values()):
        done = threading.Lock()
        done.acquire()
        thread.do(done.release)
        with done:
            pass


def in_transfer_thread() -> bool:
    """Return whether this is one of the threads, which must not wait for their own work."""
    return threading.current_thread().name.startswith(_NAME)


def _thread(direction: Direction) -> _DirectionThread:
    thread = _threads.get(direction)
    if thread is None:
        made = _DirectionThread(direction)
        thread = _threads.setdefault(direction, made)
        if thread is not made:  # another caller's was first
            made.end()
    return thread


# Jobs that may still run, with what must stay alive until they are done. A dict, each of whose operations is atomic: a
# lock might be requested again by a finalizer that runs while it is held.
_running: dict[_C.Job, object] = {}
in_child(_running.clear)  # a child has none of them


class FoundBlocks(NamedTuple):
    """A batch's rows.

    Attributes:
        rows: the distinct ids, ascending; int64, shape (n,).
        local: int64, of the ids' shape; ``rows[local]`` are the ids.
        blocks: a block per wanted column, in order: shape (n, ...).
    """

    rows: Tensor
    local: Tensor
    blocks: list[Tensor]


class _CpuWork(Generic[T]):
    """A job of the background thread.

    Args:
        job: the thread's job.
        owners: objects to keep alive until it is done.
        finish: creates the result once it is done.
    """

    def __init__(self, job: _C.Job, owners: object, finish: Callable[[], T]) -> None:
        self._job = job
        self._finish = finish
        _drop_done()
        _running[job] = owners

    def result(self) -> T:
        self._job.wait(get_num_threads())
        return self._finish()

    def done(self) -> bool:
        return self._job.done()


def prefetch_on_cpu(
    transfer: Transfer[T],
    ids: Tensor,
    num_rows: int,
    moves: Sequence[tuple[Records, Sequence[WantedColumn]]],
    finish: Callable[[FoundBlocks], T],
) -> None:
    """Make the background thread look up ids: check and deduplicate them, and gather their rows.

    Args:
        transfer: is given the work; its result, once only, is that of ``finish``, or None if an id is out of range.
        ids: int32 or int64, any shape, at least one, on the CPU. They are copied.
        num_rows: ids must be 0 to num_rows - 1.
        moves: records in host memory, and the columns to gather.
        finish: makes the result of the rows found.
    """
    flat, shape = as_ids(ids), ids.shape
    job = _C.prefetch(
        flat.data_ptr(),
        flat.numel(),
        num_rows,
        [(records.pointer, records.stride, [(0, *column.form) for column in columns]) for records, columns in moves],
        _background_threads(),
    )

    def result() -> T:
        if job.outside >= 0:
            return None  # type: ignore[return-value]
        count, columns = job.distinct, [column for _, columns in moves for column in columns]
        rows, local, blocks = job.take()
        return finish(
            FoundBlocks(
                torch.frombuffer(rows, dtype=torch.int64, count=count),
                torch.frombuffer(local, dtype=torch.int64).view(shape),
                [_block(memory, count, column) for memory, column in zip(blocks, columns, strict=True)],
            )
        )

    transfer._work = _CpuWork(job, [records.owner for records, _ in moves], result)


def _block(memory: _C.Buffer, count: int, column: WantedColumn) -> Tensor:
    shape = (count, *column.row_shape)
    if not column.row_bytes:
        return torch.empty(shape, dtype=column.dtype)
    return torch.frombuffer(memory, dtype=column.dtype).view(shape)


def scatter_on_cpu(transfer: Transfer[None], ids: Tensor, moves: Sequence[tuple[Records, Sequence[Part]]]) -> None:
    """Make the background thread copy columns into records, as :func:`speedswap.kernels.scatter_records` does.

    Args:
        transfer: is given the work.
        ids: int32 or int64, shape (n,), on the CPU, already checked to be in range and unique.
        moves: records in host memory, and columns with blocks on the CPU. The blocks must not change meanwhile.
    """
    ids = as_ids(ids)
    job = _C.queue_scatter(
        ids.data_ptr(),
        len(ids),
        [(records.pointer, records.stride, cpu_parts(parts)) for records, parts in moves],
        _background_threads(),
    )
    transfer._work = _CpuWork(job, (ids, moves), lambda: None)


def finish_transfers() -> None:
    """Wait until every started transfer is done. Queued GPU work may still run."""
    _C.drain()
    finish_threads()
    _drop_done()


def _background_threads() -> int:
    # The computing threads need the cores more; a few are enough to keep the memory busy.
    return max(1, get_num_threads() // 4)


def _drop_done() -> None:
    for job in list(_running):
        if not job.done():
            return
        _running.pop(job, None)


# Queued scatters are done before the process exits; Python itself waits for its pools' threads.
atexit.register(_C.drain)


def forward(
    from_rows: Tensor,
    from_blocks: Sequence[Tensor],
    to_rows: Tensor,
    to_blocks: Sequence[Tensor],
    forms: Sequence[Stored | None] | None = None,
    places: Tensor | None = None,
) -> None:
    """Copy the rows that two batches share from the blocks of one into those of the other.

    They get the values that records would return if the first batch were scattered and the second gathered afterwards.

    Args:
        from_rows, to_rows: int64, ascending without duplicates, shapes (n,) and (m,), on the blocks' device.
        from_blocks: contiguous, shape (n, ...).
        to_blocks: contiguous, shape (m, ...), with the row shapes and dtypes of ``from_blocks``; gathered before.
        forms: how records hold each column (:class:`speedswap.kernels.Part`); not int8.
        places: the result of :func:`places_among` for the rows, if known.
    """
    forms = [None] * len(to_blocks) if forms is None else forms
    if not from_rows.shape[0] or not to_rows.shape[0]:
        return
    if to_rows.device.type == "cpu":
        targets = cpu_parts([Part(0, target, stored) for target, stored in zip(to_blocks, forms, strict=True)])
        columns = list(zip((source.data_ptr() for source in from_blocks), targets, strict=True))
        _C.forward(from_rows.data_ptr(), len(from_rows), to_rows.data_ptr(), len(to_rows), columns, get_num_threads())
        return
    # The number of shared rows is known only on the GPU, and stays there: other rows have place -1 and are skipped.
    places = places_among(from_rows, to_rows) if places is None else places
    device, count = to_rows.device, from_rows.shape[0]
    stream = torch.cuda.current_stream(device)
    widths: dict[int, list[tuple[int, Tensor]]] = {}
    for source, target in zip(from_blocks, to_blocks, strict=True):
        if target.nbytes:
            widths.setdefault(source.nbytes // count, []).append((source.data_ptr(), target))
    for width, pairs in widths.items():
        # One launch for all blocks of one width: to the kernel they are columns of the first, far apart.
        first, _ = pairs[0]
        held = Records(first, width, count, device, False, from_blocks)
        for some in by_launch(pairs):
            shifts, blocks = [address - first for address, _ in some], [target.data_ptr() for _, target in some]
            copy("gather", held, places, ((0, width),) * len(some), blocks, device.index, stream, shifts)
    for target, stored in zip(to_blocks, forms, strict=True):
        if stored is not None and target.nbytes:
            round_rows(target, to_rows, stored)  # gathered rows are rounded already and do not change


def places_among(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of each wanted row among others, or -1, without waiting on the host.

    Args:
        rows, wanted: int64, ascending without duplicates, shapes (n,) and (m,), n > 0, on one device.

    >>> places_among(torch.tensor([2, 5, 9]), torch.tensor([1, 5, 9]))
    tensor([-1,  1,  2])
    """
    if rows.is_cuda:
        return find_places(wanted, [rows])[0]
    places = torch.searchsorted(rows, wanted).clamp_(max=len(rows) - 1)
    return torch.where(rows[places] == wanted, places, -1)


def shared_places(rows: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a batch's rows with -1 for those of other batches; and :func:`places_among` each of these batches.

    Args:
        rows: int64, ascending without duplicates, shape (n,), on a GPU.
        others: the same, of at least one other batch.
    """
    rest = torch.empty_like(rows)
    return rest, find_places(rows, others, rest)
