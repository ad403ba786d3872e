"""Work beside the computation of a GPU: launched from a thread of its own, on a stream of its own.

There is a stream for each direction, since a bus carries both at once. Nothing waits but who asks for the result: the
stream waits for what was queued on the caller's before, and the one that takes the result waits for the stream.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

__all__ = ["Aside", "finish_threads", "used_here"]

T = TypeVar("T")
Direction = Literal["in", "out"]


class Aside(Generic[T]):
    """A function that runs beside the computation.

    Args:
        function: what to do; its kernels and copies go to the side stream.
        device: the GPU; on the CPU there are no streams, and the thread alone is beside.
        direction: to the GPU (``in``) or back (``out``): work in one direction is done in the order given.
        inputs: tensors that the function reads; they stay valid until it is done with them.
    """

    def __init__(
        self, function: Callable[[], T], device: torch.device, direction: Direction, inputs: Iterable[Tensor] = ()
    ) -> None:
        self._stream = _stream(device, direction) if device.type == "cuda" else None
        self._inputs = list(inputs)
        self._done: torch.cuda.Event | None = None
        self._future: Future[T] = _thread(direction).submit(functools.partial(self._run, function, self._ready(device)))

    def _ready(self, device: torch.device) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        return ready

    def _run(self, function: Callable[[], T], ready: torch.cuda.Event | None) -> T:
        if self._stream is None or ready is None:
            return function()
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            result = function()
            for tensor in self._inputs:
                if tensor.device.type == "cuda":
                    tensor.record_stream(self._stream)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        return result

    def wait(self) -> None:
        """Let torch's current stream, and the calling thread as far as it takes part, come after the function.

        Raises:
            Exception: what the function raised.
        """
        self._future.result()
        if self._done is not None:
            torch.cuda.current_stream(self._done_device()).wait_event(self._done)

    def result(self) -> T:
        """What the function returned, once :meth:`wait` has returned."""
        self.wait()
        return self._future.result()

    def done(self) -> bool:
        """Whether everything is done, on the GPU too."""
        return self._future.done() and (self._done is None or bool(self._done.query()))  # type: ignore[no-untyped-call]

    def _done_device(self) -> torch.device:
        assert self._stream is not None
        return torch.device(self._stream.device)


def used_here(tensors: Iterable[Tensor]) -> None:
    """Say that tensors made on another stream are used on the current one, so that their memory stays."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def finish_threads() -> None:
    """Return when the threads have nothing left to launch. What is queued on a GPU may still run."""
    for thread in list(_threads.values()):
        thread.submit(lambda: None).result()


_threads: dict[Direction, ThreadPoolExecutor] = {}
# A forked child does not have the threads.
os.register_at_fork(after_in_child=_threads.clear)


def _thread(direction: Direction) -> ThreadPoolExecutor:
    if direction not in _threads:
        _threads[direction] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"speedswap-{direction}")
    return _threads[direction]


@functools.cache
def _stream(device: torch.device, direction: Direction) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
