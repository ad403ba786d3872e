"""Play rounds of attacks, the time divided fairly, and keep what they found."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import speedswap
from torture.attack import Attack
from torture.folders import emptied, removed
from torture.worker import Worker

__all__ = ["Finding", "Plan", "Result", "play", "round_seed"]


@dataclass(frozen=True)
class Plan:
    """What to play: for ``seconds``, or numbers of rounds by an attack's name.

    Attributes:
        attacks: those that take part.
        seed: from which every round's seed follows.
        repeated: the seed of every round instead.
    """

    attacks: Sequence[Attack]
    seed: int
    seconds: float = float("inf")
    rounds: Mapping[str, int] = field(default_factory=dict)
    repeated: int | None = None


@dataclass(frozen=True)
class Finding:
    """A promise that did not hold, or a crash or a hang.

    Attributes:
        attack: its name.
        seed: of the round, which is played again from it.
        number: of the round, from 1.
        seconds: that this attack had been at it.
        how: ``broken``, ``error``, ``crash`` or ``hang``.
        text: all that is known.
    """

    attack: str
    seed: int
    number: int
    seconds: float
    how: str
    text: str

    @property
    def symptom(self) -> str:
        """The first line without what differs from round to round: equal for what is probably one cause."""
        first = (self.text.strip().splitlines() or [""])[0]
        return re.sub(r"\d+", "#", re.sub(r"'?/[^\s:,;']*'?", "PATH", f"{self.how}: {first}"))[:160]

    @property
    def command(self) -> str:
        """Play the round again."""
        path = os.environ.get("PYTHONPATH", "tools")
        return f"PYTHONPATH={shlex.quote(path)} {sys.executable} -m torture --repeat {self.attack}:{self.seed}"


@dataclass
class Result:
    """The counts of one attack."""

    attack: Attack
    rounds: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def round_seed(seed: int, attack: str, number: int) -> int:
    """The seed of an attack's round, from the one seed of all."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{attack}/{number}".encode()).digest()[:4], "big")


def play(plan: Plan) -> list[Result]:
    """Play until the plan is done or Ctrl-C is pressed; each finding is printed at once."""
    results = [Result(attack) for attack in plan.attacks]
    print(f"Attacking {Path(speedswap.__file__).parent}, seed {plan.seed}", flush=True)
    with _room() as room, contextlib.suppress(KeyboardInterrupt), _workers(results, room) as workers:
        end = time.monotonic() + plan.seconds
        while time.monotonic() < end and (result := _next(plan, results)) is not None:
            _play_one(plan, result, workers[result.attack.name], room / result.attack.name)
    return results


def _next(plan: Plan, results: Sequence[Result]) -> Result | None:
    """The attack that has had the least time, of those that are not done."""

    def is_done(result: Result) -> bool:
        cannot = result.skipped and result.rounds >= 3 and result.skipped.total() == result.rounds
        return bool(cannot) or result.rounds >= plan.rounds.get(result.attack.name, sys.maxsize)

    return min((result for result in results if not is_done(result)), key=lambda result: result.seconds, default=None)


def _play_one(plan: Plan, result: Result, worker: Worker, folder: Path) -> None:
    name, number = result.attack.name, result.rounds + 1
    seed = round_seed(plan.seed, name, number) if plan.repeated is None else plan.repeated
    start = time.monotonic()
    with emptied(folder):
        outcome = worker.play(seed, folder)
    result.rounds += 1
    result.seconds += time.monotonic() - start
    if outcome.how == "held":
        result.kinds[outcome.text] += 1
    elif outcome.how == "skipped":
        result.skipped[outcome.text] += 1
    else:
        _found(result, Finding(name, seed, number, result.seconds, outcome.how, outcome.text))


def _found(result: Result, finding: Finding) -> None:
    """Keep a finding and print it, in full where it is the first of its kind."""
    is_new = all(finding.symptom != other.symptom for other in result.findings)
    result.findings.append(finding)
    first, *others = finding.text.strip().splitlines() or ["nothing is known"]
    print(f"FOUND by {finding.attack}, round {finding.number}: {finding.how}: {first}")
    if is_new:
        for line in others:
            print(f"    {line}")
    print(f"    again: {finding.command}", flush=True)


@contextlib.contextmanager
def _room() -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix="torture-")).resolve()
    try:
        yield room
    finally:
        removed(room)


@contextlib.contextmanager
def _workers(results: Sequence[Result], room: Path) -> Iterator[dict[str, Worker]]:
    workers = {result.attack.name: Worker(result.attack, room / f"{result.attack.name}.log") for result in results}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.end()
