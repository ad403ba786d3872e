"""Memory on both sides of a bus, full of random bytes, and the moves between them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from machine import bandwidth
from machine.memories import KINDS
from speedswap import kernels
from speedswap.apps.bench.measure import synchronize
from speedswap.apps.errors import BenchmarkError, WrongResultError
from speedswap.kernels.cuda import pinning

__all__ = ["Batch", "Link", "Move"]

_RECORD_BYTES = 512  # of the records that fill the memory
_BATCHES = 3

Move = Callable[[int], object]
"""Queues work on torch's current stream, given the number of the call."""


class Batch:
    """Random rows of a table, ascending, and a block for them.

    Attributes:
        host, near: the rows, int64, shape (n,), in host memory and on the GPU.
        unsorted: the same rows in another order, on the GPU.
        block: uint8, shape (n, bytes of a row), on the GPU where there is one.
    """

    def __init__(self, host: Tensor, block: Tensor) -> None:
        self.host = host
        self.near = host.to(block.device)
        self.unsorted = self.near[torch.randperm(len(host), device=block.device)]
        self.block = block[: len(host)]

    @functools.cached_property
    def pieces(self) -> Batch:
        """The same bytes as rows of a power of two of bytes, which is what plain kernels take."""
        width = self.block.shape[1]
        piece = width & -width
        if piece == width:
            return self
        rows = self.host.unsqueeze(1) * (width // piece) + torch.arange(width // piece)
        return Batch(rows.view(-1), self.block.view(-1, piece))

    @functools.cached_property
    def mixed(self) -> Batch:
        """The unsorted rows as :attr:`pieces`."""
        return Batch(self.unsorted.cpu(), self.block).pieces


class Link:
    """A piece of host memory, pinned where there is a GPU, as the tables of every size.

    Args:
        nbytes: of the memory.
        device: ``cpu`` or ``cuda``.
        kind: of the memory where there is a GPU, one of :data:`machine.memories.KINDS`.

    Attributes:
        seconds: of faulting in, registering and filling it, by name.
        multiprocessors: of the GPU.

    Raises:
        BenchmarkError: the memory cannot be pinned.
    """

    def __init__(self, nbytes: int, device: str, kind: str = "registered") -> None:
        self.nbytes = nbytes // _RECORD_BYTES * _RECORD_BYTES
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.seconds: dict[str, float] = {}
        began = time.perf_counter()
        self._pinned = KINDS[kind](self.nbytes) if device == "cuda" else None
        if self._pinned is not None and self._pinned.failure is not None:
            raise BenchmarkError(f"{nbytes / 2**30:.1f} GiB could not be pinned: {self._pinned.failure}")
        if self._pinned is not None:
            self.bytes = self._pinned.bytes
        else:
            self.bytes = torch.frombuffer(pinning.anonymous(self.nbytes), dtype=torch.uint8)
        self.seconds["take"] = time.perf_counter() - began
        began = time.perf_counter()
        rows = self.bytes.view(torch.float32).view(-1, _RECORD_BYTES // 4)
        kernels.fill_uniform(rows, range(len(rows)), -1.0, 1.0, seed=1, column_key=1)
        self.seconds["fill"] = time.perf_counter() - began
        if device == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._streams = [torch.cuda.Stream(self.device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        synchronize()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self._pinned is not None:
            self._pinned.close()

    # ---- tables and batches -----------------------------------------------------------------------------------------

    def records(self, footprint: int, row_bytes: int) -> kernels.Records:
        """Return the first ``footprint`` bytes as a table of rows of ``row_bytes``."""
        pinned = self._pinned is not None
        return kernels.Records(
            self.bytes.data_ptr(), row_bytes, footprint // row_bytes, torch.device("cpu"), pinned, self.bytes
        )

    def matrix(self, footprint: int, row_bytes: int) -> Tensor:
        """Return the same as float32, shape (rows, row_bytes / 4)."""
        count = footprint // row_bytes
        return self.bytes[: count * row_bytes].view(torch.float32).view(count, row_bytes // 4)

    def batches(self, footprint: int, row_bytes: int, batch_bytes: int) -> list[Batch]:
        """Draw a few batches of rows; they share a block."""
        count, num_rows = batch_bytes // row_bytes, footprint // row_bytes
        if count > num_rows // 2:
            raise BenchmarkError(f"batch_bytes is {batch_bytes}, more than half of a table of {footprint}: give less")
        generator = torch.Generator().manual_seed(row_bytes)
        block = torch.randint(256, (count, row_bytes), dtype=torch.uint8, generator=generator).to(self.device)
        drawn = [torch.randint(num_rows, (count,), generator=generator) for _ in range(_BATCHES)]
        return [Batch(kernels.unique(ids)[0], block) for ids in drawn]

    # ---- moves ------------------------------------------------------------------------------------------------------

    def copies(self, way: str, nbytes: int) -> Move:
        """Make a contiguous copy by the copy engine: ``to_device``, ``from_device``, or ``within`` the GPU.

        Raises:
            WrongResultError: it copies other bytes.
        """

        def copy(to: Tensor, from_: Tensor) -> None:
            to.copy_(from_, non_blocking=True)

        if way != "within":
            return self._verified("the copy engine", way, copy, nbytes)
        near = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        other = torch.empty_like(near).copy_(self._piece(0, nbytes))
        return lambda call: copy(near, other)

    def kernel(self, way: str, nbytes: int, multiprocessors: int) -> Move:
        """Make the same copies over the bus with a plain kernel on at most ``multiprocessors`` multiprocessors."""

        def copy(to: Tensor, from_: Tensor) -> None:
            bandwidth.copy(to.data_ptr(), from_.data_ptr(), nbytes, self.device, multiprocessors)

        return self._verified("a plain kernel", way, copy, nbytes)

    def _verified(self, name: str, way: str, copy: Callable[[Tensor, Tensor], None], nbytes: int) -> Move:
        """Make copies of piece after piece of the memory, after verifying the first."""
        near = torch.randint(256, (nbytes,), dtype=torch.uint8, device=self.device)  # unlike any before

        def move(call: int) -> None:
            piece = self._piece(call, nbytes)
            copy(*((near, piece) if way == "to_device" else (piece, near)))

        expected = (self._piece(0, nbytes) if way == "to_device" else near.cpu()).clone()
        synchronize()
        move(0)
        synchronize()
        found = near.cpu() if way == "to_device" else self._piece(0, nbytes)
        if not torch.equal(found, expected):
            raise WrongResultError(f"{name} copied other bytes {way.replace('_', ' ')} than it was given")
        return move

    def _piece(self, call: int, nbytes: int) -> Tensor:
        """Return another piece of the memory for each call."""
        begin = call % (self.nbytes // nbytes) * nbytes
        return self.bytes[begin : begin + nbytes]

    # ---- timing -----------------------------------------------------------------------------------------------------

    def rate(self, nbytes: float, moves: Sequence[Move], repeats: int, in_a_row: int = 1) -> float:
        """Measure bytes per second of each of some moves that begin together, on a stream each.

        By the clock, from the first call until all is done: an engine's work on the CPU counts. The median, after every
        batch had its turn. Several small moves are queued ``in_a_row``: else their launch would be timed.
        """
        taken = []
        for turn in range(_BATCHES + repeats):
            synchronize()
            began = time.perf_counter()
            for call in range(turn * in_a_row, (turn + 1) * in_a_row):
                for stream, move in zip(self._streams, moves, strict=False):
                    with torch.cuda.stream(stream):
                        move(call)
            synchronize()
            taken.append((time.perf_counter() - began) / in_a_row)
        return nbytes / statistics.median(taken[_BATCHES:])

    def rate_in_threads(self, nbytes: float, moves: Sequence[Move], repeats: int, threads: ThreadPoolExecutor) -> float:
        """Measure as :meth:`rate`, with one thread per move."""

        def run(stream: torch.cuda.Stream, move: Move, call: int) -> None:
            with torch.cuda.stream(stream):
                move(call)
                stream.synchronize()

        taken = []
        for call in range(_BATCHES + repeats):
            synchronize()
            began = time.perf_counter()
            running = [
                threads.submit(run, stream, move, call) for stream, move in zip(self._streams, moves, strict=False)
            ]
            for each in running:
                each.result()
            taken.append(time.perf_counter() - began)
        return nbytes / statistics.median(taken[_BATCHES:])

    def memory_rates(self, nbytes: int, repeats: int) -> dict[str, float]:
        """Measure bytes per second that torch's threads read, write and copy.

        Raises:
            WrongResultError: they copy other bytes.
        """
        to = torch.empty(nbytes // 8, dtype=torch.int64)

        def piece(call: int) -> Tensor:
            return self._piece(call, nbytes)[: to.nbytes].view(torch.int64)

        moves: dict[str, Callable[[int], object]] = {
            "read": lambda call: torch.sum(piece(call)),
            "written": lambda call: to.fill_(call),
            "copied": lambda call: to.copy_(piece(call)),
        }
        taken: dict[str, list[float]] = {name: [] for name in moves}
        for call in range(_BATCHES + repeats):
            for name, move in moves.items():
                began = time.perf_counter()
                move(call)
                taken[name].append(time.perf_counter() - began)
            if call == 0 and not torch.equal(to, piece(0)):
                raise WrongResultError("torch copied other bytes than it was given")
        return {name: to.nbytes / statistics.median(times[_BATCHES:]) for name, times in taken.items()}

    def rate_on_host(
        self, move: Any, footprint: int, row_bytes: int, batch_bytes: int, threads: int, repeats: int
    ) -> float:
        """Measure bytes per second of a gather or scatter between the table and memory like the engines' buffers.

        Raises:
            WrongResultError: it moves other bytes.
        """
        records = self.records(footprint, row_bytes)
        count = batch_bytes // row_bytes
        generator = torch.Generator().manual_seed(threads)
        drawn = [torch.randint(records.num_rows, (count,), generator=generator) for _ in range(_BATCHES)]
        every = [kernels.unique(ids)[0] for ids in drawn]
        buffer = torch.randint(256, (count, row_bytes), dtype=torch.uint8)
        table = self.bytes[: records.num_rows * row_bytes].view(-1, row_bytes)
        taken = []
        before = kernels.get_num_threads()
        kernels.set_num_threads(threads)
        try:
            for call in range(_BATCHES + repeats):
                ids = every[call % _BATCHES]
                began = time.perf_counter()
                move(records, ids, [kernels.Part(0, buffer[: len(ids)])])
                taken.append((time.perf_counter() - began) / len(ids))
                if call == 0 and not torch.equal(table.index_select(0, ids), buffer[: len(ids)]):
                    raise WrongResultError(f"{threads} threads of the CPU moved other bytes than they should have")
        finally:
            kernels.set_num_threads(before)
        return row_bytes / statistics.median(taken[_BATCHES:])
