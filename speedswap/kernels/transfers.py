"""Pending transfers, and the threads and streams that overlap GPU transfers with computation.

There is a stream per direction, since a bus carries both at once, and one for id lookups on the way in, so that their
answers do not wait for rows being transferred. The host waits only for results that it requests: a side stream waits
for work queued earlier on the caller's stream, and the stream that takes a result waits for the side stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from speedswap._forks import in_child
from speedswap.kernels import _C
from speedswap.kernels.cuda.modules import Direction, index_of, side_stream
from speedswap.kernels.ids import find_all, order_of

T = TypeVar("T")
S = TypeVar("S", bound="Starts")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """The task behind a transfer: a job of the CPU loops' thread, or a future of a direction's thread."""

    def result(self) -> T_co:
        """Wait for the result and return it, or raise the work's error."""

    def done(self) -> bool:
        """Return whether there is a result."""


class Starts(Protocol):
    """Work of several transfers."""

    def start(self) -> None:
        """Start the work."""


class Transfer(Generic[T]):
    """A pending transfer, in the background of host threads or of a GPU's computation.

    It is made first and given its work later, by :meth:`Transfers.add`, :func:`prefetch_on_cpu` or
    :func:`scatter_on_cpu`.
    """

    def __init__(self) -> None:
        self.transfers: Transfers | None = None  # those that it was added to
        self._work: Work[T] | None = None
        self._event: torch.cuda.Event | None = None  # after the last of its work on a GPU
        self._device: torch.device | None = None

    def give(self, work: Work[T]) -> None:
        """Set the transfer's work."""
        self._work = work

    def result(self) -> T:
        """Wait for the transfer: the calling thread for host work, torch's current stream for the rest.

        A transfer that was not started is started, with those that it was added to.

        Raises:
            Exception: the work's error.
        """
        if self.transfers is not None:
            self.transfers.start()
        assert self._work is not None
        result = self._work.result()
        self.wait_here()
        return result

    def wait_here(self) -> None:
        """Make torch's current stream wait for all work on a GPU, which has been queued."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def result_so_far(self) -> T | None:
        """Return the result, if available, for work in the same direction, which is ordered after it in any case."""
        work = self._work
        return work.result() if isinstance(work, Future) and work.done() and work.exception() is None else None

    def done(self) -> bool:
        """Return whether everything is done, on the GPU too."""
        if self._work is None or not self._work.done():
            return False
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def queued_on(self, stream: torch.cuda.Stream) -> None:
        """Record that all work on a GPU is queued on this stream."""
        self._device, self._event = stream.device, stream.record_event()


@dataclass(eq=False)
class Lookup:
    """A batch's ids, checked and deduplicated when its transfer begins.

    Args:
        ids: int32 or int64, any shape, at least one, not modified afterwards.
        num_rows: ids must be 0 to num_rows - 1.
        device: the block's device.

    Attributes:
        found: the rows, ascending, and each id's index among them, both int64 on ``device``; None until they are found,
            or if an id is out of range.
    """

    ids: Tensor
    num_rows: int
    device: torch.device
    found: tuple[Tensor, Tensor] | None = field(default=None, init=False)


class _Entry(NamedTuple, Generic[T]):
    """An added transfer: the function that begins it, and its inputs."""

    transfer: Transfer[T]
    begin: Callable[[], Callable[[], T]]
    device: torch.device
    inputs: list[Tensor]
    lookup: Lookup | None
    follows: bool
    work: Future[T]


class Transfers:
    """Transfers in one direction that run as one job per device, in the order in which they were added.

    Args:
        direction: to the device (``in``) or back (``out``).
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._waiting: deque[_Entry[Any]] = deque()
        self._common: dict[object, Starts] = {}

    def common(self, key: object, make: Callable[[], S]) -> S:
        """Return the work shared by the transfers of one key; :meth:`start` starts it, after the others.

        Args:
            key: the work's key.
            make: creates it for the first of these transfers.
        """
        if key not in self._common:
            self._common[key] = make()
        return self._common[key]  # type: ignore[return-value]

    def add(
        self,
        transfer: Transfer[T],
        begin: Callable[[], Callable[[], T]],
        device: torch.device,
        *,
        inputs: Iterable[Tensor] = (),
        lookup: Lookup | None = None,
        follows: bool = True,
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
        """
        entry = _Entry(transfer, begin, device, list(inputs), lookup, follows, Future())
        transfer.transfers = self
        transfer.give(entry.work)
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
            for device in dict.fromkeys(entry.device for entry in waiting):
                here = [entry for entry in waiting if entry.device == device]
                ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
                _thread(self._direction).submit(_run, here, device, self._direction, ready)
        except BaseException:
            self._waiting.extendleft(reversed(waiting))  # also those given to the thread, which runs them once
            raise
        while self._common:
            self._common.popitem()[1].start()


def _run(
    entries: Sequence[_Entry[Any]], device: torch.device, direction: Direction, ready: torch.cuda.Event | None
) -> None:
    """Run transfers in the thread of their direction, on its streams."""
    entries = [entry for entry in entries if not entry.work.done()]  # an interrupted start is repeated
    ids_stream = rows_stream = None
    try:
        if ready is not None:
            index = index_of(device)
            rows_stream = side_stream(index, f"rows {direction}")
            ids_stream = side_stream(index, f"ids {direction}") if direction == "in" else rows_stream
            for tensor in [tensor for entry in entries for tensor in entry.inputs if tensor.is_cuda]:
                tensor.record_stream(ids_stream)
                tensor.record_stream(rows_stream)
            if any(entry.follows for entry in entries):
                ids_stream.wait_event(ready)
        # A profile shows what overlaps the computation by the names of these ranges.
        with record_function(f"swap {direction}"):
            with _on(ids_stream), record_function("ids"):
                _find([entry.lookup for entry in entries if entry.lookup is not None], device)
                # A lookup with an id out of range has no rows to move.
                moves = [entry.begin() if entry.lookup is None or entry.lookup.found else None for entry in entries]
            if ids_stream is not None and rows_stream is not None:
                rows_stream.wait_stream(ids_stream)
            with _on(rows_stream):
                for entry, move in zip(entries, moves, strict=True):
                    result = None if move is None else move()
                    if rows_stream is not None:
                        entry.transfer.queued_on(rows_stream)
                    entry.work.set_result(result)
    except BaseException as error:
        for entry in entries:
            if not entry.work.done():
                entry.work.set_exception(error)


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    # torch.cuda.stream(None) would take an unused GPU into use, as would leaving a stream of one that is not current.
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _find(lookups: Sequence[Lookup], device: torch.device) -> None:
    """Find the rows of all lookups in one round trip."""
    near = [(lookup.ids.to(device, non_blocking=True), lookup.num_rows) for lookup in lookups]
    for lookup, found in zip(lookups, find_all(near), strict=True):
        lookup.found = found


def used_here(tensors: Iterable[Tensor]) -> None:
    """Mark tensors made on another stream as used on the current one, so that their memory stays."""
    for made in tensors:
        for tensor in (made, order_of(made)):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


_threads: dict[Direction, ThreadPoolExecutor] = {}
_NAME = "speedswap-"
in_child(_threads.clear)  # a child lacks the threads


def finish_threads() -> None:
    """Wait until the threads have nothing left to launch. Queued GPU work may still run."""
    for thread in list(_threads.values()):
        thread.submit(lambda: None).result()


def in_transfer_thread() -> bool:
    """Return whether this is one of the threads, which must not wait for their own work."""
    return threading.current_thread().name.startswith(_NAME)


def _thread(direction: Direction) -> ThreadPoolExecutor:
    if direction not in _threads:
        # With its own pool for the CPU loops: a second OpenMP team, for this thread, would spin.
        pool = ThreadPoolExecutor(1, f"{_NAME}{direction}", initializer=_C.use_own_pool)
        _threads.setdefault(direction, pool)  # another caller's, if that was first; it starts no thread before its work
    return _threads[direction]
