"""Jobs whose ranks are killed at any instant, and that go on with another number of ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from torture.attack import Attack, Broken
from torture.elastic_training import Doom, Training, expected, train
from torture.processes import Child, Parent, child

_SECONDS = 15.0
"""In which the others notice that a rank is gone; the time limit of their rounds is longer."""


def _round(seed: int, folder: Path) -> Mapping[str, int]:
    draw = random.Random(seed)
    training = Training(
        folder, draw.choice([6, 12]), on_disk=draw.random() < 0.5, optimizer=draw.choice(["Adam", "Adagrad", "SGD"])
    )
    counts = Counter[str]()
    for start in range(draw.choice([2, 3, 4])):
        size = draw.choice([1, 2, 3, 4, 5])
        place = draw.choice(["step", "checkpoint", "checkpoint", "any time"])
        doom = Doom(draw.randrange(size), draw.randrange(3), place, draw.randrange(10 if place == "step" else 26))
        counts[_killed(training, size, doom, draw, folder / f"log-{start}")] += 1
    _finished(training, draw.choice([1, 2, 3, 4]), folder / "log-last")
    found, wanted = torch.load(folder / "result.pt"), expected(training)
    for name, value in wanted.items():
        off = float((found[name] - value).abs().max())
        if off > 1e-12:
            raise Broken(f"{name} is off by {off} after {dict(counts)}, with {training}")
    left = sorted(os.listdir(folder / "checkpoints"))
    if len(left) > 2:  # the one before stays where the first rank ended just after its last save
        raise Broken(f"former checkpoints stay: {left}")
    return counts


def _killed(training: Training, size: int, doom: Doom, draw: random.Random, log: Path) -> str:
    """Run a job in which a rank is killed; the others must exit unaided. Return where it was killed."""
    with ExitStack() as stack:
        ranks = _started(stack, training, size, doom, log)
        if doom.place == "any time":
            for each in ranks:  # before, they wait for torch's own rendezvous
                each.line(60.0)
            time.sleep(draw.random() * 1.5)
            ranks[doom.rank].kill()
        if ranks[doom.rank].wait(60.0) not in (0, -signal.SIGKILL):
            raise Broken(f"the rank that was to be killed failed\n{ranks[doom.rank].said()}")
        if ranks[doom.rank].code == 0:
            return "not killed"
        end = time.monotonic() + _SECONDS
        for each in ranks:
            code = each.wait(max(0.1, end - time.monotonic()))
            if code < 0 and each is not ranks[doom.rank]:
                raise Broken(f"a rank ended with {code} as another one was killed\n{each.said()}")
    return f"killed: {doom.place}"


def _finished(training: Training, size: int, log: Path) -> None:
    with ExitStack() as stack:
        for each in _started(stack, training, size, None, log):
            if each.wait(60.0):
                raise Broken(f"the job does not go on\n{each.said()}")


def _started(stack: ExitStack, training: Training, size: int, doom: Doom | None, log: Path) -> list[Child]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return [
        stack.enter_context(child(_rank, training, rank, size, port, doom, log=log.with_name(f"{log.name}-{rank}")))
        for rank in range(size)
    ]


def _rank(parent: Parent, training: Training, rank: int, size: int, port: int, doom: Doom | None) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(training, doom, parent)


ATTACK = Attack(
    name="elastic",
    promise="a job of ranks that are killed goes on from its last checkpoint with any number, as if it had not been",
    round=_round,
    seconds=240.0,
)
