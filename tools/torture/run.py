"""Play rounds of attacks, divide the time fairly, and report what they found."""

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
from typing import Any

import speedswap
from torture.attack import Attack
from torture.folders import emptied, removed
from torture.worker import Worker

__all__ = ["Finding", "Plan", "Result", "as_json", "as_table", "play", "round_seed"]


@dataclass(frozen=True)
class Plan:
    """The rounds to play: for ``seconds``, or in numbers by an attack's name.

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
    """Derive the seed of an attack's round from the seed of the plan."""
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
    """Return the attack that has had the least time, of the unfinished ones; None if all are done."""

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
        result.kinds.update(outcome.kinds)
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


def as_table(results: Sequence[Result]) -> str:
    """Format a line per attack with its kinds of rounds, and how often each symptom was seen."""
    width = max((len(result.attack.name) for result in results), default=6)
    lines = ["", f"{'attack':{width}}  {'rounds':>7}  {'seconds':>7}  {'skipped':>7}  {'findings':>8}  kinds"]
    for result in sorted(results, key=lambda result: result.attack.name):
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(result.kinds.items()))
        lines.append(
            f"{result.attack.name:{width}}  {result.rounds:7}  {result.seconds:7.0f}  {result.skipped.total():7}  "
            f"{len(result.findings):8}  {kinds}"
        )
    for result in results:
        for reason, count in result.skipped.most_common():
            lines.append(f"{result.attack.name}: skipped {count} times: {reason}")
    for result in results:
        for symptom, count in Counter(finding.symptom for finding in result.findings).most_common():
            first = next(finding for finding in result.findings if finding.symptom == symptom)
            lines.append(
                f"{result.attack.name}: {count} × {symptom}\n    first in round {first.number}, after "
                f"{first.seconds:.0f} s; again: {first.command}"
            )
    rounds, findings = sum(result.rounds for result in results), sum(len(result.findings) for result in results)
    return "\n".join([*lines, f"{rounds} rounds, {findings} findings"])


def as_json(results: Sequence[Result], plan: Plan) -> dict[str, Any]:
    """Return the results as plain data."""
    return {
        "seed": plan.seed,
        "attacks": {
            result.attack.name: {
                "rounds": result.rounds,
                "seconds": round(result.seconds, 1),
                "kinds": dict(result.kinds),
                "skipped": dict(result.skipped),
                "findings": [
                    {
                        "seed": finding.seed,
                        "round": finding.number,
                        "seconds": round(finding.seconds, 1),
                        "how": finding.how,
                        "symptom": finding.symptom,
                        "text": finding.text,
                    }
                    for finding in result.findings
                ],
            }
            for result in results
        },
    }
