"""Training steps over ten large tables in host memory, compared with the bus's floor and FBGEMM.

python benchmarks/bench_tables.py [--device cpu|cuda] [--quick] [--rows N] [--only RUNS] [--profile FOLDER]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from large_tables.measuring import RUNS, Plan, measure

from speedswap.apps.bench import cli
from speedswap.apps.bench.measure import machine
from speedswap.apps.errors import BenchmarkError
from speedswap.apps.files import check_output
from speedswap.cli import run_command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_options(parser)
    parser.add_argument("--rows", type=int, help="of each table, also where memory has to grow first, as it is used")
    parser.add_argument("--only", help=f"runs, with commas between them, of {', '.join(RUNS)}; they join those in FILE")
    parser.add_argument("--seconds", type=float, help="be done in this time, with fewer rows if need be")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="write torch.profiler's trace of a few steps here, and its picture",
    )
    return run_command(partial(run, parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files asked for; return 1 where one of our trainers failed, else 0."""
    device = cli.prepare(args)
    if args.profile is not None:
        check_output(args.profile, option="profile")
    plan = Plan.of(device, args.quick)
    if args.seconds is not None:
        if not args.seconds > 0:
            raise BenchmarkError(f"seconds is {args.seconds:g}: give a number above 0")
        plan = replace(plan, seconds=args.seconds)
    if args.rows is not None:
        if args.rows < 1:
            raise BenchmarkError(f"rows is {args.rows}: give 1 or more")
        plan = replace(plan, shape=plan.shape._replace(rows=args.rows), grows=True)
    only = [name.strip() for name in (args.only or "").split(",") if name.strip()]
    if unknown := set(only) - set(RUNS):
        raise BenchmarkError(f"only has {', '.join(sorted(unknown))}; choose among {', '.join(RUNS)}")
    before = earlier(args.json) if only and args.json is not None and args.json.exists() else None
    keep = partial(cli.write, args.json, f"tables-{device}")
    found = measure(device, plan, only=only, before=before, profile_to=args.profile, keep=keep)
    keep(found)
    return 1 if any(line.partition(": ")[0] in (only or RUNS) for line in found["failed"]) else 0


def earlier(path: Path) -> dict[str, Any] | None:
    """Return the figures of a file if they are of this machine and these sources, which others may join."""
    document, now = json.loads(path.read_text()), machine()
    alike = all(document["machine"][name] == now[name] for name in ("commit", "gpu", "processor", "torch"))
    return document["results"] if alike else None


if __name__ == "__main__":
    sys.exit(main())
