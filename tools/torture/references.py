"""Trainers that save checkpoints which refer to their table on disk, killed at any instant: one loads, of one step."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from torture.attack import Attack, Broken
from torture.processes import Calls, Child, child
from torture.reference import OPTIMIZERS, batch
from torture.system_calls import killed_at_system_call

DIM, MOST_HELD = 6, 2


@dataclass(frozen=True)
class Run:
    """The plan of the trainers of a round.

    Attributes:
        every: steps from one checkpoint to the next.
        keep: checkpoints that stay: with more than one, some have copies of the table.
        deadly: the call of Python's that kills the trainer; none for 0.
        before: True to be killed before it.
    """

    folder: Path
    seed: int
    rows: int
    size: int
    optimizer: str
    every: int
    keep: int
    deadly: int = 0
    before: bool = False

    def trained(self, table: speedswap.Table | None) -> tuple[speedswap.Embedding, Optimizer]:
        """Return a model over a table, or in memory, and its optimizer."""
        init = speedswap.init.normal()
        items = speedswap.Embedding(self.rows, DIM, dtype=torch.float64, init=init, seed=7, table=table)
        return items, OPTIMIZERS[self.optimizer](items.parameters())

    def step(self, items: speedswap.Embedding, optimizer: Optimizer, number: int) -> None:
        ids, gradients = batch(self.seed, number, self.rows, DIM, self.size)
        optimizer.zero_grad()
        (items(ids) * gradients).sum().backward()
        optimizer.step()

    def save(self, items: speedswap.Embedding, optimizer: Optimizer, step: int) -> None:
        speedswap.save_checkpoint(
            self.folder / "saved", items, optimizer, step=step, extra={"of": step}, keep=self.keep
        )

    @property
    def saved(self) -> list[int]:
        """The steps of the checkpoints that are there, oldest first."""
        return [int(path.name.split("-")[-1]) for path in sorted((self.folder / "saved").glob("0*"))]

    def load(self, items: speedswap.Embedding, optimizer: Optimizer, step: int | None = None) -> int:
        loaded = speedswap.load_checkpoint(self.folder / "saved", items, optimizer, step=step)
        if loaded.extra != {"of": loaded.step}:
            raise Broken(f"a checkpoint is of two steps\nstep {loaded.step}, extra {loaded.extra}")
        return loaded.step

    def opened(self) -> speedswap.Table:
        draw = random.Random(self.seed + self.deadly)
        cache_bytes, every = draw.choice([None, 1, 20_000]), draw.choice([None, 1, 2])
        return speedswap.Table.open(speedswap.Disk(self.folder / "table", cache_bytes=cache_bytes, commit_every=every))


def _round(seed: int, folder: Path) -> Mapping[str, int]:
    draw = random.Random(seed)
    rows = draw.choice([8, 60, 3_000])
    given: dict[str, Any] = {"folder": folder, "seed": seed, "rows": rows, "size": draw.choice([4, 16, 200])}
    given |= {"optimizer": draw.choice(["SGD", "Adam", "NAdam", "RowwiseAdagrad"]), "every": draw.choice([1, 1, 2, 5])}
    run = Run(**given, keep=draw.choice([1, 1, 2, 3]))
    init = speedswap.init.normal()
    table = speedswap.Table.create(rows, DIM, dtype=torch.float64, path=folder / "table", init=init, seed=7)
    run.save(*run.trained(table), 0)
    table.close()
    known, least, ends = _Known(run), 0, Counter[str]()
    for generation in range(draw.choice([1, 2, 3])):
        how = draw.choice(["at a call", "at a system call", "any time"])
        deadly = draw.randrange(1, 150) if how == "at a call" else 0
        mortal = Run(**{**run.__dict__, "deadly": deadly, "before": draw.random() < 0.5})
        with child(_trains, mortal, log=folder / f"log-{generation}") as trainer:
            least = _ended(trainer, how, draw, least)
        least = _checked(run, known, least, f"killed {how}, {run}")
        ends[how] += 1
    return ends


# ---------------------------------------------------------------------- the trainer


def _trains(tell: Any, run: Run) -> None:
    tell("ready")
    tell.hear()
    Calls(run.deadly, before=run.before)
    items, optimizer = run.trained(run.opened())
    first = run.load(items, optimizer) + 1
    for step in range(first, first + 200):
        run.step(items, optimizer, step)
        if step % run.every == 0:
            run.save(items, optimizer, step)
            tell(json.dumps({"saved": step, "held": items.table.commits.held}))


def _ended(trainer: Child, how: str, draw: random.Random, least: int) -> int:
    """Let a trainer begin, and end; return the last step that it has saved."""
    if trainer.line() is None:
        raise Broken(f"a trainer did not begin\n{trainer.said()}")
    if how == "at a system call":
        with killed_at_system_call(trainer.pid, draw.randrange(1, 60)):
            trainer.order("go")
            return _heard(trainer, least)
    trainer.order("go")
    if how == "any time":
        for _ in range(draw.choice([0, 1, 2, 5])):
            least = _told(trainer.line(), least)
        time.sleep(draw.choice([0.0, draw.uniform(0, 0.003), draw.uniform(0, 0.03)]))
        trainer.kill()
    return _heard(trainer, least)


def _heard(trainer: Child, least: int) -> int:
    for line in trainer.lines(60.0):
        least = _told(line, least)
    if trainer.wait() not in (-9, 0):
        raise Broken(f"a trainer fails\n{trainer.said()}")
    return least


def _told(line: str | None, least: int) -> int:
    if line is None:
        return least
    told = json.loads(line)
    if len(told["held"]) > MOST_HELD:
        raise Broken(f"a table keeps commits that no checkpoint refers to\n{told}")
    return int(told["saved"])


# ---------------------------------------------------------------------- what it must have left


class _Known:
    """The rows after each step of an undisturbed training in memory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._items, self._optimizer = run.trained(None)
        self._states = [_columns(self._items)]

    def after(self, step: int) -> dict[str, Tensor]:
        for number in range(len(self._states), step + 1):
            self._run.step(self._items, self._optimizer, number)
            self._states.append(_columns(self._items))
        return self._states[step]


