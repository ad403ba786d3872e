"""How every benchmark measures: verify, warm up, time the candidates in turn, take medians, write JSON.

In turn, because a machine's speed drifts: what slows one candidate down then slows down the others as well.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedswap
from speedswap.kernels import engine_info

__all__ = ["in_turn", "machine", "synchronize", "write_json"]

REST_SECONDS = 0.01


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turn(candidates: Mapping[str, Callable[[int], object]], *, repeats: int, warm_up: int = 2) -> dict[str, float]:
    """Time each candidate ``repeats`` times, one after the other, and return the medians in seconds.

    Each time it is called twice, and the second call counts: the first one wakes its threads, while those of the
    candidate before it (OpenMP's spin for milliseconds after their work) go to sleep. It is called with a number that
    no call had before, so that it can take other rows: none finds in the cache what another has brought there.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    call = 0
    for repeat in range(warm_up + repeats):
        for name, candidate in candidates.items():
            time.sleep(REST_SECONDS)
            candidate(call)
            synchronize()
            begin = time.perf_counter()
            candidate(call + 1)
            synchronize()
            took = time.perf_counter() - begin
            call += 2
            if repeat >= warm_up:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def machine() -> dict[str, Any]:
    """What was measured on: processor, memory, GPU, versions, commit. Nothing that names the machine itself."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "undisturbed": os.sched_getscheduler(0) != os.SCHED_OTHER,  # by real-time priority: chrt -f 1
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "speedswap": speedswap.__version__,
        "engine": engine_info(),
        "commit": _commit(),
    }


def write_json(path: Path, benchmark: str, results: Mapping[str, Any]) -> None:
    """Write the results with the machine they are of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "machine": machine(), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine()


def _commit() -> str | None:
    """The commit, with + where files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
