"""Tables larger than memory, compared with the disk's speed and, at equal memory, mapped files, NumPy, LMDB, RocksDB.

Each store runs in a separate process, in a memory cgroup where that is permitted. All are filled with the same rows,
which record the step that wrote them, take turns, and are checked while they train; then ours is killed and opened
again. docs/design/benchmarks.md says more.

    python benchmarks/bench_disk.py [--folder DIR] [--gib 3 | --rows N] [--threads 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from disk import keys, training
from disk.comparing import Contest, Turns
from disk.goals import accepted, show_acceptance
from disk.reads import RandomReads
from disk.stores import CONTESTANTS, Contestant, Limits, present
from disk.workload import KINDS, ZIPF_EXPONENT, Shape

from speedswap.apps.bench import cli, step
from speedswap.apps.bench.measure import in_ms, show_peers
from speedswap.apps.errors import BenchmarkError
from speedswap.apps.files import scratch_folder
from speedswap.cli import run_command

_CREATED = (10**9, 128)


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurement.

    Attributes:
        shape: of the stores' tables.
        cache_share: our cache over the rows' bytes.
        commit_seconds: between our commits, but where others are said.
        turns: the stores' windows.
        contestants: ours first.
        created: rows and width of the table that is only made.
        cached: of the table that fits in its cache; its steps' seconds, and those between commits.
        ahead: of the table that is trained with lookahead.
        compute: seconds of computation in its steps, over the disk's.
        keyed: of the table with an id map.
        drop: all of the system's file caches, where permitted.
    """

    shape: Shape
    cache_share: float
    commit_seconds: float
    turns: Turns
    contestants: Sequence[Contestant]
    created: tuple[int, int]
    cached: Shape
    cached_seconds: float
    cached_commits: float
    ahead: Shape
    compute: tuple[float, ...]
    repeats: int
    drop: bool
    keyed: keys.KeyPlan

    @classmethod
    def of(cls, quick: bool) -> Plan:
        if quick:
            turns = Turns(2, 0.3, 0.1, 0.2, 2048, 0.65, 512, 1.0, 0.3)
            shape, small = Shape(40_000, 128, 2048), Shape(20_000, 32, 512)
            keyed = keys.KeyPlan(100_000, 200, 100)
            return cls(shape, 1 / 4, 0.5, turns, CONTESTANTS, _CREATED, small, 1.0, 0.5, small, (1.0,), 1, False, keyed)
        turns = Turns(
            windows=5,
            seconds=2.5,
            run_in=1.0,
            warm=6.0,
            reads=65_536,
            overwritten=0.65,
            small=4096,
            pause_seconds=10.0,
            pause_commits=2.0,
        )
        return cls(
            shape=Shape(2_097_152, 384, 16_384),
            cache_share=1 / 12,
            commit_seconds=10.0,
            turns=turns,
            contestants=CONTESTANTS,
            created=_CREATED,
            cached=Shape(1_000_000, 128, 65_536),
            cached_seconds=31.0,
            cached_commits=30.0,
            ahead=Shape(1_000_000, 128, 4096),
            compute=(1.0, 2.0),
            repeats=2,
            drop=True,
            keyed=keys.KeyPlan(10_000_000, 1000, 400),
        )


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Returns:
        The figures, as JSON can hold them: ``peers``, ``workload``, ``limits``, ``created_seconds``, ``cold``,
        ``ids`` (by kind), ``disk_over_rows``, ``kill``, ``pauses``, ``cached``, ``keyed``, ``overlap`` and
        ``acceptance``.

    Raises:
        WrongResultError: a store has lost or mixed rows.
    """
    peers = present()
    show_peers(peers)
    contestants = [one for one in plan.contestants if one.package not in peers or peers[one.package].present]
    limits = Limits.of(plan.shape, plan.cache_share, plan.commit_seconds)
    found: dict[str, Any] = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "workload": {**plan.shape._asdict(), "row_bytes": plan.shape.row_bytes, "zipf_exponent": ZIPF_EXPONENT},
        "limits": limits._asdict(),
        "turns": plan.turns._asdict(),
        "ids": {},
    }
    found["created_seconds"] = training.create(folder, *plan.created)
    rows, dim = plan.created
    print(f"\n{rows:,} × {dim} with Adam's state made in {found['created_seconds']:.3f} s", flush=True)
    found |= compare(plan, limits, contestants, folder)
    found["cached"] = cached(plan, folder)
    found["keyed"] = keys.measure(folder, plan.keyed)
    found["overlap"] = overlap(plan, folder)
    found["acceptance"] = accepted(found)
    show_acceptance(found["acceptance"])
    if plan.shape.nbytes < 2 * limits.memory:
        print("  Everyone's memory holds these rows, or nearly: the goals are for larger tables.")
    return found


def compare(plan: Plan, limits: Limits, contestants: Sequence[Contestant], folder: Path) -> dict[str, Any]:
    """Measure the stores in their processes: all but what an embedding's training shows."""
    found: dict[str, Any] = {"ids": {}}
    reads = RandomReads(folder)
    with Contest(folder, plan.shape, limits, plan.turns, contestants, drop=plan.drop) as contest:
        shape = plan.shape
        said = (
            f"{shape.rows:,} rows of {shape.row_bytes:,} B, {shape.nbytes / 2**30:.2f} GiB, {shape.lookups:,} lookups"
        )
        memory, cache = (f"{size / 2**20:.0f} MiB" for size in limits[:2])
        print(f"\n{said} a step; {memory} for each store, of which our cache has {cache}", flush=True)
        for name, seconds in contest.open():
            print(f"  {name:<20} filled in {seconds['fill']:6.1f} s", flush=True)
            found["all_caches_dropped"] = bool(seconds["everything"])
        found["memory_limit"] = "memory cgroups" if contest.limited is None else "each store's own bound alone"
        print(f"  limited by {found['memory_limit']}" + (f": {contest.limited}" if contest.limited else ""), flush=True)
        found["cold"] = cold = contest.cold(reads)
        if reads.missing:
            print(f"random reads are left out: {reads.missing}")
        print(
            f"\ncold gather {_thousands(cold['rows_per_second'])} rows/s"
            + (f", random 4K reads {_thousands(cold['reads_per_second'])}/s" if "reads_per_second" in cold else ""),
            flush=True,
        )
        found["overwritten"] = contest.overwrite()
        for kind in KINDS:
            found["ids"][kind] = result = contest.train(kind)
            show_kind(kind, result)
        found["disk_over_rows"] = contest.disk_over_rows()
        contest.end_others()
        found["kill"] = kill = contest.kill()
        print(f"\nopened after a kill in {kill['seconds']:.3f} s, as of step {kill['step']:,}")
        found["pauses"] = contest.pauses()
        _show_pauses(found["pauses"], plan.turns.pause_commits)
    return found


