"""Bytes alive during a pass: recorded at each operation of a few trials, and extrapolated to any number of samples."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import profile, record_function

__all__ = ["Curve", "Passes", "Run", "Timeline", "curve", "forward_done", "one_pass", "passes", "record"]

_MARK = "speedswap.memory: "
_BEGIN, _FORWARD_DONE, _END = (_MARK + name for name in ("begin", "forward done", "end"))

_TRIPLES = 3  # neighbouring trials that must agree on quadratic growth
_MOST = 0.9  # share of two trials' common operations that further trials must have too
_ALIKE = 2 / 3  # the least quadratic coefficient of those trials, relative to the greatest


# ---------------------------------------------------------------------- recording


@dataclass(frozen=True)
class Timeline:
    """Bytes alive during one pass, relative to when it began.

    Attributes:
        operations: names, in the order in which they began.
        peaks: the most bytes from the start of each operation to that of the next one.
        after_forward: between forward and backward.
        at_end: left at the end.
    """

    operations: tuple[str, ...]
    peaks: tuple[int, ...]
    after_forward: int
    at_end: int


@contextmanager
def one_pass() -> Iterator[None]:
    """Mark begin and end of one forward and backward pass that is recorded."""
    with record_function(_BEGIN):
        pass
    yield
    with record_function(_END):
        pass


def forward_done() -> None:
    """Mark the moment between forward and backward."""
    with record_function(_FORWARD_DONE):
        pass


def record(device_type: str, run: Callable[[], None], passes: int) -> list[Timeline]:
    """Call a function, and return the timelines of the passes that it marked.

    The profiler drops events at the edges of a session if its clocks disagree; then the function is called again.

    Args:
        device_type: of the watched memory: "cpu", "cuda", …
        run: called for each try.
        passes: number of passes that it marks.

    Raises:
        RuntimeError: the profiler gave no complete record in three tries.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once; else each session's begin and end are printed
    for _ in range(3):
        # torch.profiler's own class imports the compiler first: seconds, and 75 MiB.
        with profile(profile_memory=True) as session:
            run()
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


# ---------------------------------------------------------------------- extrapolation


@dataclass(frozen=True)
class Run:
    """Bytes of one forward and backward pass.

    Attributes:
        size: samples.
        inputs: of the samples themselves.
        gradients_before: of gradients that existed before the pass.
        gradients: of the parameters, after it.
        held: left of the pass beside gradients: its loss, or its outputs.
        timeline: bytes alive in it, above those before it.
    """

    size: int
    inputs: int
    gradients_before: int
    gradients: int
    held: int
    timeline: Timeline

    @property
    def activations(self) -> int:
        """Bytes kept from forward to backward."""
        return self.timeline.after_forward


