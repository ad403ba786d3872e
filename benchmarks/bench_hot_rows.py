"""Bytes over the bus per step with a cache of hot rows, counted: its policy in NumPy, on ids with Zipf's frequencies.

Nothing is timed and no GPU takes part: rows are counted by where they are, as the kernels of csrc/hot.cuh do. Ten equal
tables of 4,000,000 × 128 float32 are one collection; one is drawn, with a tenth of the slots, and its numbers are
multiplied by ten. docs/design/hot-rows.md says more.

    python benchmarks/bench_hot_rows.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import script

from speedswap.apps.bench.measure import zipf_ranks
from speedswap.kernels.cuda import hot

SHARES = (0.01, 0.05, 0.1)
ZIPF_EXPONENT = 1.05
WIDTH = 128
# Records of weight and state, in float32: what an optimizer's step reads and writes of each row.
RECORDS = {"sgd": 4 * WIDTH, "adam": 3 * 4 * WIDTH}
ENOUGH, MOST = 8, 255  # as in csrc/hot.cuh

Rows = npt.NDArray[np.int64]


class Plan(NamedTuple):
    """Equal tables in one collection, rows and lookups per step of each; steps to warm up, and steps to count."""

    tables: int
    rows: int
    lookups: int
    warm_up: int
    steps: int

    @classmethod
    def of(cls, quick: bool) -> Plan:
        return cls(10, 40_000, 1_050, 400, 128) if quick else cls(10, 4_000_000, 104_857, 1_600, 128)


class Cache:
    """The rows of one table that a cache of all tables holds, and its counts of scatters."""

    def __init__(self, tables: int, rows: int, share: float) -> None:
        self.slots = int(share * rows)
        self.limit = min(self.slots, max(hot.LEAST_LIMIT // tables, self.slots // hot.FIRST_ADMISSIONS))
        self.scatters, self.held = np.zeros(rows, np.uint8), np.zeros(rows, bool)
        self.used = self.admitted = self.evicted = self.admissions = 0
        self._until_admission = hot.EVERY_AT_FIRST

    def count(self, rows: Rows) -> None:
        self.scatters[rows] += self.scatters[rows] < MOST

    def scatter(self, rows: Rows, expected: Rows) -> None:
        """Count a step's rows; admit, when it is time, after counting the next step's rows too."""
        self.count(rows)
        self._until_admission -= 1
        if self._until_admission == 0:
            self.admissions += 1
            self._until_admission = hot.EVERY_AT_FIRST if self.admissions < hot.FIRST_ADMISSIONS else hot.EVERY
            self.count(expected)
            self.admit()

    def admit(self) -> None:
        """Swap the hottest rows at home for the least hot ones in slots, as hot_choose and hot_pick do."""
        seen = np.flatnonzero(self.scatters)
        coming, going = seen[~self.held[seen]], np.flatnonzero(self.held)
        coming = self._first(coming, -self.scatters[coming].astype(np.int16))
        going = self._first(going, self.scatters[going])
        fresh = min(self.slots - self.used, len(coming))
        pairs = min(len(coming) - fresh, len(going))
        hotter = self.scatters[coming[fresh : fresh + pairs]] > 2 * self.scatters[going[:pairs]].astype(np.int16)
        swaps = pairs if hotter.all() else int(hotter.argmin())
        all_scatters = np.bincount(self.scatters, minlength=MOST + 1)[::-1].cumsum()[::-1]
        self.held[going[:swaps]] = False
        self.held[coming[: fresh + swaps]] = True
        self.used, self.admitted, self.evicted = self.used + fresh, self.admitted + fresh + swaps, self.evicted + swaps
        if all_scatters[ENOUGH] >= self.slots:
            self.scatters >>= 1

    def _first(self, rows: Rows, order: npt.NDArray[Any]) -> Rows:
        """Return rows in an order, as many as an admission moves."""
        return rows[np.argsort(order, kind="stable")[: self.limit]]


def distinct(plan: Plan, generator: np.random.Generator) -> Rows:
    """Draw a step's rows of one table, each once."""
    return np.unique(zipf_ranks(plan.rows, plan.lookups, ZIPF_EXPONENT, generator) - 1)


def measure(plan: Plan) -> dict[str, Any]:
    """Run the benchmark and print its figures.

    Returns:
        The figures, as JSON can hold them: ``workload``, ``distinct_rows`` per step, and per share of the rows ``hits``
        and bytes per step by optimizer: ``in``, of lookups one step ahead, whose rows shared with the step before are
        forwarded; ``out``; and ``swapped``, both ways, by admissions.
    """
    generator, before = np.random.default_rng(0), np.zeros(plan.rows, bool)
    caches = {share: Cache(plan.tables, plan.rows, share) for share in SHARES}
    sums: dict[float, npt.NDArray[np.int64]] = {share: np.zeros(3, np.int64) for share in SHARES}
    counted, moved = 0, dict.fromkeys(SHARES, 0)
    rows = distinct(plan, generator)
    for step in range(plan.warm_up + plan.steps):
        if step == plan.warm_up:
            moved = {share: -cache.admitted - cache.evicted for share, cache in caches.items()}
        following = distinct(plan, generator)
        for share, cache in caches.items():
            if step >= plan.warm_up:
                away = ~cache.held[rows]
                sums[share] += [len(rows), away.sum(), (away & ~before[rows]).sum()]
            cache.scatter(rows, following)
        before[:] = False
        before[rows] = True
        counted += len(rows) if step >= plan.warm_up else 0
        rows = following
    found: dict[str, Any] = {
        "workload": {**plan._asdict(), "zipf_exponent": ZIPF_EXPONENT, "width": WIDTH},
        "distinct_rows": plan.tables * counted / plan.steps,
        "caches": {},
    }
    for share, cache in caches.items():
        asked, scattered, gathered = plan.tables * sums[share] / plan.steps
        swaps = plan.tables * (moved[share] + cache.admitted + cache.evicted) / plan.steps
        found["caches"][f"{share:g}"] = {
            "slots": plan.tables * cache.slots,
            "slots_used": plan.tables * cache.used,
            "hits": 1 - scattered / asked,
            "bytes": {
                name: {"in": gathered * nbytes, "out": scattered * nbytes, "swapped": swaps * nbytes}
                for name, nbytes in RECORDS.items()
            },
        }
    _show(found)
    return found


def _show(found: Mapping[str, Any]) -> None:
    print(f"{found['distinct_rows']:,.0f} distinct rows per step; MB per step:")
    for share, cache in found["caches"].items():
        sizes = (
            f"{name} in {each['in'] / 1e6:.1f}, out {each['out'] / 1e6:.1f}, swapped {each['swapped'] / 1e6:.2f}"
            for name, each in cache["bytes"].items()
        )
        print(f"  {share:>5} of the rows: {cache['hits']:.1%} hits; {'; '.join(sizes)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("hot-rows", __doc__, lambda _, quick: measure(Plan.of(quick)), argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
