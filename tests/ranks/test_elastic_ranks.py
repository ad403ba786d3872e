"""A job whose ranks are killed at each stage of a step and of a checkpoint, restarted by torchrun's agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import largest

JOB = Path(__file__).parent / "elastic_job.py"


@pytest.mark.release
@pytest.mark.slow
def test_job_of_four_then_three_then_five_ranks_ends_as_one_process_that_was_not_interrupted(tmp_path: Path) -> None:
    """Sixteen kills: each start goes on from the last checkpoint, with rows that other ranks own."""
    path = os.pathsep.join([str(JOB.parents[2] / "tools"), str(JOB.parents[2])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, "-W", "ignore", str(JOB), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"ranks killed, by the size of the job: {found['killed']}; steps taken: {found['steps']}")
    assert found["killed"] == {"4": 9, "3": 7, "5": 0}
    assert sum(found["steps"].values()) == 28
    assert all(found["steps"].values())
    assert largest([found["worst"].values()]) <= 1e-12, found
