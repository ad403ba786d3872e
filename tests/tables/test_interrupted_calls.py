"""Ctrl-C at any line of a table on disk leaves it as of a step, in memory and in its files; it trains on and reopens.

A few lines of each call are tried, or all that it runs where SPEEDSWAP_INTERRUPTS is "all".
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap import Column, Table, init
from speedswap.tables import Block
from speedswap.tables.disk.opened import LogCommits
from speedswap.tables.disk.store import LogColumns

Snapshot = dict[str, Tensor]
Interrupts = Callable[..., AbstractContextManager[list[str]]]

ROWS = 20
GROUPED, SINGLE = 4, 40  # values per row: several rows per group, or one
LINES = os.environ.get("SPEEDSWAP_INTERRUPTS", "3")  # of each call
FOLDER = str(Path(speedswap.__file__).parent / "tables")


class Training:
    """An embedding with Adam over a table on disk.

    Args:
        path: the table's.
        cache_bytes: for a few rows, or for all of them by default.
    """

    table: Table | None = None

    def __init__(self, path: Path, cache_bytes: int | None) -> None:
        self.path, self.cache_bytes = path, cache_bytes
        self.open()

    def open(self) -> None:
        if self.table is None or self.table.closed:
            self.table = Table.open(speedswap.Disk(self.path, cache_bytes=self.cache_bytes, commit_every=2))
        self.items = speedswap.Embedding(self.table.num_embeddings, self.table.embedding_dim, table=self.table)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.items.parameters(), lr=0.1)

    def train(self, *steps: int, depth: int = 0) -> None:
        batches = [torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step)) for step in steps]
        for ids in speedswap.lookahead(batches, {self.items: lambda batch: batch}, depth=depth):
            self.optimizer.zero_grad()
            self.items(ids).square().sum().backward()
            self.optimizer.step()

    def train_to(self, step: int, depth: int = 0) -> None:
        """Train the steps that the table lacks."""
        self.train(*range(int(snapshot(self.items.table)["step"]), step), depth=depth)


def snapshot(table: Table) -> Snapshot:
    """Return all rows, and the optimizer's step."""
    live = {key: value for key, source in table.live_attributes.items() if (value := source()) is not None}
    noted = {**table.attributes, **live}["optimizer"]["scalars"]
    return {**{name: table.read(column=name) for name in table.columns}, "step": torch.tensor(noted["step"])}


def same(found: Snapshot, other: Snapshot) -> bool:
    return found.keys() == other.keys() and all(torch.equal(found[name], values) for name, values in other.items())


def is_mixed(found: Snapshot, before: Snapshot, after: Snapshot) -> bool:
    """Return whether each row is as before a call or as after it, in all columns together."""
    kept = [
        torch.stack([(found[name] == values).flatten(1).all(dim=1) for name, values in each.items() if values.dim()])
        for each in (before, after)
    ]
    return bool((kept[0].all(dim=0) | kept[1].all(dim=0)).all())


# ---- calls -----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a trainer, which can be repeated after it was interrupted.

    Attributes:
        call: it.
        first: what comes before it.
        by_rows: whether an interrupt may leave some rows as before it, and others as after it.
    """

    call: Callable[[Training], object]
    first: Callable[[Training], object] = lambda training: None
    by_rows: bool = False


def add(column: Column) -> Callable[[Training], None]:
    return lambda training: training.items.table.add_columns(
        [column] if column.name not in training.items.table.columns else []
    )


def copied(start: init.Initializer) -> Callable[[Training], Column]:
    """Return the making of a column like Adam's state."""
    return lambda training: Column("copied", (training.items.embedding_dim,), torch.float64, start)


def scatter(training: Training) -> None:
    rows = torch.tensor([1, 3, 8, 19, 0, 12])
    blocks = training.items.table.gather(rows).columns
    training.items.table.scatter(rows, {name: torch.full_like(block, 7) for name, block in blocks.items()})


def save(training: Training) -> None:
    path = training.path.with_suffix(".copy")
    training.items.table.save(path, overwrite=path.exists())
    with Table.open(path, "r") as copy:
        assert same(snapshot(copy), snapshot(training.items.table))


def hold(training: Training) -> None:
    """Keep a commit, as a checkpoint does, and go on."""
    training.items.table.commits.hold()
    training.items.table.flush()
    training.train(3)


def return_to(training: Training) -> None:
    """Return to the commit that is kept, as the loading of a checkpoint does."""
    table = training.items.table
    training.items._step.abandon()
    with table.lock:
        table.commits.return_to(table.commits.held[0])
    training.items._step.state.resume(training.optimizer, initial=False)


