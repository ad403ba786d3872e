"""A contestant in a separate process with its own memory limit, which trains on request."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disk.limits import MemoryGroup, disk_bytes, drop_caches, io_bytes, resident_bytes
from disk.stores import Contestant, Limits, OnDisk
from disk.workload import History, Shape, Span, draw, values
from speedswap.apps.errors import BenchmarkError, WrongResultError

__all__ = ["Child", "Runner", "Start", "Steps"]

_FILLED_BYTES = 2**25
_ENDS_IN_SECONDS = 60


class Start(NamedTuple):
    """A contestant's process as it begins.

    Attributes:
        one: the contestant.
        folder: of its files.
        shape: of its table.
        limits: of its memory.
        threads: torch's.
        drop: all file caches before the rows are opened, not only the caches of the contestant's files.
        fill: make the files first; else they are an earlier process's.
        spans: the steps that an earlier process has trained, as of the step that the table was opened at.
    """

    one: Contestant
    folder: Path
    shape: Shape
    limits: Limits
    threads: int
    drop: bool
    fill: bool = True
    spans: tuple[Span, ...] = ()


class Steps(NamedTuple):
    """Some training steps.

    Attributes:
        span: the steps, with those that did not count.
        rows: distinct rows of each.
        seconds: of each: gather, change, scatter, commit.
        written: bytes that the process wrote to the disk or into the file cache, until the last step's end.
    """

    span: Span
    rows: list[int]
    seconds: list[float]
    written: int

    @property
    def rows_per_second(self) -> float:
        return sum(self.rows) / sum(self.seconds)


class Child:
    """The parent's hold of a contestant's process. Every method waits for it.

    Attributes:
        limited: why its memory is not limited by a cgroup; None if it is.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        context = multiprocessing.get_context("spawn")  # nothing of this process's memory or threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, start), daemon=True)
        self._process.start()
        theirs.close()
        self.limited: str | None = None
        self._group: MemoryGroup | None = None
        self._memory = start.one.memory(start.shape, start.limits)
        try:
            self._group = MemoryGroup(f"speedswap-bench-{self._process.pid}", self._memory)
        except OSError as error:
            self.limited = f"{type(error).__name__}: {error}"

    def open(self) -> dict[str, float]:
        """Fill and open the rows; return the seconds of both, and as ``everything`` whether all caches were dropped."""
        found: dict[str, float] = self._ask("open", self._group)
        return found

    def steps(self, kind: str, *, seconds: float, run_in: float = 0.0, lookups: int | None = None) -> Steps:
        """Train for some seconds, at least one step, after some seconds that do not count.

        Every row is checked in a step that does not count; in others its first and last number.
        """
        found: Steps = self._ask("steps", kind, seconds, run_in, lookups)
        return found

    def overwrite(self, share: float) -> Steps:
        """Overwrite as many rows as this share of the table has, uniform ones, a step's at a time."""
        found: Steps = self._ask("overwrite", share)
        return found

    def gather(self, number: int, count: int) -> tuple[int, float]:
        """Gather the ``number``-th ``count`` rows of all in random order; return rows and seconds."""
        found: tuple[int, float] = self._ask("gather", number, count)
        return found

    def check(self, count: int) -> int:
        """Check ``count`` random rows, and return the last step that the table has seen."""
        found: int = self._ask("check", count)
        return found

    def figures(self) -> dict[str, int]:
        """Return bytes: the most ``resident`` beyond those before the rows were opened, and those on the ``disk``."""
        found: dict[str, int] = self._ask("figures")
        return found

    def train_until_killed(self, kind: str, seconds: float) -> None:
        """Let it train, and kill it in the middle of that."""
        self._connection.send(("steps", (kind, 3600.0, 0.0, None)))
        time.sleep(seconds)
        self._process.kill()
        self.close()

    def _ask(self, what: str, *args: Any) -> Any:
        try:
            self._connection.send((what, args))
            done, found = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_ENDS_IN_SECONDS)
            raise BenchmarkError(
                f"the process of {self.start.one.name} ended with status {self._process.exitcode} in {what!r}; -9 is "
                f"what the system does to one that needs more than its {self._memory / 2**20:.0f} MiB"
            ) from None
        if not done:
            raise found
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(_ENDS_IN_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._group is not None:
            self._group.close()


def _serve(connection: Connection, start: Start) -> None:
    torch.set_num_threads(start.threads)
    runner = Runner(start)
    try:
        while True:
            what, args = connection.recv()
            try:
                connection.send((True, getattr(runner, what)(*args)))
            except WrongResultError as error:
                connection.send((False, error))
            except Exception as error:
                traceback.print_exc()
                connection.send((False, BenchmarkError(f"{start.one.name}, {what}: {type(error).__name__}: {error}")))
    except EOFError:
        runner.close()


class Runner:
    """A contestant inside its process."""

    def __init__(self, start: Start) -> None:
        self._start, self._name, shape = start, start.one.name, start.shape
        self._history = History(shape)
        self._step = 0
        self._store: OnDisk | None = None
        # Touched before memory is limited or counted: it is not the store's.
        self._gathered, self._values = (torch.zeros(shape.lookups, shape.dim) for _ in range(2))
        self._before = self._peak = 0

    def open(self, group: MemoryGroup | None) -> dict[str, float]:
        start = self._start
        begin = time.perf_counter()
        if start.fill:
            start.folder.mkdir()
            start.one.make.fill(start.folder, start.shape, _blocks(start.shape))
        filled = time.perf_counter()
        dropped = drop_caches((path for path in start.folder.rglob("*") if path.is_file()), everything=start.drop)
        self._rehearse()
        if group is not None:
            group.enter()
        self._before = resident_bytes()
        opening = time.perf_counter()
        self._store = start.one.make(start.folder, start.shape, start.limits)
        opened = time.perf_counter()
        if not start.fill:
            self._step = int(self._store.table.attributes["step"])  # type: ignore[attr-defined]  # only ours is reopened
            self._history.replay(start.spans, self._step)
        return {"fill": filled - begin, "open": opened - opening, "everything": dropped}

    def _rehearse(self) -> None:
        """Do a step's work around the store's once, so that its memory is not taken for the store's."""
        rows = draw(self._start.shape, 1, "uniform")
        found = values(rows, torch.tensor(0), self._gathered)
        self._history.last.zero_()
        self._history.check(self._name, rows, found)

    def steps(self, kind: str, seconds: float, run_in: float, lookups: int | None) -> Steps:
        shape = self._start.shape if lookups is None else self._start.shape._replace(lookups=lookups)
        first, until = self._step + 1, time.perf_counter() + run_in
        while time.perf_counter() < until:
            self._train(shape, kind, thorough=True)
        before = io_bytes()
        rows, laps = [], []
        while sum(laps) < seconds:
            count, took = self._train(shape, kind, thorough=False)
            rows.append(count)
            laps.append(took)
        return Steps(Span(first, self._step, kind, shape.lookups), rows, laps, io_bytes() - before)

    def _train(self, shape: Shape, kind: str, *, thorough: bool) -> tuple[int, float]:
        """Gather a step's rows, change and scatter them; return their number and the seconds."""
        self._step += 1
        rows = draw(shape, self._step, kind)
        now = torch.tensor(self._step)
        begin = time.perf_counter()
        found = self._open().gather(rows, self._gathered)
        gathered = time.perf_counter()
        (self._history.check if thorough else self._history.glance)(self._name, rows, found)
        checked = time.perf_counter()
        self._open().scatter(rows, values(rows, now, self._values), self._step)
        end = time.perf_counter()
        self._history.last[rows] = self._step
        self._peak = max(self._peak, resident_bytes())
        return len(rows), end - begin - (checked - gathered)

    def overwrite(self, share: float) -> Steps:
        shape, first, before = self._start.shape, self._step + 1, io_bytes()
        rows, laps = [], []
        while sum(rows) < share * shape.rows:
            self._step += 1
            some = draw(shape, self._step, "uniform")
            begin = time.perf_counter()
            self._open().scatter(some, values(some, torch.tensor(self._step), self._values), self._step)
            laps.append(time.perf_counter() - begin)
            rows.append(len(some))
            self._history.last[some] = self._step
        return Steps(Span(first, self._step, "uniform", shape.lookups), rows, laps, io_bytes() - before)

    def gather(self, number: int, count: int) -> tuple[int, float]:
        order = torch.randperm(self._start.shape.rows, generator=torch.Generator().manual_seed(1))
        rows, took = order[number * count : (number + 1) * count], 0.0
        for chosen in rows.split(self._start.shape.lookups):
            some = chosen.sort().values
            begin = time.perf_counter()
            found = self._open().gather(some, self._gathered)
            took += time.perf_counter() - begin
            self._history.check(self._name, some, found)
        self._peak = max(self._peak, resident_bytes())
        return len(rows), took

    def check(self, count: int) -> int:
        generator = torch.Generator().manual_seed(self._step)
        rows = torch.randint(self._start.shape.rows, (count,), generator=generator).unique()
        for some in rows.split(self._start.shape.lookups):
            self._history.check(self._name, some, self._open().gather(some, self._gathered))
        return self._step

    def figures(self) -> dict[str, int]:
        return {"resident": self._peak - self._before, "disk": disk_bytes(self._start.folder)}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _open(self) -> OnDisk:
        if self._store is None:
            raise BenchmarkError(f"{self._name} is not open")
        return self._store


def _blocks(shape: Shape) -> Iterator[Tensor]:
    """Yield the rows of a new table in order, as of step 0."""
    count = max(1, _FILLED_BYTES // shape.row_bytes)
    block = torch.empty(count, shape.dim)
    for start in range(0, shape.rows, count):
        rows = torch.arange(start, min(start + count, shape.rows))
        yield values(rows, torch.tensor(0), block)
