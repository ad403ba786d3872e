"""Command lines with absurd numbers, wrong files and places that cannot be written."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from torture.attack import Attack, Broken, Skipped

__all__ = ["ATTACK"]

_SOURCE = Path(__file__).resolve().parents[2] / "tests" / "apps" / "hostile_inputs.py"
_LINES = 20


def _round(seed: int, folder: Path) -> str:
    inputs = _hostile_inputs()
    rng = random.Random(seed)
    kind = "without a model"
    if rng.random() < 0.5:
        model = ["ncf", *inputs.SMALL["ncf"], "--output", str(folder / "model")]
        subprocess.run([sys.executable, "-m", "speedswap", *model], check=True, capture_output=True, cwd=folder)
        kind = "with a model"
    lines = inputs.command_lines(rng.randrange(2**31), folder)
    failed = [
        f"{outcome.failed}, status {outcome.status}, {outcome.seconds:.1f} s: {_short(outcome.words)}: {_last(outcome)}"
        for outcome in inputs.outcomes(rng.sample(lines, _LINES), folder)
        if outcome.failed
    ]
    if failed:
        raise Broken("\n".join(failed))
    return f"{_LINES} lines {kind}"


def _hostile_inputs() -> ModuleType:
    """Load the tests' module that makes the lines and runs each in a separate process."""
    if not _SOURCE.exists():
        raise Skipped(f"the command lines are made by {_SOURCE}, which is not there")
    spec = importlib.util.spec_from_file_location("hostile_inputs", _SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostile_inputs"] = module  # where its named tuple looks for its annotations
    spec.loader.exec_module(module)
    return module


def _short(words: list[str]) -> list[str]:
    return [word if len(word) < 80 else f"{word[:60]}… ({len(word)})" for word in words]


def _last(outcome: object) -> str:
    return "".join(str(getattr(outcome, "errors", "")).strip().splitlines()[-1:])[:300]


ATTACK = Attack(
    name="commands",
    promise="every command line does its work, or says in one line what is wrong with it, and ends",
    round=_round,
    seconds=600.0,
    quick=0,  # the tests of the applications play some in every run
)
