"""The goals of the benchmark, and what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disk.workload import KINDS

__all__ = ["GOALS", "accepted", "show_acceptance"]

# What is compared, the figure asked for, and whether more of it is better.
GOALS: dict[str, tuple[float, bool]] = {
    "cold gather / random reads": (0.8, True),
    "uniform steps / cold gather": (0.6, True),
    "uniform steps / mmap with prefetch": (1.7, True),
    "zipf steps / mmap with prefetch": (3.0, True),
    "uniform steps / NumPy memmap": (4.0, True),
    "zipf steps / NumPy memmap": (4.0, True),
    "uniform steps / LMDB": (4.0, True),
    "zipf steps / LMDB": (4.0, True),
    "uniform steps / RocksDB": (4.0, True),
    "zipf steps / RocksDB": (4.0, True),
    "step in the cache / pageable": (1.25, False),
    "step with lookahead / max(compute, disk)": (1.2, False),
    "bytes written / rows' bytes, uniform": (2.5, False),
    "bytes written / rows' bytes, zipf": (2.5, False),
    "file / touched rows": (2.0, False),
    "commit pause, p99, seconds": (0.1, False),
    "commit pause with an id map, p99, seconds": (0.1, False),
    "opening after a kill, seconds per 10M rows": (1.0, False),
    "resident memory / allowed": (1.0, False),
    "creation of a table, seconds": (1.0, False),
}


def accepted(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with what was reached; goals not measured here are left out."""
    cold, ids, pause = found["cold"], found["ids"], found["pauses"]
    uniform = ids["uniform"]["stores"]["speedswap"]["rows_per_second"]
    reached = {
        "uniform steps / cold gather": uniform / cold["rows_per_second"],
        **{f"{kind} steps / {name}": ratio for kind in ids for name, ratio in ids[kind]["times_faster"].items()},
        "step in the cache / pageable": found["cached"]["disk_over_pageable"],
        "step with lookahead / max(compute, disk)": max(one["lookahead_over_larger"] for one in found["overlap"]),
        **{f"bytes written / rows' bytes, {kind}": ids[kind]["written_over_rows"] for kind in ids},
        "file / touched rows": found["disk_over_rows"],
        "commit pause, p99, seconds": max(
            one["p99"] for one in (*(pause[kind] for kind in KINDS), found["cached"]["pause"])
        ),
        "commit pause with an id map, p99, seconds": max(one["pause"]["p99"] for one in found["keyed"].values()),
        "opening after a kill, seconds per 10M rows": found["kill"]["seconds_per_10m_rows"],
        "resident memory / allowed": pause["resident_bytes"] / pause["allowed_bytes"],
        "creation of a table, seconds": found["created_seconds"],
    }
    if "reads_per_second" in cold:
        reached["cold gather / random reads"] = cold["rows_per_second"] / cold["reads_per_second"]
    return [
        {"what": what, "goal": goal, "at_least": more, "reached": reached[what]}
        | {"met": reached[what] >= goal if more else reached[what] <= goal}
        for what, (goal, more) in GOALS.items()
        if what in reached
    ]


def show_acceptance(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per goal."""
    print("\nGoals:")
    for line in lines:
        sign = "≥" if line["at_least"] else "≤"
        said = "met" if line["met"] else "NOT met"
        print(f"  {line['what']:<44} {line['reached']:8.3f}  {sign} {line['goal']:<5g} {said}", flush=True)
