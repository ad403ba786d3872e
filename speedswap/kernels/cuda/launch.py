"""Launch kernels on a stream, in order with what other streams do with the same memory."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import modules
from speedswap.kernels.cuda.shapes import THREADS_PER_BLOCK, grid_of

# For a move of host memory: enough to saturate the bus (an H100's takes 8), and few: what they have under way fills
# queues that the computation shares. At most a quarter of a GPU's, so that moves in both directions at once, at a high
# priority, leave half of them to the computation.
HOST_MULTIPROCESSORS = 16


@functools.cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def host_limit(multiprocessors: int, wanted: int = HOST_MULTIPROCESSORS) -> int:
    """Return how many of a GPU's multiprocessors a move of host memory takes, at least one.

    >>> [host_limit(132), host_limit(40), host_limit(2)]
    [16, 10, 1]
    """
    return max(1, min(wanted, multiprocessors // 4))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the kernels' names have it."""
    return str(dtype).removeprefix("torch.")


def fill(kind: str, into: Tensor, first_row: int, a: float, b: float, seed: int, column_key: int) -> None:
    """Queue a fill of consecutive rows on torch's current stream."""
    size, width = into.itemsize, into[0].numel()
    if into.data_ptr() % size:
        raise ValueError(f"rows at {into.data_ptr():#x} are not aligned to items of {size} bytes")
    launch_threads(
        f"fill_{kind}_f{8 * size}", into.device, len(into) * -(-width // (16 // size)), into.data_ptr(),
        into.stride(0) * size, first_row, len(into), width, float(a), float(b), seed, column_key,
    )  # fmt: skip


def launch_threads(name: str, device: torch.device, threads: int, *arguments: int | float | bytes) -> None:
    """Queue a kernel with this many threads, or fewer where the GPU has no room, on torch's current stream.

    Nothing is queued if there are none. ``arguments`` are as for :func:`launch_kernel`.
    """
    if threads:
        index = device.index
        grid, stream = grid_of(threads, multiprocessors(index)), torch._C._cuda_getCurrentRawStream(index)
        _C.launch(index, kernel_handle(index, name), grid, THREADS_PER_BLOCK, stream, arguments)


def launch_kernel(
    device: torch.device,
    stream: torch.cuda.Stream,
    name: str,
    grid: int,
    threads_per_block: int,
    *arguments: int | float | bytes,
) -> None:
    """Queue a kernel of ``csrc/rows.cuh``.

    Args:
        device: the GPU, with its number.
        stream: a stream of that GPU.
        name: the kernel's.
        grid, threads_per_block: the number of thread blocks, and of threads in each.
        arguments: the kernel's, in order: integers, floats for parameters of float64, and structures.
    """
    index = device.index
    _C.launch(index, kernel_handle(index, name), grid, threads_per_block, stream.cuda_stream, arguments)


@functools.cache
def kernel_handle(device: int, name: str) -> int:
    """Return the driver's handle of a kernel of ``csrc/rows.cuh`` on a GPU."""
    with modules.on_device(device):
        return int(modules.load().module.get_function(name).kernel.ptr)


class Fence:
    """Pending work of GPUs on memory, by stream.

    A stream waits for other streams' work that must precede its own; so does the host before it touches the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._writes: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._shared = False

    def queued(self, stream: torch.cuda.Stream, owner: object = None, *, writes: bool) -> None:
        """Record that the work queued last on a stream reads or writes the memory; a GPU's belongs to ``owner``."""
        with self._lock:
            events = self._writes if writes else self._reads
            if stream not in events:
                events[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                if isinstance(owner, Tensor) and owner.is_cuda:
                    owner.record_stream(stream)  # torch must not reuse memory that is freed before the work is done
            events[stream].record(stream)

    def share(self) -> None:
        """Mark the memory as shared: other work on it is not tracked."""
        self._shared = True

    def order(self, stream: torch.cuda.Stream, *, writes: bool, forwarded: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for other streams' queued writes, and before a write also for their reads.

        Args:
            stream: the stream about to read or write the memory.
            writes: True if it writes.
            forwarded: a stream whose writes need not be waited for: their rows are forwarded.
        """
        with self._lock:
            for events in (self._writes, self._reads) if writes else (self._writes,):
                for other, event in events.items():
                    if other not in (stream, forwarded):
                        stream.wait_event(event)

    def wait(self, *, reads: bool = True, forwarded: torch.cuda.Stream | None = None) -> None:
        """Wait for queued writes, and on request also for queued reads; ``forwarded`` as for :meth:`order`."""
        if self._shared and forwarded is None:
            modules.synchronize()
            return
        with self._lock:
            # A stream of torch is not equal to None, and != says that it is not unequal either.
            events = [event for other, event in self._writes.items() if forwarded is None or other != forwarded]
            events += self._reads.values() if reads else ()
        for event in events:
            event.synchronize()