def _columns(items: speedswap.Embedding) -> dict[str, Tensor]:
    return {name: items.table.read(column=name) for name in items.table.columns}


def _checked(run: Run, known: _Known, least: int, what: str) -> int:
    """Load the checkpoint into memory, then into the table; return its step."""
    table = None
    for where in ("in memory", "in place"):
        table = run.opened() if where == "in place" else None
        items, optimizer = run.trained(table)
        for step in [*run.saved, *run.saved[::-1], *run.saved]:  # an older one leaves the newer ones unchanged
            run.load(items, optimizer, step)
            _compare(items, known.after(step), f"{step}, {where}, {what}")
        if step < least:
            raise Broken(f"a checkpoint that was saved is gone\nstep {step}, not {least}, {where}, {what}")
        run.step(items, optimizer, step + 1)  # with the optimizer's own numbers as well
        if not all(torch.equal(_columns(items)[name], values) for name, values in known.after(step + 1).items()):
            raise Broken(f"a training does not go on as it would have\nafter {step}, {where}, {what}")
        items.table.close()
    return step


def _compare(items: speedswap.Embedding, expected: Mapping[str, Tensor], what: str) -> None:
    found = _columns(items)
    wrong = {
        name: (found[name] != values).flatten(1).any(1).nonzero().flatten().tolist()[:20]
        for name, values in expected.items()
        if not torch.equal(found[name], values)
    }
    if wrong:
        raise Broken(f"the rows of a checkpoint are not those of its step\n{what}: {wrong}")


ATTACK = Attack(
    name="references",
    promise="a trainer killed at any instant leaves a checkpoint whose tables on disk go back to its step",
    round=_round,
    seconds=120.0,
    quick=2,
)