def cached(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train a table that fits in its cache, and the same table in memory for comparison.

    Returns:
        The mean ``seconds`` of a step of each, so that the commit's share counts, the medians, and the disk's
        ``pause``.
    """
    shape = plan.cached
    laps = training.cached(folder, *shape, seconds=plan.cached_seconds, commit_seconds=plan.cached_commits)
    seconds = {name: statistics.mean(some) for name, some in laps._asdict().items()}
    medians = {name: statistics.median(some) for name, some in laps._asdict().items()}
    beyond = np.array(laps.disk) - medians["disk"]
    found = {
        **shape._asdict(),
        "commit_seconds": plan.cached_commits,
        "seconds": seconds,
        "medians": medians,
        "disk_over_pageable": seconds["disk"] / seconds["pageable"],
        "pause": {"p99": float(np.quantile(beyond, 0.99)), "largest": float(beyond.max()), "steps": len(beyond)},
    }
    print(
        f"\nA step with Adam, {shape.lookups:,} Zipf lookups in {shape.rows:,} × {shape.dim}, all of it in the cache, "
        f"a commit every {plan.cached_commits:g} s:\n"
        f"  disk {in_ms(seconds['disk'])}, pageable {in_ms(seconds['pageable'])}: {found['disk_over_pageable']:.2f} "
        f"(medians {medians['disk'] / medians['pageable']:.2f})",
        flush=True,
    )
    return found


def overlap(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Train a table larger than its cache with lookahead; time its disk and its compute alone for comparison."""
    shape = plan.ahead
    found = training.overlap(
        folder,
        *shape,
        cache_bytes=int(3 * shape.nbytes * plan.cache_share),
        compute=plan.compute,
        repeats=plan.repeats,
    )
    step.show_overlap(found)
    return found


def show_kind(kind: str, found: Mapping[str, Any]) -> None:
    """Print a line per store."""
    print(f"\nSteps with {kind} ids, by thousands of distinct rows a second:")
    for name, entry in found["stores"].items():
        ratio = found["times_faster"].get(name)
        said = "" if ratio is None else f"  speedswap is {ratio:.1f} times as fast"
        windows = ", ".join(_thousands(rate) for rate in entry["by_window"])
        print(f"  {name:<20} {_thousands(entry['rows_per_second']):>7}  ({windows}){said}")
    pause = found["pause"]
    print(
        f"  written over the rows' bytes: {found['written_over_rows']:.2f}; a step's median {in_ms(pause['median'])}, "
        f"beyond it 99% of {pause['steps']} within {in_ms(pause['p99'])}, all within {in_ms(pause['largest'])}",
        flush=True,
    )


def _show_pauses(found: Mapping[str, Any], commits: float) -> None:
    print(f"Small steps, a commit every {commits:g} s:")
    for kind in KINDS:
        one = found[kind]
        print(
            f"  {kind:<8} {in_ms(one['median'])}; beyond that 99% of {one['steps']} within {in_ms(one['p99'])}, all "
            f"within {in_ms(one['largest'])}"
        )
    print(
        f"  {found['resident_bytes'] / 2**20:.0f} MiB of memory, of {found['allowed_bytes'] / 2**20:.0f} allowed",
        flush=True,
    )


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_options(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gib", type=float, help="of each store's rows (default: 3)")
    size.add_argument("--rows", type=int, help="of each store")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the system's temporary one)")
    return run_command(partial(run, parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the file asked for."""
    if args.device not in (None, "cpu"):
        raise BenchmarkError(f"device is {args.device!r}: this benchmark measures the CPU; leave it out")
    args.device = "cpu"
    cli.prepare(args)
    if args.folder is not None and not args.folder.is_dir():
        raise BenchmarkError(f"folder is {str(args.folder)!r}, which is not a directory: give one")
    plan = _sized(Plan.of(args.quick), args.rows, args.gib)
    with ExitStack() as stack:
        scratch, remove = scratch_folder(stack, args.folder)
        stack.callback(remove)
        cli.write(args.json, "disk-cpu", measure(plan, scratch))
    return 0


def _sized(plan: Plan, rows: int | None, gib: float | None) -> Plan:
    """Return the plan with tables of ``rows`` rows, or ``gib`` GiB."""
    if gib is not None:
        rows = int(gib * 2**30) // plan.shape.row_bytes if 0 < gib < 2**20 else 0
    if rows is None:
        return plan
    least = (plan.turns.windows + 2) * plan.turns.reads
    if not least <= rows < 2**31:
        raise BenchmarkError(
            f"that is {rows:,} rows: give from {least:,} ({least * plan.shape.row_bytes / 2**30:.2f} GiB) to 2**31 - 1"
        )
    return replace(plan, shape=plan.shape._replace(rows=rows))


if __name__ == "__main__":
    sys.exit(main())
