"""How many bytes are alive at each operation of a pass, by what torch's allocators tell its profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import profile, record_function

__all__ = ["Recorder", "Timeline", "record"]

_MARK = "speedswap.memory: "
_BEGIN, _FORWARD_DONE, _END = (_MARK + name for name in ("begin", "forward done", "end"))


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during one pass, relative to when it began.

    Attributes:
        operations: names, in the order in which they began.
        peaks: the most bytes from the beginning of each operation to that of the next one.
        after_forward: between forward and backward.
        at_end: left at the end.
    """

    operations: tuple[str, ...]
    peaks: tuple[int, ...]
    after_forward: int
    at_end: int


class Recorder:
    """Marks the passes to be recorded."""

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Around one forward and backward pass."""
        with record_function(_BEGIN):
            pass
        yield
        with record_function(_END):
            pass

    def forward_done(self) -> None:
        """To be called between forward and backward."""
        with record_function(_FORWARD_DONE):
            pass


def record(device_type: str, run: Callable[[Recorder], None], passes: int) -> list[Timeline]:
    """Run something, and return the timelines of the passes that it marked.

    The profiler drops events at the edges of a session if its clocks disagree; then the same is run once more.

    Args:
        device_type: of the memory that is watched: "cpu", "cuda", …
        run: called for each try.
        passes: how many it marks.

    Raises:
        RuntimeError: the profiler gave no complete record in three tries.
    """
    for _ in range(3):
        # torch.profiler's own class imports the compiler first: seconds, and 75 MiB.
        with profile(profile_memory=True) as session:
            run(Recorder())
        results: Any = session.kineto_results
        events = sorted(results.events(), key=lambda event: event.start_ns())
        timelines = _timelines(events, device_type.upper())
        if len(timelines) == passes:
            return timelines
    raise RuntimeError(
        f"torch.profiler recorded {len(timelines)} of {passes} passes; see whether another profiler is running"
    )


def _timelines(events: Sequence[Any], device_type: str) -> list[Timeline]:
    timelines = []
    recording = False
    for event in events:
        name = event.name()
        if name == _BEGIN:
            recording, level, forward_level, operations, peaks = True, 0, 0, [""], [0]
        elif not recording:
            continue
        elif name == "[memory]":
            if event.device_type().name == device_type:
                level += event.nbytes()
                peaks[-1] = max(peaks[-1], level)
        elif name == _FORWARD_DONE:
            forward_level = level
        elif name == _END:
            recording = False
            timelines.append(Timeline(tuple(operations), tuple(peaks), forward_level, level))
        else:
            operations.append(name)
            peaks.append(level)
    return timelines
