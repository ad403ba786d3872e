"""The fixed cost of a training step: its calls of Python and C, and the files that a lookup and a scatter enter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "calls.py"
# Measured, not chosen: lower them with every change that saves calls. `python tests/calls.py` says where they are made.
MOST_CALLS = {"SGD": 297, "Adam": 357, "Adam, ten tables of a collection": 484}
MOST_FILES = {"lookup": 13, "scatter": 12}


@pytest.fixture(scope="module")
def measured() -> Any:
    command = [sys.executable, str(PROGRAM), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_step_takes_no_more_calls_than_it_did(name: str, measured: Any) -> None:
    calls = measured["calls"][name]
    assert sum(calls.values()) <= MOST_CALLS[name], calls


@pytest.mark.parametrize("name", MOST_FILES)
def test_a_walk_enters_no_more_files_than_it_did(name: str, measured: Any) -> None:
    """Every file of the package counts, whatever its functions are given."""
    files = measured["walks"][name]
    assert len(files) <= MOST_FILES[name], files
