"""Measuring, for every benchmark: find the peers, time the candidates in turn, take medians, write JSON.

Candidates take turns because a machine's speed drifts: a disturbance then hits all of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

import speedswap
from speedswap._machine import available_bytes, physical_bytes, processor
from speedswap.apps.files import write_given
from speedswap.apps.info import driver_version
from speedswap.kernels import capabilities

ENOUGH_SECONDS = 10.0  # of timed calls of a candidate; mapped files may take that long for one
REST_SECONDS = 0.01
_SHARE_OF_MEMORY = 0.8

Name = TypeVar("Name", bound=Hashable)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turn(candidates: Mapping[Name, Callable[[int], object]], *, repeats: int, warm_up: int = 2) -> dict[Name, float]:
    """Time each candidate ``repeats`` times, one after the other, and return the medians in seconds.

    >>> list(in_turn({"sort": lambda call: sorted(range(100))}, repeats=3))
    ['sort']

    Each time it is called twice, and the second call counts: the first one wakes its threads, while those of the
    candidate before it (OpenMP's spin for milliseconds after their work) go to sleep. Each call gets a new number, so
    that it can take other rows: no call finds its rows in the cache. A candidate whose timed calls have taken
    :data:`ENOUGH_SECONDS` is called no more: its median is that of fewer.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    calls = itertools.count()
    for repeat in range(warm_up + repeats):
        for name, candidate in candidates.items():
            if sum(seconds[name]) > ENOUGH_SECONDS:
                continue
            time.sleep(REST_SECONDS)
            candidate(next(calls))
            synchronize()
            begin = time.perf_counter()
            candidate(next(calls))
            synchronize()
            took = time.perf_counter() - begin
            if repeat >= warm_up:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def steps_in_turn(
    loops: Mapping[Name, Callable[[int], Iterator[None]]], *, steps: int, repeats: int, warm_up: int = 1
) -> dict[Name, float]:
    """Time training loops in turn and return the medians in seconds per step.

    Args:
        loops: each is called with the number of the repeat, and yields after each of its steps.
        steps: their number, at least 4. The time from the end of the second to the end of the last but one counts: by
            then threads are awake and the next batch is prefetched, and the last step has nothing to wait for.
        repeats: timed loops of each.
        warm_up: loops before those.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in loops}
    for repeat in range(warm_up + repeats):
        for name, loop in loops.items():
            time.sleep(REST_SECONDS)
            ends = {}
            for step, _ in enumerate(loop(repeat)):
                if step in (1, steps - 2):
                    synchronize()
                    ends[step] = time.perf_counter()
            if repeat >= warm_up:
                seconds[name].append((ends[steps - 2] - ends[1]) / (steps - 3))
    return {name: statistics.median(times) for name, times in seconds.items()}


def in_ms(seconds: float) -> str:
    """Return seconds as tables show them."""
    return f"{1000 * seconds:8.3f} ms"


def spare_bytes() -> int:
    """Return the bytes of memory that may be taken."""
    return int(_SHARE_OF_MEMORY * available_bytes())


def lacking(nbytes: int) -> str | None:
    """Return why that many bytes of memory should not be taken, or None."""
    return None if nbytes <= spare_bytes() else f"{nbytes / 2**30:.1f} GiB of memory are not free"


def machine() -> dict[str, Any]:
    """Describe the machine: processor, memory, GPU, versions, commit; without its name."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "undisturbed": os.sched_getscheduler(0) != os.SCHED_OTHER,  # by real-time priority: chrt -f 1
        "memory_gib": round(physical_bytes() / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver_version(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "speedswap": speedswap.__version__,
        "engine": capabilities(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def write_json(path: Path, benchmark: str, results: Mapping[str, Any]) -> None:
    """Write the results with their machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "machine": machine(), "results": results}
    with write_given(path) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def _commit() -> str | None:
    """Return what SPEEDSWAP_COMMIT says, or else the commit, with + where files differ; None outside a repository."""
    if said := os.environ.get("SPEEDSWAP_COMMIT"):
        return said
    here = Path(__file__).resolve()
    described = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    # A repository around an installed package is another's, and does not know this file.
    for words in (["ls-files", "--error-unmatch", here.name], described):
        try:
            done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    return done.stdout.strip()


# ---- other libraries on this machine, found at run time --------------------------------------------------------------


class Peer(NamedTuple):
    """A library: its version, or None and why it cannot be measured here."""

    version: str | None
    missing: str | None = None

    @property
    def present(self) -> bool:
        return self.missing is None


def find_peer(module: str, distribution: str, remedy: str | None = None) -> Peer:
    """Import a library; if it is missing or built for another torch, say so."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return Peer(None, f"not installed: {remedy or error}")
    except Exception as error:  # a library built for another torch fails in many ways
        return Peer(None, f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    version = getattr(found, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    return Peer(str(version))


def show_peers(peers: Mapping[str, Peer]) -> None:
    """Print each library's version, or why it is left out."""
    for name, peer in peers.items():
        print(f"{name}: {peer.version if peer.present else f'left out, {peer.missing}'}", flush=True)