@dataclass(frozen=True)
class Curve:
    """Bytes as a function of the number of samples, through two points; a line or a parabola."""

    size: int
    other_size: int
    nbytes: int
    per_sample: float
    per_square: float = 0.0

    def at(self, samples: int) -> int:
        """Return the bytes for a number of samples, rounded up."""
        per_sample = self.per_sample + self.per_square * (samples - self.other_size)
        return -int(-(self.nbytes + per_sample * (samples - self.size)) // 1)

    def rate(self, samples: int) -> float:
        """Return the bytes that one more sample takes there."""
        return self.per_sample + self.per_square * (2 * samples - self.size - self.other_size)


@dataclass(frozen=True)
class Passes:
    """The peak of a forward and backward pass.

    Attributes:
        sizes: numbers of samples that were tried.
        lines: for each neighbouring two of them, the bytes alive at each operation.
        beyond: the same from the largest of them on.
        holds: bytes left of a pass while the next one runs: the loss, or the outputs.
    """

    sizes: tuple[int, ...]
    lines: tuple[tuple[Curve, ...], ...]
    beyond: tuple[Curve, ...]
    holds: Curve

    def held(self, samples: int) -> int:
        """Return the bytes left of a pass while the next one runs."""
        return max(0, self.holds.at(samples))

    def peak(self, samples: int) -> int:
        """Return the peak; between two tried sizes the larger of both sides' lines, as libraries change algorithms."""
        if samples > self.sizes[-1]:
            return max(curve.at(samples) for curve in self.beyond)
        below = sum(size < samples for size in self.sizes)
        if samples in self.sizes:
            return max(line.at(samples) for line in self.lines[max(0, below - 1)])
        return max(line.at(samples) for lines in self.lines[max(0, below - 2) : max(below, 1)] for line in lines)


def passes(runs: Sequence[Run], at_start: int) -> Passes:
    """Return the peak for any number of samples.

    Args:
        runs: two or more, from few samples to many.
        at_start: bytes alive when a pass begins.
    """
    sizes = [run.size for run in runs]
    lines = [_of_operations(runs[: index + 2], at_start) for index in range(len(runs) - 1)]
    return Passes(
        tuple(sizes),
        tuple(_upper(one, least) for one, least in zip(lines, [1, *sizes[1:]], strict=False)),
        _upper(lines[-1], sizes[-1]),
        curve(sizes, [run.held for run in runs]),
    )


def curve(sizes: Sequence[int], nbytes: Sequence[int]) -> Curve:
    """Fit a curve through the last two points: a parabola where all points agree on faster growth than a line.

    Quadratic growth has the same second divided difference everywhere. A library that changes its algorithm at some
    size bends a line once, upwards or downwards.
    """
    slopes = [
        (later - earlier) / (size - before)
        for (before, earlier), (size, later) in itertools.pairwise(zip(sizes, nbytes, strict=True))
    ]
    bends = [
        (slopes[index + 1] - slopes[index]) / (sizes[index + 2] - sizes[index]) for index in range(len(slopes) - 1)
    ][-_TRIPLES:]
    square = bends[-1] if len(bends) > 1 and min(bends) > 0 and min(bends) >= _ALIKE * max(bends) else 0.0
    return Curve(sizes[-1], sizes[-2], nbytes[-1], max(0, slopes[-1]), square)


def _of_operations(runs: Sequence[Run], at_start: int) -> list[Curve]:
    """Return a curve for each operation common to the last two runs, through as many runs as share them."""
    rows = _rows(runs[-2:])
    used = 2
    for count in range(3, min(len(runs), _TRIPLES + 2) + 1):
        longer = _rows(runs[-count:])
        if len(longer) < _MOST * len(rows):
            break
        rows, used = longer, count
    sizes = [run.size for run in runs[-used:]]
    return [curve(sizes, [nbytes + at_start for nbytes in row]) for row in set(rows)]


def _rows(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    """Return, for each operation common to all runs, the bytes alive in each run until the next such operation.

    Some operations run only for large tensors, such as filling memory with zeros. An operation that some runs had more
    often than others counts with the one before it.
    """
    counts = [Counter(run.timeline.operations) for run in runs]
    common = {name for name, count in counts[-1].items() if all(one[name] == count for one in counts)}
    names: list[list[str]] = []
    peaks: list[list[int]] = []
    for run in runs:
        names.append([])
        peaks.append([0])
        for name, peak in zip(run.timeline.operations, run.timeline.peaks, strict=True):
            if name in common:
                names[-1].append(name)
                peaks[-1].append(peak)
            else:
                peaks[-1][-1] = max(peaks[-1][-1], peak)
    if any(one != names[-1] for one in names):
        return [tuple(max(run.timeline.peaks) for run in runs)]
    return list(zip(*peaks, strict=True))


def _upper(curves: Iterable[Curve], least: int) -> tuple[Curve, ...]:
    """Return the curves that no other one is above of, for any number of samples from ``least`` on."""
    kept: list[tuple[Curve, float, int]] = []
    ranked = [(one, one.rate(least), one.at(least)) for one in curves]
    for one, rate, nbytes in sorted(ranked, key=lambda found: (found[0].per_square, *found[1:]), reverse=True):
        if not any(other_rate >= rate and other_nbytes >= nbytes for _, other_rate, other_nbytes in kept):
            kept.append((one, rate, nbytes))
    return tuple(one for one, _, _ in kept)
