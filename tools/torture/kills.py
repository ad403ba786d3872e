"""Trainers of a table in files that end at any instant, in any way, and the trainer that resumes after them."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedswap
from torture.attack import Attack, Broken
from torture.processes import Child, child
from torture.reference import OPTIMIZERS, Reference, batch

DIM = 6
# Endings after which everything must be in the files, as after a close.
ORDERLY = ("return", "return with globals", "SystemExit", "error", "freed", "closed", "closed later", "flushed, killed")
ABRUPT = ("killed", "killed", "killed", "killed", "_exit", "SIGTERM")
_kept: list[Any] = []


@dataclass(frozen=True)
class Run:
    """The plan of one trainer and its ending.

    Attributes:
        steps: after which it ends; a run that is to be killed trains until it is.
        flushes: steps after which it flushes.
        ahead: depth of the lookahead.
        commit_every: steps from one commit to the next.
        cache_bytes: as much as the table keeps in memory.
    """

    path: str
    seed: int
    rows: int
    size: int
    optimizer: str
    ending: str
    steps: int
    flushes: tuple[int, ...]
    ahead: int
    commit_every: int | None
    cache_bytes: int | None


def _round(seed: int, folder: Path) -> Mapping[str, int]:
    draw = random.Random(seed)
    rows, optimizer = draw.choice([8, 60, 3_000]), draw.choice(["Adam", *OPTIMIZERS])
    size = draw.choice([4, 16, rows])
    table = _created(folder / "table", rows, draw)
    known = Reference(optimizer, table)
    endings = []
    for generation in range(draw.choice([1, 2, 2, 3])):
        ending = draw.choice(ORDERLY if draw.random() < 0.5 else ABRUPT)
        steps = draw.randrange(1, 25) if ending in ORDERLY else 10**9
        flushes = tuple(sorted(draw.sample(range(1, 25), draw.choice([0, 0, 1, 3]))))
        ahead = draw.choice([0, 0, 1, 2])
        run = Run(
            str(folder / "table"), seed + generation, rows, size, optimizer, ending, steps, flushes, ahead,
            commit_every=draw.choice([None, 1, 1, 2, 7]), cache_bytes=draw.choice([None, 1, 50_000]),
        )  # fmt: skip
        endings.append(ending)
        told = _ended(run, draw, folder / f"log-{generation}")
        known = _checked(run, known, told)
    return Counter(endings)


def _created(path: Path, rows: int, draw: random.Random) -> dict[str, Tensor]:
    init = draw.choice([speedswap.init.normal(std=1.0), None])
    with speedswap.Table.create(rows, DIM, dtype=torch.float64, path=path, init=init, seed=7) as table:
        return {"weight": table.read()}


# ---------------------------------------------------------------------- the trainer


def _trains(tell: Any, run: Run) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("speedswap").addHandler(handler)
    table = _opened(run)
    tell(json.dumps({"opened": True}))
    if run.ending == "freed":
        table.close()
        _steps(tell, run, _opened(run), said)
        gc.collect()
        tell(json.dumps({"freed": True}))
        time.sleep(60)
    _steps(tell, run, table, said)  # the optimizer and the module are gone when it returns
    if run.ending in ("closed", "closed later"):
        gc.collect()
        table.close()
        if run.ending == "closed later":
            os._exit(0)
    if run.ending == "flushed, killed":
        table.flush()
        tell(json.dumps({"flushed": True}))
        time.sleep(60)
    if run.ending == "SystemExit":
        raise SystemExit(3)
    if run.ending == "error":
        raise RuntimeError("a trainer's own")


def _opened(run: Run) -> speedswap.Table:
    return speedswap.Table.open(speedswap.Disk(run.path, commit_every=run.commit_every, cache_bytes=run.cache_bytes))


def _steps(tell: Any, run: Run, table: speedswap.Table, said: list[str]) -> None:
    items = speedswap.Embedding(run.rows, DIM, table=table)
    optimizer = OPTIMIZERS[run.optimizer](items.parameters())
    if run.ending == "return with globals":
        _kept.extend([items, optimizer])
    batches = (batch(run.seed, step, run.rows, DIM, run.size) for step in range(1, run.steps + 1))
    loader = speedswap.lookahead(batches, {items: lambda pair: pair[0]}, depth=run.ahead)
    for step, (ids, gradients) in enumerate(loader, start=1):
        optimizer.zero_grad()
        (items(ids) * gradients).sum().backward()
        optimizer.step()
        scalars = {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in optimizer.state[items.weight].items()
            if not (isinstance(value, Tensor) and value.dim())
        }
        tell(json.dumps({"step": step, "scalars": scalars, "said": said}))
        said.clear()
        if step in run.flushes:
            table.flush()
            tell(json.dumps({"durable": step}))
    if run.ending == "_exit":
        os._exit(0)


@dataclass
class Told:
    """The report of a trainer.

    Attributes:
        scalars: of the optimizer, after each completed step.
        said: its warnings.
        durable: the step that it flushed last.
    """

    scalars: list[dict[str, Any]]
    said: list[str]
    durable: int = 0


def _ended(run: Run, draw: random.Random, log: Path) -> Told:
    """Let a trainer run to its end, or end it at a random instant."""
    if run.ending == "_exit":
        run = Run(**{**asdict(run), "steps": draw.randrange(1, 25)})
    with child(_trains, run, log=log) as trainer:
        told = Told([], [])
        first = trainer.line()
        if first is None:
            raise Broken(f"the table that a trainer left does not open\n{trainer.said()}")
        if run.ending in ("killed", "SIGTERM"):
            if draw.random() < 0.8:  # else while it attaches
                _hear(told, trainer.line(), trainer)
            time.sleep(draw.choice([0.0, draw.uniform(0, 0.003), draw.uniform(0, 0.03)]))
            trainer.signal(signal.SIGKILL if run.ending == "killed" else signal.SIGTERM)
        for line in trainer.lines():
            if _hear(told, line, trainer):
                trainer.kill()
        code = trainer.wait()
        expected = {"SystemExit": 3, "error": 1, "freed": -9, "flushed, killed": -9, "killed": -9, "SIGTERM": -15}
        if code != expected.get(run.ending, 0):
            raise Broken(f"a trainer ended with {code}\nending {run.ending!r}: {trainer.said()}")
        return told


def _hear(told: Told, line: str | None, trainer: Child) -> bool:
    """Record one line of the report; return whether the trainer waits to be killed."""
    if line is None:
        raise Broken(f"a trainer ended before its first step\n{trainer.said()}")
    heard = json.loads(line)
    if "step" in heard:
        told.scalars.append(heard["scalars"])
        told.said += heard["said"]
    told.durable = heard.get("durable", told.durable)
    return "freed" in heard or "flushed" in heard


# ---------------------------------------------------------------------- what it must have left


def _checked(run: Run, known: Reference, told: Told) -> Reference:
    """Check that the files are those of one step, at least the last one flushed; return the table in them."""
    done = len(told.scalars)
    with speedswap.Table.open(run.path) as table:
        columns = {name: table.read(column=name) for name in table.columns}
        noted = (table.attributes.get("optimizer") or {}).get("scalars") or {}
    afresh = Reference(run.optimizer, {"weight": known.columns["weight"]})
    version = _resumed(run, known, told) if done else known if known.scalars else afresh
    agreed = done - 2 * run.commit_every + 1 if run.commit_every else 0
    least, most = (done, done) if run.ending in ORDERLY else (max(told.durable, agreed, 0), done + 1)
    versions = [] if least else [known, *_started_over(run, known)]  # it may have ended while it attached
    for step in range(most + 1):
        if step:
            version.step(*batch(run.seed, step, run.rows, DIM, run.size))
        if 1 <= step <= done:
            _same_scalars(version.scalars, told.scalars[step - 1], f"step {step}", run)
        if step >= least:
            versions.append(version.copy())
    found = next((one for one in versions if _is(one, columns, noted)), None)
    if found is None:
        raise Broken(
            "the table is not that of one step\n"
            f"{_differences(versions[-1], columns)}; scalars {noted}; steps {least} to {most} are possible, {run}"
        )
    return Reference(run.optimizer, columns, _as_torch_has(found.scalars, noted))


def _is(version: Reference, columns: dict[str, Tensor], noted: dict[str, Any]) -> bool:
    """Return whether a table is as in a version, row by row and in its step count; new columns may be there, unused."""
    for name, values in columns.items():
        expected = version.columns.get(name, torch.zeros_like(values))
        if not torch.allclose(values, expected, rtol=1e-9, atol=1e-12):
            return False
    steps = version.scalars.get("step")
    return version.columns.keys() <= columns.keys() and (steps is None or float(steps) == float(noted.get("step", -1)))


def _differences(version: Reference, columns: dict[str, Tensor]) -> dict[str, list[int]]:
    return {
        name: (~torch.isclose(values, version.columns[name])).flatten(1).any(1).nonzero().flatten().tolist()[:20]
        for name, values in columns.items()
        if name in version.columns
    }


def _started_over(run: Run, known: Reference) -> list[Reference]:
    """Return the states that a table passes through where its state starts over and one step is taken."""
    zeros = {name: torch.zeros_like(values) for name, values in known.columns.items() if name != "weight"}
    stepped = Reference(run.optimizer, {"weight": known.columns["weight"]})
    stepped.step(*batch(run.seed, 1, run.rows, DIM, run.size))
    return [Reference(run.optimizer, {"weight": known.columns["weight"], **zeros}), stepped]


def _resumed(run: Run, known: Reference, told: Told) -> Reference:
    """Return the state in which this trainer started: the previous one's last, or a fresh one if it warned of that."""
    first = told.scalars[0].get("step")
    expected = known.scalars.get("step")
    afresh = Reference(run.optimizer, {"weight": known.columns["weight"]})
    if len(known.columns) == 1 or known.optimizer == "SGD":
        return afresh
    if first is not None and expected is None:  # no step has reached the files
        return afresh
    if any("starts over" in message for message in told.said):
        return afresh
    if first is not None and expected is not None and first != float(expected) + 1:
        raise Broken(
            f"a trainer goes on with another step count than the table has\nfirst step {first}, table {expected}, {run}"
        )
    return known


def _same_scalars(expected: dict[str, Any], found: dict[str, Any], when: str, run: Run) -> None:
    for name, value in expected.items():
        if name not in found or abs(float(value) - float(found[name])) > 1e-6 * abs(float(value)):
            raise Broken(
                f"a scalar of the optimizer is lost or stale\n{name!r} at {when} is {found.get(name)}, not "
                f"{float(value)}, {run}"
            )


def _as_torch_has(scalars: dict[str, Any], noted: dict[str, Any] | None) -> dict[str, Any]:
    """Return a table's scalars, with the types that torch's optimizer gives them."""
    if not noted:
        return {}
    return {
        name: torch.full_like(value, noted[name]) if isinstance(value, Tensor) else noted[name]
        for name, value in scalars.items()
        if name in noted
    }


ATTACK = Attack(
    name="kills",
    promise="a trainer that ends in any way leaves rows and state of one step, the last flushed one or later, and "
    "loses no more steps than commit_every allows",
    round=_round,
    seconds=60.0,
    quick=10,
)
