"""Runs of the application ncf that end at any instant, over the output of an earlier run: a checkpoint is complete."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from speedswap.apps.errors import CheckpointError
from speedswap.apps.ncf import NcfSettings, load, train
from speedswap.cli import main
from torture.attack import Attack, Broken
from torture.processes import Calls, Child, child

EPOCHS = 3
# Adagrad's learning rate does not depend on how many epochs there are, so that runs of fewer epochs are beginnings.
_SMALL = NcfSettings(
    users=30,
    items=40,
    interactions=300,
    factors=4,
    layers=(8, 4),
    batch=64,
    epochs=EPOCHS,
    optimizer="adagrad",
    test_negatives=9,
    device="cpu",
)
_SEEDS = (1, 2)


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    older, newer = draw.choice([(1, 2), (2, 1), (1, 1)])
    output, scratch = folder / "output", folder / "scratch"
    scratch.mkdir()
    shutil.copytree(_finished(older), output)
    begun = draw.choice(["over", "over", "over", "resumed"])
    if begun == "resumed":
        newer = older
    settings = dataclasses.replace(
        _SMALL,
        seed=newer,
        epochs=EPOCHS + (begun == "resumed") * 2,
        storage=draw.choice(["auto", "disk"]),
        scratch=scratch,
    )
    how = draw.choice(["at a call", "at a call", "at a call", "any time", "SIGTERM"])
    for _ in range(draw.choice([1, 1, 2])):
        _end(draw, settings, output, begun == "resumed", how, folder / "log")
        _check(output, settings, (older, newer), f"{begun}, killed {how}")
    left = [path.name for path in scratch.iterdir()]
    if left:
        raise Broken(f"tables of an ended run stay in its scratch folder\n{left}, {how}")
    return f"{how}, {begun}"


# ---------------------------------------------------------------------- runs


def _beside() -> str:
    """Return a folder that stays from round to round, as long as this process."""
    return os.path.dirname(os.getcwd())


@functools.lru_cache
def _finished(seed: int) -> Path:
    """Return the output folder of a complete run."""
    output = Path(tempfile.mkdtemp(prefix="finished-", dir=_beside()))
    train(dataclasses.replace(_SMALL, seed=seed), output=output, progress=False).model.close()
    return output


@functools.lru_cache
def _after(seed: int, epochs: int) -> tuple[Tensor, Tensor]:
    """Return the rows of an undisturbed run after ``epochs`` epochs."""
    result = train(dataclasses.replace(_SMALL, seed=seed, epochs=epochs), progress=False)
    try:
        return _rows(result.model)
    finally:
        result.model.close()


@functools.lru_cache
def _calls() -> int:
    """Count the system calls of a complete run over an earlier one."""
    folder = Path(tempfile.mkdtemp(prefix="counted-", dir=_beside()))
    shutil.copytree(_finished(1), folder / "output")
    with child(_counts, folder / "output", log=folder / "log") as run:
        return int(run.line(60.0) or 100)


def _counts(tell: Callable[[str], None], output: Path) -> None:
    calls = Calls()
    train(dataclasses.replace(_SMALL, seed=2), output=output, progress=False)
    tell(str(calls.number))


def _rows(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    return model.user.table.read(), model.item.table.read()


def _end(draw: random.Random, settings: NcfSettings, output: Path, resume: bool, how: str, log: Path) -> None:
    number = draw.randrange(1, _calls() + 1) if how == "at a call" else 0
    with child(_runs, settings, output, resume, number, draw.random() < 0.5, how, log=log) as run:
        if run.line(60.0) is None:
            raise Broken(f"a run did not begin\n{run.said()}")
        if how == "any time":
            time.sleep(draw.uniform(0, 0.6))
            run.kill()
        if how == "SIGTERM":
            _terminate(draw, run, output / "checkpoints")
        elif run.wait(60.0) not in (0, -9):
            raise Broken(f"a run over an earlier one fails\n{settings}: {run.said()}")


def _terminate(draw: random.Random, run: Child, checkpoints: Path) -> None:
    """Terminate a training run as schedulers do; it finishes its step, saves, reports that and exits with 143."""
    before, end = checkpoints.stat().st_mtime_ns, time.monotonic() + 10
    while checkpoints.stat().st_mtime_ns == before and time.monotonic() < end and not run.has_ended():
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.1))
    run.signal(signal.SIGTERM)
    code = run.wait(60.0)
    if code not in (0, 143):
        raise Broken(f"a run that is asked to end by SIGTERM does not save and exit with 143\nit ends with {code}")


def _runs(
    tell: Callable[[str], None], settings: NcfSettings, output: Path, resume: bool, number: int, before: bool, how: str
) -> None:
    if how == "SIGTERM":
        words = ["ncf", "--output", str(output), *(["--resume"] if resume else [])]
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if value != field.default and value is not None:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += ["--" + field.name.replace("_", "-"), text]
        tell("begins")
        sys.exit(main(words))
    if number:
        Calls(number, before=before)
    tell("begins")
    train(settings, output=output, resume=resume, progress=False).model.close()


# ---------------------------------------------------------------------- what they must have left


def _check(output: Path, settings: NcfSettings, seeds: tuple[int, int], what: str) -> None:
    """Load the checkpoint, and resume from a copy of it to the end: both must be those of an undisturbed run."""
    try:
        model = load(output)
    except Exception as error:
        raise Broken(f"no complete checkpoint is loaded after a run has ended\n{what}: {_listed(output)}") from error
    _compare(_rows(model), seeds, range(1, settings.epochs + 1), "loaded", what)
    copy = output.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(output, copy)
    for seed in dict.fromkeys(reversed(seeds)):
        try:
            result = train(dataclasses.replace(settings, seed=seed), output=copy, resume=True, progress=False)
            break
        except CheckpointError as error:
            refused = error
        except Exception as error:
            raise Broken(f"a run cannot be resumed after one has ended\n{what}: {_listed(output)}") from error
    else:
        raise Broken(f"a run cannot be resumed after one has ended\n{what}: {_listed(output)}") from refused
    _compare(_rows(result.model), (seed,), [settings.epochs], "resumed", what)
    result.model.close()
    left = [path.name for path in (copy / "checkpoints").iterdir()]
    if len(left) > 2 and result.steps:
        raise Broken(f"more than the last and the best checkpoint stay\n{what}: {left}")


def _compare(
    rows: tuple[Tensor, Tensor], seeds: tuple[int, ...], epochs: range | list[int], how: str, what: str
) -> None:
    if not any(all(map(torch.equal, rows, _after(seed, epoch))) for seed in seeds for epoch in epochs):
        raise Broken(f"a {how} model is not that of any epoch of a run\n{what}")


def _listed(output: Path) -> str:
    return ", ".join(str(path.relative_to(output)) for path in sorted(output.rglob("*")))


ATTACK = Attack(
    name="checkpoints",
    promise="an ncf run that ends at any instant leaves complete checkpoints, of it or of the run before",
    round=_round,
    seconds=120.0,
    quick=3,
)
