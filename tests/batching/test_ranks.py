"""The splitter with more than one process: real jobs under torchrun, each running all scenarios of a module."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = ["replicated_scenarios", "sharded_scenarios", "lost_scenarios"]


@functools.cache
def results(world_size: int) -> tuple[dict[str, str], str]:
    """What each rank wrote of each scenario, and the job's output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    modules = [HERE / f"{module}.py" for module in MODULES]
    with tempfile.TemporaryDirectory() as directory:
        job = subprocess.run(
            [*command, HERE / "ranks_job.py", directory, *modules],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return {path.name: path.read_text() for path in Path(directory).iterdir()}, job.stderr[-5000:]


def scenarios() -> list[str]:
    found = []
    for module in MODULES:
        functions = [node for node in ast.parse((HERE / f"{module}.py").read_text()).body if hasattr(node, "name")]
        found += [f"{module}.{function.name}" for function in functions if function.name.startswith("check_")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scenario", scenarios())
def test_ranks(scenario, world_size):
    said, output = results(world_size)
    ranks = range(world_size - 1 if "check_last" in scenario else world_size)  # the last one is gone
    wrong = {rank: said.get(f"{scenario}.{rank}", f"did not get here\n{output}") for rank in ranks}
    wrong = {rank: result for rank, result in wrong.items() if result != "ok"}
    if wrong:
        pytest.fail(
            "\n".join(f"rank {rank} of {world_size}: {result}" for rank, result in wrong.items()), pytrace=False
        )
