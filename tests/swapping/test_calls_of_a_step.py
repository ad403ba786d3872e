"""The fixed cost of a training step, by its calls of Python and C; benchmarks/bench_small_step.py has its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "calls.py"
# As measured; `python tests/calls.py` says where they are made.
CALLS = {"SGD": 306, "Adam": 362, "Adam, ten tables of a collection": 488}
MORE = 1.15  # a change that adds more is one that users feel


@pytest.fixture(scope="module")
def measured() -> Any:
    command = [sys.executable, str(PROGRAM), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("name", CALLS)
def test_a_step_takes_hardly_more_calls_than_it_did(name: str, measured: Any) -> None:
    assert sum(measured[name].values()) <= MORE * CALLS[name], measured[name]
