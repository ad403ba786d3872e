"""The command ``speedswap doctor``."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedswap.apps.doctor.findings import Finding, examine, of_disk
from speedswap.apps.doctor.places import PlaceEstimate, estimate
from speedswap.apps.doctor.rates import Rates, TableSpec
from speedswap.apps.errors import SettingsError
from speedswap.apps.options import ROW_BY_ROW
from speedswap.apps.output import check_scratch

_WIDTH = 80
_ROWS = "10_000_000"  # of the samples' table, if none is asked about


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what slows or breaks tables on this machine, and with --rows the best place for a table",
        description="Say in about ten seconds what slows or breaks tables on this machine, each with the line that "
        "mends it. With --rows, recommend a place for a table, estimate its bytes and the time of a step, and "
        "print the code. Exit status 0: nothing is broken; 1: something is; 2: an argument is wrong.",
    )
    parser.add_argument("--rows", metavar="N", help="rows of the table, such as 1e8")
    parser.add_argument("--dim", default="128", metavar="N", help="numbers in a row (default: %(default)s)")
    parser.add_argument("--optimizer", default="adam", help=f"{ROW_BY_ROW} (default: %(default)s)")
    parser.add_argument("--batch", default="65536", metavar="N", help="ids in a step (default: %(default)s)")
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where a table on disk would be (default: the current directory)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, measure, print; return the exit status."""
    rows, dim, batch = (_whole(name, getattr(args, name) or _ROWS) for name in ("rows", "dim", "batch"))
    spec = TableSpec(rows, dim, args.optimizer, batch)
    found = [*examine(spec.batch)]
    folder: Path | None = args.path or Path()
    try:
        check_scratch(folder, "path")
    except SettingsError as error:
        says, _, remedy = str(error).rpartition(": ")
        found.append(Finding("slow" if args.path is None else "broken", "disk", says, remedy))
        folder = None
    rates = Rates.measured(spec, folder)
    if folder is not None:
        found.append(of_disk(folder, rates.reads, rates.access))
    options = [*estimate(spec, rates, folder)]
    if args.json:
        document: dict[str, Any] = {"findings": [each._asdict() for each in found], "rates": asdict(rates)}
        if args.rows:
            document["table"] = {**asdict(spec), "bytes": rows * rates.record_bytes}
            document |= {"places": [each._asdict() for each in options], "recommended": _best(options).name}
        print(json.dumps(document, indent=1))
    else:
        lines = [*_of_findings(found), "", *_of_rates(spec, rates)]
        print("\n".join([*lines, "", *_of_places(spec, rates, options)] if args.rows else lines))
    return int(any(each.level == "broken" for each in found))


def _best(options: Sequence[PlaceEstimate]) -> PlaceEstimate:
    """Return the fastest place that the table fits in; enough ranks are always one."""
    return next(each for each in options if each.fits)


def _whole(name: str, text: str) -> int:
    """Read a whole number, also as 1e8."""
    try:
        number = float(text) if "e" in text.lower() else int(text)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise SettingsError(f"{name} is {text[:40]!r}: give a whole number, such as 100000000 or 1e8") from None
    return int(number)


def _of_findings(found: Sequence[Finding]) -> Iterator[str]:
    for each in sorted(found, key=lambda each: ("broken", "slow", "ok").index(each.level)):
        yield textwrap.fill(f"{each.level:<8}{each.what:<15}{each.says}", _WIDTH, subsequent_indent=" " * 23)
        if each.remedy:
            yield f"{'':<23}→ {each.remedy}"
    counts = Counter(each.level for each in found)
    yield f"\n{counts['broken']} broken, {counts['slow']} slow, {counts['ok']} ok"


def _of_rates(spec: TableSpec, rates: Rates) -> Iterator[str]:
    yield f"Measured, with rows of {rates.record_bytes:,} bytes ({spec.dim} numbers and the state of {spec.optimizer}):"
    if rates.reads is not None:
        yield f"  {'disk, random rows read':<28}{rates.reads:8,.0f} rows/s"
    for name, rate in {
        "disk, rows written": rates.writes,
        "memory, random rows read": rates.gather,
        "memory, random rows written": rates.scatter,
        "pinned memory to the GPU": rates.to_gpu,
        "the GPU to pinned memory": rates.from_gpu,
    }.items():
        if rate is not None:
            yield f"  {name:<28}{rate / 1e6:8,.0f} MB/s"


def _of_places(spec: TableSpec, rates: Rates, options: Sequence[PlaceEstimate]) -> Iterator[str]:
    size, best = spec.rows * rates.record_bytes, _best(options)
    yield f"{spec.rows:,} rows × {rates.record_bytes:,} bytes = {size / 2**30:,.1f} GiB; a step of {spec.batch:,} ids:"
    for each in options:
        took = "" if each.seconds is None else f"about {1000 * each.seconds:,.1f} ms"
        mark = "→" if each is best else " "
        yield f"{mark} {each.name:<10}{'yes' if each.fits else 'no':<5}{took:<20}{each.why}"
    yield from ("", "import speedswap, torch", best.code)
    if best.name == "ranks":
        yield "# run on each machine by torchrun, after torch.distributed.init_process_group()"
