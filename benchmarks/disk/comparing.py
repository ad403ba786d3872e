"""The stores compared: filled, read cold, trained in turn, killed and opened again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from disk.children import Child, Start, Steps
from disk.reads import RandomReads
from disk.stores import Contestant, Limits
from disk.workload import KINDS, Shape, Span

__all__ = ["Contest", "Turns"]

OURS = "speedswap"


class Turns(NamedTuple):
    """The lengths of the measurement.

    Attributes:
        windows: of each contestant and kind of ids, in turn.
        seconds: of a window, at least one step.
        run_in: seconds of steps before each window that do not count: what the one before has left to be written is
            written meanwhile.
        warm: seconds of such steps before the first window of a kind.
        reads: rows gathered cold, and random blocks read, in a window of that.
        overwritten: share of the rows that is written once more before the steps, so that our log is as full as in the
            long run.
        small: lookups of the steps whose pauses are measured; and their seconds, and those between their commits.
    """

    windows: int
    seconds: float
    run_in: float
    warm: float
    reads: int
    overwritten: float
    small: int
    pause_seconds: float
    pause_commits: float


class Contest:
    """The contestants' processes, from the making of their files to their removal. A context manager.

    Args:
        folder: for the files.
        shape, limits, turns: of everyone's table, memory and measurement.
        contestants: ours first.
        drop: all of the system's file caches before anything is opened.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        limits: Limits,
        turns: Turns,
        contestants: Sequence[Contestant],
        *,
        drop: bool,
    ) -> None:
        self._folder, self.shape, self.limits, self.turns = folder, shape, limits, turns
        self._contestants, self._drop = contestants, drop
        self._children: dict[str, Child] = {}
        self._spans: list[Span] = []
        self._stack = ExitStack()

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def open(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Fill and open everyone's rows, one after the other, and yield the seconds."""
        for one in self._contestants:
            self._children[one.name], seconds = self._started(one, self.limits)
            yield one.name, seconds

    def _started(self, one: Contestant, limits: Limits, **how: Any) -> tuple[Child, dict[str, float]]:
        folder = self._folder / one.name.replace(" ", "-")
        child = Child(Start(one, folder, self.shape, limits, torch.get_num_threads(), self._drop, **how))
        self._stack.callback(child.close)
        return child, child.open()

    @property
    def limited(self) -> str | None:
        """The reason that memory is not limited by cgroups; None if it is."""
        return next(iter(self._children.values())).limited

    def cold(self, reads: RandomReads) -> dict[str, Any]:
        """Gather rows that are in no cache, and read random blocks of the same file, in turn.

        Returns:
            ``rows_per_second`` and ``reads_per_second``: medians of the windows (the second is absent where there is no
            compiler), and all of these.
        """
        ours = self._children[OURS]
        log = max(
            (path for path in ours.start.folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        gathered, read = [], []
        for window in range(self.turns.windows + 2):
            some = reads.per_second(log, self.turns.reads, window)
            rows, seconds = ours.gather(window, self.turns.reads)
            if window:  # the first one wakes the threads
                read += [] if some is None else [some]
                gathered.append(rows / seconds)
        found: dict[str, Any] = {"rows_per_second": statistics.median(gathered), "rows_by_window": gathered}
        if reads.missing is None:
            found |= {"reads_per_second": statistics.median(read), "reads_by_window": read}
        return found

    def overwrite(self) -> dict[str, float]:
        """Overwrite a share of our rows."""
        steps = self._note(self._children[OURS].overwrite(self.turns.overwritten))
        return {"rows_per_second": steps.rows_per_second, "written_over_rows": self._written_over_rows([steps])}

    def train(self, kind: str) -> dict[str, Any]:
        """Train with ids of one kind, everyone in turn.

        Returns:
            ``stores``: by name the median ``rows_per_second`` of the windows, ``by_window``, and
            ``lookups_per_second``; ``times_faster``: ours than each other; ``written_over_rows``: the bytes that our
            process wrote over those of the rows of its steps; ``pause``: as :meth:`pauses`.
        """
        windows: dict[str, list[Steps]] = {name: [] for name in self._children}
        for window in range(self.turns.windows):
            for name, child in self._children.items():
                run_in = self.turns.run_in if window else self.turns.warm
                steps = child.steps(kind, seconds=self.turns.seconds, run_in=run_in)
                windows[name].append(self._note(steps) if name == OURS else steps)
        for child in self._children.values():
            child.check(self.shape.lookups)
        rates = {name: [steps.rows_per_second for steps in some] for name, some in windows.items()}
        medians = {name: statistics.median(some) for name, some in rates.items()}
        return {
            "stores": {
                name: {
                    "rows_per_second": medians[name],
                    "by_window": rates[name],
                    "steps": sum(len(steps.seconds) for steps in windows[name]),
                }
                for name in windows
            },
            "times_faster": {name: medians[OURS] / rate for name, rate in medians.items() if name != OURS},
            "written_over_rows": self._written_over_rows(windows[OURS]),
            "pause": pauses(windows[OURS]),
        }

    def disk_over_rows(self) -> float:
        """Return the bytes of our files over those of the rows, all of which were touched."""
        return self._children[OURS].figures()["disk"] / self.shape.nbytes

    def end_others(self) -> None:
        """End everyone's process but ours."""
        for name in [name for name in self._children if name != OURS]:
            self._children.pop(name).close()

    def kill(self) -> dict[str, Any]:
        """Kill our process in the middle of its steps, open the table again, and check rows of the last commit.

        Returns:
            ``seconds`` of the opening, and over 10 million rows; the ``step`` that it is the state of.
        """
        child = self._children.pop(OURS)
        done = self._spans[-1].last
        child.train_until_killed("uniform", self.turns.seconds)
        spans = (*self._spans, Span(done + 1, 2**31, "uniform", self.shape.lookups))
        limits = self.limits._replace(commit_seconds=self.turns.pause_commits)
        again, seconds = self._started(child.start.one, limits, fill=False, spans=spans)
        self._children[OURS] = again
        step = again.check(4 * self.shape.lookups)
        return {
            "seconds": seconds["open"],
            "seconds_per_10m_rows": seconds["open"] * 1e7 / self.shape.rows,
            "step": step,
        }

    def pauses(self) -> dict[str, Any]:
        """Train in small steps while commits follow one another, and return each kind's pauses, and the memory taken.

        A step's pause is its time beyond the median.
        """
        child, found = self._children[OURS], {}
        for kind in KINDS:
            steps = child.steps(
                kind, seconds=self.turns.pause_seconds, run_in=self.turns.run_in, lookups=self.turns.small
            )
            found[kind] = pauses([steps])
        child.check(self.shape.lookups)
        limits, shape = self.limits, self.shape
        allowed = limits.cache + 4 * shape.rows + 16 * (limits.cache // shape.row_bytes) + 2**26
        allowed += self._children[OURS].start.one.copies * self.turns.small * shape.row_bytes  # a step's blocks
        return {**found, "resident_bytes": child.figures()["resident"], "allowed_bytes": allowed}

    def _note(self, steps: Steps) -> Steps:
        self._spans.append(steps.span)
        return steps

    def _written_over_rows(self, windows: Sequence[Steps]) -> float:
        rows = sum(sum(steps.rows) for steps in windows)
        return sum(steps.written for steps in windows) / (rows * self.shape.row_bytes)


def pauses(windows: Sequence[Steps]) -> dict[str, float]:
    """Return the median step and the 99th percentile and the largest of the steps' seconds beyond it."""
    beyond = [took - statistics.median(steps.seconds) for steps in windows for took in steps.seconds]
    median = statistics.median(took for steps in windows for took in steps.seconds)
    return {
        "steps": len(beyond),
        "median": median,
        "p99": float(np.quantile(beyond, 0.99)),
        "largest": max(beyond),
    }
