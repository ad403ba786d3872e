"""The limits of a machine, and how close the engines come to them.

    python benchmarks/bench_ceilings.py [--device cpu|cuda] [--quick] [--probe] [--gib 1,10,60] [--json FILE]
        [--plot FILE]

docs/design/benchmarks.md has the measurements and the keys of the JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import ceilings

from speedswap.apps.bench import cli
from speedswap.apps.bench.plots import arrange, from_zero
from speedswap.apps.bench.transfer import DIRECTIONS
from speedswap.apps.errors import BenchmarkError
from speedswap.cli import run_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_options(parser)
    parser.add_argument("--gib", help="sizes of the tables, whatever memory seems free: it may grow as it is used")
    parser.add_argument("--seconds", type=float, help="be done in this time, with fewer measurements if need be")
    parser.add_argument("--probe", action="store_true", help="rows of 1,536 bytes out of 8 GiB alone, on a GPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures here, PNG or SVG by the name")
    return run_command(partial(run, parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files asked for; return 1 where a kind of figures could not be measured, else 0."""
    device = cli.prepare(args, args.plot)
    plan = ceilings.Plan.of(device, args.quick)
    if args.probe:
        plan = plan.as_probe()
    if args.gib is not None:
        try:
            # In whole rows of every width.
            footprints = tuple(sorted(int(float(each) * 2**18) * 2**12 for each in args.gib.split(",")))
        except ValueError as error:
            raise BenchmarkError(f"gib is {args.gib!r}: give numbers, with commas between them") from error
        plan = replace(plan, footprints=footprints, exact=True)
    if args.seconds is not None:
        plan = replace(plan, seconds=args.seconds)
    keep = partial(cli.write, args.json, f"ceilings-{device}")
    found = ceilings.run(device, plan=plan, keep=keep)
    keep(found)
    cli.draw(args.plot, {"ceilings": ceilings_figure(found)} if args.plot is not None else {})
    return 1 if found["failed"] else 0


def ceilings_figure(found: Mapping[str, Any]) -> Figure:
    """Draw GB/s by the bytes of a row: engines, others' ways and the machine's limits, by direction and table size.

    Args:
        found: what :func:`machine.ceilings.run` returns; without a GPU, the CPU's threads are drawn. Omitted
            measurements have no panel.
    """
    points = sorted(found.get("rows", []), key=lambda point: int(point["row_bytes"]))
    if not points:
        return arrange([[partial(_threads, found=found)] if found["cpu"] else []])
    of_size = {
        size: [point for point in points if point["footprint_bytes"] == size]
        for size in sorted({point["footprint_bytes"] for point in points})
    }
    return arrange(
        [
            [
                partial(_ways, points=some, way=way, size=size)
                for way in DIRECTIONS
                if any(point["rates"][way] for point in some)
            ]
            for size, some in of_size.items()
        ]
    )


def _ways(axes: Axes, points: Sequence[Any], way: str, size: int) -> None:
    axes.set_title(f"{way.replace('_', ' the ')}, {size / 2**30:.1f} GiB")
    for name in dict.fromkeys(name for point in points for name in point["rates"][way]):
        there = [point for point in points if name in point["rates"][way]]
        speeds = [point["rates"][way][name] / 1e9 for point in there]
        ceiling = name in ("kernel", "kernel, unsorted", "copy engine")
        axes.plot([p["row_bytes"] for p in there], speeds, ":" if ceiling else "-", marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a row")
    axes.set_ylabel("GB/s; dotted: the machine's limits")
    from_zero(axes)
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


def _threads(axes: Axes, found: Mapping[str, Any]) -> None:
    for row_bytes in sorted({entry["row_bytes"] for entry in found["cpu"]}):
        some = [entry for entry in found["cpu"] if entry["row_bytes"] == row_bytes]
        for what, style in (("gather", "-"), ("scatter", "--")):
            speeds = [entry[what] / 1e9 for entry in some]
            axes.plot([e["threads"] for e in some], speeds, style, marker=".", label=f"{what}, {row_bytes} B")
    axes.set_xticks(sorted({entry["threads"] for entry in found["cpu"]}))
    axes.set_xlabel("threads of the CPU")
    axes.set_ylabel("GB/s")
    from_zero(axes)
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
