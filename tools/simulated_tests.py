"""Run the tests that use a device on a simulated GPU, in processes that have it from start to end.

As a command, ``python tools/simulated_tests.py all``, or ``core`` for the part that `make test` has, followed by any of
pytest's options.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import simulated_gpu  # noqa: E402

# Moving rows, and training over them: kernels, engines, the steps' waits and launches, lookahead.
CORE = [
    "tests/kernels",
    "tests/tables/test_small_tables.py",
    "tests/tables/test_stores.py",
    "tests/tables/test_table.py",
    "tests/tables/test_table_engines.py",
    "tests/swapping/collections/test_costs.py",
    "tests/swapping/collections/test_waits.py",
    "tests/swapping/test_between_steps.py",
    "tests/swapping/test_embedding_bag.py",
    "tests/swapping/test_hot_rows.py",
    "tests/swapping/test_lookahead.py",
    "tests/swapping/test_lookup.py",
    "tests/swapping/test_shared_rows.py",
    "tests/swapping/test_step_costs.py",
    "tests/ranks/test_gpu_ranks.py",
    "tests/apps/test_gpu_runs.py",
]
# Work on streams as late as a GPU may do it, and as early.
ALL = {
    "late": [
        "tests/simulated_gpu",
        "tests/kernels",
        "tests/tables",
        "tests/swapping",
        "tests/losses",
        "tests/ranks/test_gpu_ranks.py",
        "tests/apps/test_gpu_runs.py",
        "tests/test_gpu_check.py",
        "tests/benchmarks/test_ceilings.py",
        "tests/benchmarks/test_large_tables.py",
        *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/apps/test_word2vec_*.py"))),
        *("-k", "not cache"),  # slow tests there are long for the sake of caches, which are not simulated
    ],
    "ahead": [
        "tests/kernels/test_engines.py",
        "tests/swapping/test_hot_rows.py",
        "tests/swapping/test_lookahead.py",
        "tests/swapping/test_shared_rows.py",
    ],
}


def main(part: str, *options: str) -> int:
    """Return the exit status of the first run that fails, or 0."""
    reason = "there is a GPU" if torch.cuda.is_available() else simulated_gpu.unavailable()
    if reason:
        print(f"tests on a simulated GPU are left out: {reason}")
        return 0
    for policy, chosen in {"core": {"late": CORE}, "all": ALL}[part].items():
        environment = {**os.environ, "SPEEDSWAP_TEST_DEVICE": "simulated", "SPEEDSWAP_SIMULATED_POLICY": policy}
        words = [sys.executable, "-m", "pytest", "--gpu-only", *options, *chosen]
        if status := subprocess.run(words, cwd=ROOT, env=environment).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
