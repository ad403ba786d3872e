"""Ctrl-C at any line of the package or at any time: each step is whole or was not taken, and training goes on."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import SpeedswapWarning
from speedswap.tables import Column
from torture.attack import Attack, Broken, Skipped
from torture.ctrl_c import CtrlC, ctrl_c_at
from torture.reference import Choice, random_optimizer

__all__ = ["ATTACK"]

_PACKAGE = os.path.dirname(speedswap.__file__)
ROWS, DIM = 30, 4


def _traced(line: int = 0) -> AbstractContextManager[CtrlC]:
    """Raise Ctrl-C at a line of the package; or never, to count the lines."""
    return ctrl_c_at(line, _PACKAGE)


@contextmanager
def _after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread after a time, if the block has not ended by then."""
    over = threading.Event()

    def wait() -> None:
        if not over.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        time.sleep(0)  # a signal that came at the last moment is handled here


def _interrupted(act: Callable[[], None], *, at: int | None, seconds: float) -> bool:
    """Run something that is interrupted at a line or after a time; return whether it was."""
    way = _traced(at) if at is not None else _after(seconds)
    try:
        with way:
            act()
    except KeyboardInterrupt:
        return True
    return False


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore", SpeedswapWarning)
    if threading.current_thread() is not threading.main_thread():
        raise Skipped("interrupts reach the main thread alone")
    rng = random.Random(seed)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return rng.choice([_trainer, _trainer, _trainer, _operations, _creation])(rng, folder)
    finally:
        signal.signal(signal.SIGINT, usual)


# ---------------------------------------------------------------------- a trainer


