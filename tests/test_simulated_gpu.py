"""The tests that ask for a device, run again with a simulated GPU for it: in a process that has one all its life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_gpu
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

RUNS = {
    # What takes long here is long for the sake of caches, which are not simulated.
    "late": [
        "tests/simulated_gpu",
        "tests/kernels",
        "tests/tables",
        "tests/swapping",
        "tests/ranks/test_gpu_ranks.py",
        "tests/apps/test_gpu_runs.py",
        "tests/test_gpu_check.py",
        "tests/benchmarks/test_ceilings.py",
        "tests/benchmarks/test_large_tables.py",
        *(str(path) for path in sorted(Path(REPOSITORY, "tests/apps").glob("test_word2vec_*.py"))),
        "-k",
        "not cache",
    ],
    "ahead": [
        "tests/kernels/test_engines.py",
        "tests/swapping/test_lookahead.py",
        "tests/swapping/test_shared_rows.py",
    ],
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("policy", RUNS)
def test_rows_move_and_models_train_on_a_simulated_gpu(policy: str) -> None:
    if reason := simulated_gpu.unavailable():
        pytest.skip(f"no simulated GPU: {reason}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--gpu-only", *RUNS[policy]],
        cwd=REPOSITORY,
        env={**os.environ, "SPEEDSWAP_TEST_DEVICE": "simulated", "SPEEDSWAP_SIMULATED_POLICY": policy},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
