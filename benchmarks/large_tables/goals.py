"""Goals for the workload of large tables, and what others published for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PUBLISHED", "acceptance", "fair_seconds", "show"]

# Not measured here: others' published figures for the same number of ids over larger tables, of which more are unique.
PUBLISHED: dict[str, Any] = {
    "measured_here": False,
    "library": "FBGEMM, tables in host memory that the GPU reads and writes (MANAGED), no cache",
    "source": "NVIDIA/recsys-examples, corelib/dynamicemb/benchmark/benchmark_results.json",
    "gpu": "H100 80GB",
    "tables": 10,
    "rows": 26_800_000,
    "dim": 128,
    "lookups": 1_048_570,
    "unique_rows": 433_723,
    "zipf_exponent": 1.05,
    "seconds": {"sgd": 13.56e-3, "adam": 24.05e-3},
}
_WAYS = ("", "-zero-copy", "-staged-out", "-scatter-0.2")
# Milliseconds of the collection's step with lookahead: what is asked of each run, in whatever shares rows go, and what
# docs/design/engines.md computes for an H100 in these ways.
_STEPS_MS = {
    "adam": (14.0, (9.4, 15.4, 9.4, 9.4)),
    "sgd": (6.0, (4.2, 9.0, 4.2, 5.2)),
    "bfloat16": (10.0, (6.4, 13.4, 6.4, 7.8)),
    "adam-hot": (7.0, (4.6, 9.4, 4.6, 5.8)),
}
ASKED_MS = {f"{run}{way}": asked for run, (asked, _) in _STEPS_MS.items() for way in _WAYS}
COMPUTED_MS = {
    f"{run}{way}": computed
    for run, (_, by_way) in _STEPS_MS.items()
    for way, computed in zip(_WAYS, by_way, strict=True)
}
WIDE_ROW_BYTES = 1536
# Rows over a contiguous copy, in either direction: wide ones, and others of 512 bytes and more.
ASKED_OF_COPY = {True: 0.85, False: 0.75}
ASKED_OVER_GPU = 1.15  # a table in host memory whose rows all fit among the hot ones, over one on the GPU
STEP = "speedswap, lookahead"


def fair_seconds(optimizer: str, unique_rows: int) -> float | None:
    """Return the published time, brought to the unique rows of a step of ours; None if nothing was published for it.

    The published step moves more rows, and is bound by moving them.
    """
    published = PUBLISHED["seconds"].get(optimizer)
    return None if published is None else float(published * unique_rows / PUBLISHED["unique_rows"])


def acceptance(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the runs, by name, with what is asked; a goal is met at full size alone."""
    lines: list[dict[str, Any]] = []

    def add(what: str, asked: float, unit: str, reached: float | None, at_most: bool, *measured: str) -> None:
        full = reached is not None and all(runs[name]["full_size"] for name in measured)
        good = reached is not None and (reached <= asked if at_most else reached >= asked)
        lines.append(
            {"what": what, "asked": asked, "unit": unit, "at_most": at_most, "reached": reached}
            | {"full_size": full, "met": full and good}
        )

    for name, asked in ASKED_MS.items():
        took = _seconds(runs, name)
        add(f"a step of the collection with lookahead: {name}", asked, "ms", took and 1000 * took, True, name)
        lines[-1]["computed"] = COMPUTED_MS[name]
        if took:
            fair = runs[name].get("fair_seconds")
            lines[-1]["over_floor"] = runs[name]["trainers"][STEP].get("over_floor")
            lines[-1]["over_published"] = took / fair if fair else None
    for name in ("adam", "sgd"):
        if "store_alone" in runs.get(name, {}):
            alone, copies = runs[name]["store_alone"], runs[name]["floor"]
            asked = ASKED_OF_COPY[runs[name].get("row_bytes", 0) >= WIDE_ROW_BYTES]
            for way in ("in", "out"):
                add(f"rows of {name} moved {way}", asked, "of a copy", copies[way] / alone[way], False, name)
    hot, near = (_seconds(runs, name) for name in ("fits-hot", "fits-gpu"))
    reached = hot / near if hot and near else None
    add(
        "a table that fits among its hot rows",
        ASKED_OVER_GPU,
        "× one on the GPU",
        reached,
        True,
        "fits-hot",
        "fits-gpu",
    )
    return lines


def _seconds(runs: Mapping[str, Any], name: str) -> float | None:
    entry = runs.get(name, {}).get("trainers", {}).get(STEP)
    return None if entry is None else float(entry["seconds"])


def show(found: Mapping[str, Any]) -> None:
    """Print milliseconds per step, over the bus's floor, published figures, and the goals."""
    work = found["workload"]
    print(f"\nA step of {work['lookups']:,} lookups in {work['tables']} tables, {work['dim']} wide:")
    for name, run in found["runs"].items():
        print(
            f"  {name}: {run['optimizer']}, {run['place'] or 'others'}"
            + (f": {run['skipped']}" if "skipped" in run else "")
        )
        if "store_alone" in run:
            floor, alone = run["floor"], run["store_alone"]
            print(
                f"    {run['tables']} × {run['rows']:,} rows, {run['table_bytes'] / 2**30:.1f} GiB (made in "
                f"{run['setup_seconds']:.1f} s), {run['unique_rows']:,} unique per step, "
                f"{run['bytes_each_way'] / 1e6:.0f} MB each way; floor {1000 * floor['both']:.2f} ms "
                f"({floor['gb_per_second_each_way']:.1f} GB/s each way at once); the rows alone: in "
                f"{1000 * alone['in']:.2f} ms, {floor['in'] / alone['in']:.2f} of a copy; out "
                f"{1000 * alone['out']:.2f} ms, {floor['out'] / alone['out']:.2f}"
            )
        for trainer, entry in run["trainers"].items():
            if "seconds" not in entry:
                print(f"    {trainer:<32} left out: {entry['skipped']}")
                continue
            over = f", {entry['over_floor']:.2f} of the floor" if "over_floor" in entry else ""
            fewer = f", {entry['rows']:,} rows" if entry.get("rows", work["rows"]) != work["rows"] else ""
            print(f"    {trainer:<32} {1000 * entry['seconds']:9.3f} ms{over}{fewer}")
        if run.get("fair_seconds"):
            fair = 1000 * run["fair_seconds"]
            print(f"    published, brought to these unique rows: {fair:.1f} ms, {PUBLISHED['library']}")
    for line in found["acceptance"]:
        reached = "not measured" if line["reached"] is None else f"{line['reached']:.2f}"
        size = "" if line["full_size"] or line["reached"] is None else ", smaller than what is asked for"
        asked = f"{line['asked']:g} {line['unit']}" + (
            f" (computed {line['computed']:g})" if "computed" in line else ""
        )
        print(f"  {line['what']}: asked {asked}, reached {reached}{size}", flush=True)