LATE = Column("late", (3,), torch.float32, init.normal(std=1.0))
WIDE = Column("wide", (1100,), torch.float64, init.normal(std=1.0))  # the rows move to another log
DRAWN = Column("drawn", (2,), torch.float32, init.from_torch(torch.nn.init.ones_))  # all rows are written
CALLS = {
    "step": Call(lambda training: training.train_to(4)),
    "lookahead": Call(lambda training: training.train_to(6, depth=2)),
    "flush": Call(lambda training: training.items.table.flush()),
    "close": Call(lambda training: training.items.table.close()),
    "open": Call(Training.open, lambda training: training.items.table.close()),
    "scatter": Call(scatter, by_rows=True),
    "write": Call(
        lambda training: training.items.table.write(2, torch.ones_like(training.items.table.read(2, 18))), by_rows=True
    ),
    "reset_rows": Call(lambda training: training.items.table.reset_rows(torch.tensor([7, 2, 19])), by_rows=True),
    "add_columns": Call(add(LATE)),
    "add_columns, moving": Call(add(WIDE)),
    "add_columns, writing": Call(add(DRAWN)),
    "reset_columns": Call(lambda training: training.items.table.reset_columns([LATE]), add(LATE)),
    "reset_columns, copying": Call(
        lambda training: training.items.table.reset_columns([copied(init.CopyOf("exp_avg"))(training)]),
        lambda training: training.items.table.add_columns([copied(init.zeros())(training)]),
    ),
    "save": Call(save),
    "return to a commit": Call(return_to, hold),
}


# ---- the walk --------------------------------------------------------------------------------------------------------


def lines_run(call: Callable[[], object]) -> list[str]:
    """Return the lines of tables that a call runs, in its order."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event in ("call", "line") and frame.f_code.co_filename.startswith(FOLDER):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def chosen(lines: list[str]) -> list[int]:
    """Return the numbers of the lines to interrupt: of all, or of some that are run for the first or the last time."""
    if LINES == "all":
        return list(range(1, len(lines) + 1))
    first = {line: place for place, line in reversed([*enumerate(lines, 1)])}
    last = {line: place for place, line in enumerate(lines, 1)}
    ends = sorted({*first.values(), *last.values()})
    return ends[-1 :: -max(1, len(ends) // int(LINES))]


def in_files(training: Training, to: Path) -> Snapshot:
    """Return what a process would find that comes after the death of this one, once its commit under way is durable."""
    while not training.items.table.closed and training.items.table.store.log.appending:
        pass
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(training.path, to)
    with Table.open(speedswap.Disk(to, cache_bytes=1), "r") as copy:
        return snapshot(copy)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two tables with two steps."""
    folder: Path = tmp_path_factory.mktemp("started")
    for dim in (GROUPED, SINGLE):
        values = init.normal(std=0.1)
        Table.create(ROWS, dim, path=folder / str(dim), init=values, seed=3, dtype=torch.float64).close()
        training = Training(folder / str(dim), None)
        training.train(0, 1)
        training.items.table.close()
    return folder


def walk(name: str, dim: int, started: Path, tmp_path: Path, interrupted_at: Interrupts) -> int:
    """Interrupt a call at the chosen lines, with a fresh start each time; return the number of interrupts."""
    call, first, by_rows = CALLS[name]
    cache_bytes = 1 if [*CALLS].index(name) // 2 % 2 else None

    def begun(at: object) -> Training:
        training = Training(Path(shutil.copytree(started / str(dim), tmp_path / f"{dim}-{at}")), cache_bytes)
        training.train(2)
        first(training)
        return training

    straight = begun("straight")
    states = [in_files(straight, tmp_path / "copy")]
    if not straight.items.table.closed:
        states.append(snapshot(straight.items.table))
    lines = lines_run(lambda: call(straight))
    straight.open()
    before, after = states[-1], snapshot(straight.items.table)
    states.append(after)
    for steps in (4, 5) if name == "lookahead" else ():
        between = begun(f"steps-{steps}")
        between.train_to(steps)
        states.append(snapshot(between.items.table))
    straight.train(6)
    later = snapshot(straight.items.table)

    def is_state(found: Snapshot) -> bool:
        return any(same(found, each) for each in states) or (by_rows and is_mixed(found, before, after))

    interrupts = 0
    for line in chosen(lines):
        training = begun(line)
        with suppress(KeyboardInterrupt), interrupted_at(line, "tables") as came:
            call(training)
        interrupts += len(came)
        where = (line, came)
        assert training.items.table.closed or is_state(snapshot(training.items.table)), where
        assert is_state(in_files(training, tmp_path / "copy")), where
        call(training)
        training.open()
        assert same(snapshot(training.items.table), after), where
        training.train(6)
        assert same(snapshot(training.items.table), later), where
        training.items.table.close()
        with Table.open(training.path) as again:
            assert same(snapshot(again), later), where
        shutil.rmtree(training.path)
    return interrupts


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops one in a finalizer
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_anywhere_leaves_a_table_that_goes_on(
    name: str, started: Path, tmp_path: Path, interrupted_at: Interrupts
) -> None:
    """As before the call or as after it, or as of a step, in memory and for the next process; then the call can be
    repeated, and the next step leads to the bits of a training that was not interrupted."""
    dims = (GROUPED, SINGLE) if LINES == "all" else ([GROUPED, SINGLE][[*CALLS].index(name) % 2],)
    interrupts = sum(walk(name, dim, started, tmp_path, interrupted_at) for dim in dims)
    print(f"{name}: {interrupts} interrupts")
    assert interrupts


