"""Measuring, for every benchmark: draw ids, find the peers, time the candidates in turn, take medians, write JSON.

Candidates take turns because a machine's speed drifts: a disturbance then hits all of them. No cache has seen the rows
of a batch, unless the workload says so.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap._machine import available_bytes, cache_bytes, physical_bytes, processor
from speedswap.apps.files import write_given
from speedswap.apps.info import driver_version
from speedswap.kernels import capabilities

# Memory is read in whole lines, even for narrower rows.
_LINE_BYTES = 64
# Prime, and larger than any table: multiplying by it permutes the rows and leaves no two common ones side by side.
_SPREAD = 2_654_435_761


class IdBatch(NamedTuple):
    """The same ids twice: in host memory, where a loader makes them, and on the compute device."""

    host: Tensor
    near: Tensor


def random_batches(num_rows: int, batch_rows: int, row_bytes: int, device: str, *, seed: int = 0) -> list[IdBatch]:
    """Draw batches of random rows; no row is in two of them.

    Args:
        num_rows: rows of the table, at least ``2 * batch_rows``.
        batch_rows: distinct rows in a batch.
        row_bytes: bytes of a row.
        device: of ``IdBatch.near``.
        seed: of the draw.

    Returns:
        At least two; enough to touch sixteen times the processor's cache, where the table is that large. Taken in turn,
        none finds its rows in the cache.
    """
    enough = -(-16 * cache_bytes() // (batch_rows * max(row_bytes, _LINE_BYTES)))
    count = max(2, min(num_rows // batch_rows, enough))
    generator = torch.Generator().manual_seed(seed)
    if 2 * count * batch_rows > num_rows:
        ids = torch.randperm(num_rows, generator=generator)
    else:
        ids = torch.randint(num_rows, (2 * count * batch_rows,), generator=generator)
        ids, _ = kernels.unique(ids)
        ids = ids[torch.randperm(len(ids), generator=generator)]
    hosts = [ids[i * batch_rows : (i + 1) * batch_rows].clone() for i in range(count)]
    return [IdBatch(host, host.to(device)) for host in hosts]


def renumbered(batches: Sequence[IdBatch], lookups: int) -> list[IdBatch]:
    """Return the first ids of batches, numbered from 0 by their size.

    >>> ids = torch.tensor([70, 5, 70, 9])
    >>> [batch.host.tolist() for batch in renumbered([IdBatch(ids, ids)], 3)]
    [[1, 0, 1]]
    """
    hosts = [batch.host[:lookups] for batch in batches]
    _, ids = torch.unique(torch.cat(hosts), return_inverse=True)
    return [IdBatch(host, host.to(batches[0].near.device)) for host in ids.split(len(hosts[0]))]


def zipf_ranks(num_rows: int, count: int, exponent: float, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw ranks from 1 to ``num_rows`` with probability proportional to ``rank ** -exponent``.

    By rejection-inversion (W. Hörmann, G. Derflinger: Rejection-inversion to generate variates from monotone discrete
    distributions, 1996): exact, and without a table of ``num_rows`` probabilities.

    Args:
        num_rows: the number of ranks.
        count: number of draws.
        exponent: above 0, not 1.
        generator: NumPy's.

    >>> zipf_ranks(3, 5, 1.05, np.random.default_rng(0)).tolist()
    [1, 2, 3, 3, 1]
    """
    power = 1.0 - exponent

    def integral(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray((x**power - 1.0) / power)

    def inverse(y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray((1.0 + power * y) ** (1.0 / power))

    low, high = integral(np.array([1.5, num_rows + 0.5])) - np.array([1.0, 0.0])
    sure = 2.0 - inverse(integral(np.array(2.5)) - 2.0**-exponent)
    drawn: list[npt.NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        y = high + generator.random(missing) * (low - high)
        x = inverse(y)
        rank = np.clip(np.floor(x + 0.5), 1, num_rows)
        accepted = (rank - x <= sure) | (y >= integral(rank + 0.5) - rank**-exponent)
        drawn.append(rank[accepted].astype(np.int64))
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def spread_ids(num_rows: int, count: int, exponent: float, generator: np.random.Generator) -> Tensor:
    """Draw ids, int64, with Zipf's frequencies, the common rows spread over the whole table.

    Args:
        num_rows, count, exponent, generator: as for :func:`zipf_ranks`; the rank of each row is always the same.
    """
    return torch.from_numpy(zipf_ranks(num_rows, count, exponent, generator) * _SPREAD % num_rows)


def zipf_batches(
    num_rows: int, lookups: int, batches: int, device: str, *, exponent: float = 1.05, seed: int = 0
) -> list[IdBatch]:
    """Draw batches of ids as training looks them up: Zipf's frequencies, the common rows spread over the whole table.

    Args:
        num_rows: rows of the table.
        lookups: ids in a batch; common ones occur many times.
        batches: their number.
        device: of ``IdBatch.near``.
        exponent: Zipf's.
        seed: of the draw; the rank of each row is the same for every seed.
    """
    generator = np.random.default_rng(seed)
    hosts = [spread_ids(num_rows, lookups, exponent, generator) for _ in range(batches)]
    return [IdBatch(host, host.to(device)) for host in hosts]


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


def host_memory(device: str) -> str:
    """Return the name of the place in host memory that a device's rows come from."""
    return "pageable" if device == "cpu" else "pinned"


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


# ---- other libraries on this machine --------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A library: its version, or None and why it cannot be measured here."""

    version: str | None
    missing: str | None = None

    @property
    def present(self) -> bool:
        return self.missing is None


def show_peers(peers: Mapping[str, Peer]) -> None:
    """Print each library's version, or why it is left out."""
    for name, peer in peers.items():
        print(f"{name}: {peer.version if peer.present else f'left out, {peer.missing}'}", flush=True)