class Trainer:
    """Tables, an optimizer for all of them, and a loop that can resume after any number of steps."""

    def __init__(self, rng: random.Random, folder: Path, steps: Sequence[int] = (1, 2, 5)) -> None:
        self.choice: Choice = random_optimizer(rng)
        self.seed = rng.randrange(2**31)
        self.tables = rng.choice([1, 1, 2])
        self.depth = rng.choice([0, 0, 1, 2])
        self.attached = rng.random() < 0.5
        self.in_files = rng.random() < 0.4
        self.folder = folder
        generator = torch.Generator().manual_seed(self.seed)
        self.batches = [
            [torch.randint(ROWS, (6,), generator=generator) for _ in range(self.tables)]
            for _ in range(rng.choice(steps))
        ]
        self.done = 0

    def __str__(self) -> str:
        return (
            f"{self.choice.name} {self.choice.settings}, {self.tables} tables, in files {self.in_files}, "
            f"depth {self.depth}, attached {self.attached}, {len(self.batches)} steps"
        )

    def begin(self, name: str, *, in_memory: bool = False) -> None:
        in_files = self.in_files and not in_memory
        places = [self.folder / f"{name}-{number}" if in_files else None for number in range(self.tables)]
        self.items = [speedswap.Embedding(ROWS, DIM, seed=self.seed, path=place) for place in places]
        self.optimizer = self.choice.make([items.weight for items in self.items])
        self.done = 0

    def train(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Take the steps that are left."""
        if self.attached:
            speedswap.attach(self.optimizer, nn.ModuleList(self.items))
        left = self.batches[self.done :]
        ids = {items: _chosen(number) for number, items in enumerate(self.items)}
        loop: Any = speedswap.lookahead(left, ids, depth=self.depth) if self.depth else left
        for batch in loop:
            self.optimizer.zero_grad()
            sum(items(ids).square().sum() for items, ids in zip(self.items, batch, strict=True)).backward()
            self.optimizer.step()
            self.done += 1
            after_step()

    def rows(self) -> list[dict[str, Tensor]]:
        return [{name: items.table.read(column=name) for name in items.table.columns} for items in self.items]

    def close(self) -> None:
        for items in self.items:
            items.table.close()


def _chosen(number: int) -> Any:
    return lambda batch: batch[number]


def _trainer(rng: random.Random, folder: Path) -> str:
    trainer = Trainer(rng, folder)
    began = time.perf_counter()
    trainer.begin("whole")
    expected = [trainer.rows()]
    with _traced() as counted:
        trainer.train(lambda: expected.append(trainer.rows()))
    seconds = time.perf_counter() - began
    trainer.close()
    trainer.begin("interrupted")
    at = rng.randrange(1, counted.lines + 1) if rng.random() < 0.8 else None
    delay = rng.random() * seconds / 3
    text = f"{trainer}, interrupted at line {at}" if at is not None else f"{trainer}, interrupted after {delay:.4f} s"
    came = _interrupted(trainer.train, at=at, seconds=delay)
    found = trainer.rows()
    # The later one first: where a step changes no weight, only its state tells that it was taken.
    counts = [count for count in (trainer.done + 1, trainer.done) if count < len(expected)]
    steps = [count for count in counts if _are(found, expected[count])]
    if not steps:
        raise Broken(f"after {trainer.done} steps, {_how(found, expected[trainer.done])}: {text}")
    kept = steps[0] > trainer.done
    trainer.done = steps[0]
    trainer.train()
    last = trainer.rows()
    if not _are(last, expected[-1]):
        raise Broken(f"went on after {steps[0]} steps, and in the end {_how(last, expected[-1])}: {text}")
    if trainer.in_files:
        _end_abruptly(trainer, text)
    trainer.close()
    if trainer.in_files:
        for number, items in enumerate(trainer.items):
            with speedswap.Table.open(folder / f"interrupted-{number}") as table:
                if not torch.equal(table.read(), last[number]["weight"]):
                    raise Broken(f"the closed table has other rows than it had: {text}")
            del items
    return f"trainer, {'not' if not came else 'a step kept' if kept else 'a step dropped'}"


def _are(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    """Return whether weights, and the state that both have, are equal to the last bit."""
    for ours, theirs in zip(found, expected, strict=True):
        if not all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()):
            return False
        if theirs.keys() - ours.keys():
            return False
    return True


def _how(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> str:
    words = []
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in theirs:
            if name not in ours:
                words.append(f"table {number} has no {name}")
            elif not torch.equal(ours[name], theirs[name]):
                rows = (ours[name] != theirs[name]).any(1).nonzero().flatten().tolist()
                words.append(
                    f"{name} of table {number} is off by {(ours[name] - theirs[name]).abs().max():.3g} in {rows[:8]}"
                )
    return ", ".join(words)


def _end_abruptly(trainer: Trainer, text: str) -> None:
    """Check that rows left by a kill after a flush survive when the next run's optimizer adds its state."""
    for number, items in enumerate(trainer.items):
        assert items.table.path is not None
        left = trainer.folder / f"left-{number}"
        items.table.flush()
        shutil.copytree(items.table.path, left, symlinks=True)
        with speedswap.Table.open(left) as table:
            table.add_columns([Column("more", (DIM,), torch.float32, speedswap.init.zeros())])
            if not torch.equal(table.read(), items.table.read()):
                raise Broken(f"after an abrupt end, a new column resets rows that were trained: {text}")


# ---------------------------------------------------------------------- a table


def _operations(rng: random.Random, folder: Path) -> str:
    """Run an operation that is interrupted on rows that each hold one number, before it and after it."""
    in_file = rng.random() < 0.6
    place = folder / "table" if in_file else None
    name = rng.choice(["scatter", "write", "add_columns", "reset_columns", "save", "flush", "gather", "read", "close"])
    already = rng.random() < 0.5  # written before

    def made(path: Path | None) -> speedswap.Table:
        table = speedswap.Table.create(ROWS, DIM, path=path, init=speedswap.init.constant(1.0))
        if already:
            table.scatter(torch.arange(ROWS), torch.full((ROWS, DIM), 2.0))
        return table

    def operate(table: speedswap.Table, saved: Path) -> None:
        if name == "scatter":
            table.scatter(torch.arange(0, ROWS, 2), torch.full((ROWS // 2, DIM), 3.0))
        elif name == "write":
            table.write(5, torch.full((10, DIM), 3.0))
        elif name == "add_columns":
            table.add_columns([_extra()])
        elif name == "reset_columns":
            table.reset_columns([table.columns["weight"]])
        elif name == "save":
            table.save(saved)
        elif name == "gather":
            table.gather(torch.arange(ROWS))
        else:
            getattr(table, name)()

    with made(folder / "counted" if in_file else None) as table, _traced() as counted:
        operate(table, folder / "saved-first")
    at = rng.randrange(1, max(2, counted.lines + 1))
    text = f"{name} at line {at} of {counted.lines}, in a file {in_file}, written before {already}"
    table = made(place)
    came = _interrupted(lambda: operate(table, folder / "saved"), at=at, seconds=0)
    if name == "close":
        _interrupted_close(table, text)
    else:
        _go_on(table, name, came, text, 2.0 if already else 1.0)
    if name == "save" and (folder / "saved").exists():
        with speedswap.Table.open(folder / "saved") as saved:
            if not bool((saved.read() == (2 if already else 1)).all()):
                raise Broken(f"what was saved is not whole: {text}")
    return f"{name}, {'interrupted' if came else 'done'}"


def _extra() -> Column:
    return Column("extra", (2,), torch.float32, speedswap.init.constant(7.0))


def _interrupted_close(table: speedswap.Table, text: str) -> None:
    table.close()
    if table.path is not None:
        speedswap.Table.open(table.path).close()


def _go_on(table: speedswap.Table, name: str, came: bool, text: str, before: float) -> None:
    """Check that the table works as if the operation had not been called, or had been completed."""
    changed = {"scatter": {3.0}, "write": {3.0}, "reset_columns": {1.0}}.get(name, set())
    rows = table.read()
    values = rows[:, 0]
    if bool((rows != values.unsqueeze(1)).any()) or not set(values.tolist()) <= {before} | changed:
        raise Broken(f"rows have {sorted(set(rows.flatten().tolist()))}: {text}")
    if not came and changed and not changed & set(values.tolist()):
        raise Broken(f"nothing was written: {text}")
    if not torch.equal(table.gather(torch.arange(ROWS), columns=["weight"]).weight, rows):
        raise Broken(f"gather and read give different rows: {text}")
    if "extra" not in table.columns:
        table.add_columns([_extra()])
    if not bool((table.read(column="extra") == 7).all()) or not torch.equal(table.read(), rows):
        raise Broken(f"a column's first values, or the rows beside it, are not what they were: {text}")
    table.scatter(torch.tensor([0]), {"weight": torch.full((1, DIM), 9.0), "extra": torch.full((1, 2), 8.0)})
    rows[0] = 9.0
    path = table.path
    table.close()
    if path is not None:
        with speedswap.Table.open(path) as again:
            extra = again.read(column="extra")
            if not torch.equal(again.read(), rows) or extra[0, 0] != 8 or not bool((extra[1:] == 7).all()):
                raise Broken(f"the table has other rows when it is opened again: {text}")


def _creation(rng: random.Random, folder: Path) -> str:
    """Check that a table whose creation was interrupted exists, or can be created again."""
    numbers = itertools.count()

    def create() -> None:
        place = folder / f"table-{next(numbers)}"
        speedswap.Table.create(ROWS, DIM, path=place, init=speedswap.init.normal(), seed=5).close()

    with _traced() as counted:
        create()
    at = rng.randrange(1, counted.lines + 1)
    came = _interrupted(create, at=at, seconds=0)
    place = folder / "table-1"
    if place.exists():
        table = speedswap.Table.open(place)
    else:
        table = speedswap.Table.create(ROWS, DIM, path=place, init=speedswap.init.normal(), seed=5)
    with table, speedswap.Table.open(folder / "table-0") as whole:
        if not torch.equal(table.read(), whole.read()):
            raise Broken(f"a table whose creation was interrupted at line {at} of {counted.lines} has other rows")
    return f"creation, {'interrupted' if came else 'done'}"


ATTACK = Attack(
    name="interrupts",
    promise="after Ctrl-C at any line, a step is whole or was not taken, and training goes on to the same bits",
    round=_round,
    quick=12,
)
