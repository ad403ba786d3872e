"""From the bytes of a few trials to those of any number of samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speedswap.batching.estimating.trial import Run

__all__ = ["Curve", "Passes", "curve", "passes"]

_TRIPLES = 3  # neighbouring trials that must agree on a square
_MOST = 0.9  # of the operations that two trials have in common, those that others must have too
_ALIKE = 2 / 3  # the least of what they say of it, to the most


@dataclass(frozen=True)
class Curve:
    """Bytes as a function of the number of samples, through two points; a line or a parabola."""

    size: int
    other_size: int
    nbytes: int
    per_sample: float
    per_square: float = 0.0

    def at(self, samples: int) -> int:
        per_sample = self.per_sample + self.per_square * (samples - self.other_size)
        return -int(-(self.nbytes + per_sample * (samples - self.size)) // 1)

    def rate(self, samples: int) -> float:
        """Bytes that one more sample takes there."""
        return self.per_sample + self.per_square * (2 * samples - self.size - self.other_size)


@dataclass(frozen=True)
class Passes:
    """The peak of a forward and backward pass.

    Attributes:
        sizes: numbers of samples that were tried.
        lines: for each neighbouring two of them, the bytes alive at each operation.
        beyond: the same from the largest of them on.
        holds: what is left of a pass while the next one runs: the loss, or the outputs.
    """

    sizes: tuple[int, ...]
    lines: tuple[tuple[Curve, ...], ...]
    beyond: tuple[Curve, ...]
    holds: Curve

    def held(self, samples: int) -> int:
        return max(0, self.holds.at(samples))

    def peak(self, samples: int) -> int:
        """Between two tried sizes another algorithm may begin at any size: the larger of both sides' lines."""
        if samples > self.sizes[-1]:
            return max(curve.at(samples) for curve in self.beyond)
        below = sum(size < samples for size in self.sizes)
        if samples in self.sizes:
            return max(line.at(samples) for line in self.lines[max(0, below - 1)])
        return max(line.at(samples) for lines in self.lines[max(0, below - 2) : max(below, 1)] for line in lines)


def passes(runs: Sequence[Run], at_start: int) -> Passes:
    """The peak for any number of samples.

    Args:
        runs: two or more, from few samples to many.
        at_start: bytes that are there when a pass begins.
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
    """Through the last two points, and bent as all points are, if they agree that it grows faster than a line.

    What grows with the square of the number of samples has the same second divided difference everywhere. A library
    that takes another algorithm from some size on bends a line once, and upwards or downwards.
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
    """One curve for each operation that the last two runs had in common, through as many runs as had them too."""
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
    """For each operation that all runs had, the bytes alive in each run, from there to the next such operation.

    Some operations run only for large tensors, such as the filling of memory with zeros. An operation that some runs
    had more often than others belongs to the one before it.
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
    """Those that no other one is above of, for any number of samples from ``least`` on."""
    kept: list[tuple[Curve, float, int]] = []
    ranked = [(one, one.rate(least), one.at(least)) for one in curves]
    for one, rate, nbytes in sorted(ranked, key=lambda found: (found[0].per_square, *found[1:]), reverse=True):
        if not any(other_rate >= rate and other_nbytes >= nbytes for _, other_rate, other_nbytes in kept):
            kept.append((one, rate, nbytes))
    return tuple(one for one, _, _ in kept)