# ---- lines that are rarely chosen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [LATE, WIDE], ids=lambda column: column.name)
def test_columns_that_are_durable_when_ctrl_c_comes_are_there(
    column: Column, started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes just after the commit with them: the table has them, or does not where its rows were to move."""
    training = Training(Path(shutil.copytree(started / str(GROUPED), tmp_path / "t")), None)
    training.train(2)
    before = snapshot(training.items.table)
    finish, calls = LogCommits.finish, iter(range(9))

    def finishes(commits: LogCommits, log: Any) -> None:
        finish(commits, log)
        if next(calls) == 1:  # after the one that keeps what was before
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LogCommits, "finish", finishes)
        with pytest.raises(KeyboardInterrupt):
            add(column)(training)
    found = snapshot(training.items.table)
    assert (column.name in found) == (column is LATE)
    assert same({name: found[name] for name in before}, before)
    add(column)(training)
    training.train(3)
    expected = snapshot(training.items.table)
    training.items.table.close()
    with Table.open(training.path) as again:
        assert same(snapshot(again), expected)


@pytest.mark.parametrize("dim", [GROUPED, SINGLE])
def test_a_second_ctrl_c_leaves_a_table_that_goes_on(
    dim: int, started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while columns are taken back that the first one has interrupted."""
    training, opened = Training(Path(shutil.copytree(started / str(dim), tmp_path / "t")), None), LogColumns._opened
    training.train(2)
    before, seconds = snapshot(training.items.table), list[None]()

    def first(*args: object) -> None:
        raise KeyboardInterrupt

    def second(*args: Any) -> Any:
        seconds.append(None)
        os.kill(os.getpid(), signal.SIGINT)
        return opened(*args)

    with monkeypatch.context() as patch:
        patch.setattr(LogColumns, "_write_initial", first)
        patch.setattr(LogColumns, "_opened", second)
        with pytest.raises(KeyboardInterrupt):
            add(DRAWN)(training)
    assert seconds
    assert same(snapshot(training.items.table), before)
    add(DRAWN)(training)
    training.train(3)
    expected = snapshot(training.items.table)
    training.items.table.close()
    with Table.open(training.path) as again:
        assert same(snapshot(again), expected)


def test_a_commit_that_began_as_ctrl_c_came_is_known(started: Path, tmp_path: Path, interrupted_at: Interrupts) -> None:
    """The next one waits for it: as it is appended, no other can begin."""
    items = speedswap.Embedding(100_000, 64, path=tmp_path / "t")
    rows = torch.arange(100_000)
    for line in range(1, 9):
        items.table.store.scatter(Block(rows, {}), {"weight": torch.full((100_000, 64), float(line))})
        with suppress(KeyboardInterrupt), interrupted_at(line, "kernels/row_log.py"):
            items.table.flush()
        items.table.attributes["line"] = line
        items.table.flush()
    items.table.close()


def test_a_table_in_a_cycle_is_closed_when_it_is_opened_again(tmp_path: Path) -> None:
    """An exception and its frames are such a cycle: an interrupted call that can be repeated leaves one behind."""
    gc.disable()
    try:
        cycle: list[Any] = [Table.create(ROWS, 4, path=tmp_path / "t")]
        cycle[0].scatter(torch.tensor([3]), torch.ones(1, 4))
        cycle.append(cycle)
        alive = weakref.ref(cycle[0])
        del cycle
        assert alive() is not None
        with Table.open(tmp_path / "t") as table:
            assert table.read(3, 4).tolist() == [[1.0] * 4]
    finally:
        gc.enable()


def test_ctrl_c_in_a_function_of_initial_values_leaves_gradients_and_random_numbers(interrupted_at: Interrupts) -> None:
    """Gradients are still computed, and the next numbers drawn are those that come without it."""
    expected, came = torch.get_rng_state(), ["first"]
    line = 0
    while came:
        line += 1
        with suppress(KeyboardInterrupt), interrupted_at(line, "tables/init.py") as came:
            Table.create(ROWS, 4, seed=1, init=init.from_torch(torch.nn.init.ones_))
        assert torch.is_grad_enabled(), came
        assert torch.equal(torch.get_rng_state(), expected), came
    assert line > 10
