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
from speedswap.apps.doctor.models import built, embeddings
from speedswap.apps.doctor.places import PlaceEstimate, TableAdvice, advise, lines
from speedswap.apps.doctor.rates import TableSpec
from speedswap.apps.errors import SettingsError
from speedswap.apps.options import ROW_BY_ROW
from speedswap.apps.output import check_scratch

_WIDTH = 80
_ROWS = "10_000_000"  # of the samples' table, if none is asked about


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what slows or breaks tables on this machine, and the best places for a table or a model's embeddings",
        description="Say in about ten seconds what slows or breaks tables on this machine, each with the line that "
        "mends it. With --rows or --model, recommend places for a table or a model's embeddings, estimate bytes and "
        "the time of a step, and print the code. Exit status 0: nothing is broken; 1: something is; 2: an argument is "
        "wrong.",
    )
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--rows", metavar="N", help="rows of the table, such as 1e8")
    tables.add_argument("--model", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION, which returns the model")
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
    sample = TableSpec(rows, dim, args.optimizer, batch)
    specs, found = [sample] if args.rows else [], [*examine(batch)]
    if args.model is not None:
        specs, finding = embeddings(built(args.model), sample)
        found.append(finding)
    folder: Path | None = args.path or Path()
    try:
        check_scratch(folder, "path")
    except SettingsError as error:
        says, _, remedy = str(error).rpartition(": ")
        found.append(Finding("slow" if args.path is None else "broken", "disk", says, remedy))
        folder = None
    tables = advise(specs or [sample], folder)
    largest = tables[-1]
    if folder is not None:
        found.append(of_disk(folder, largest.rates.reads, largest.rates.access))
    code = lines(tables, is_model=args.model is not None)
    if args.json:
        document: dict[str, Any] = {"findings": [each._asdict() for each in found], "rates": asdict(largest.rates)}
        if specs:
            document |= {"tables": [*map(_as_json, tables)], "code": code}
        print(json.dumps(document, indent=1))
    else:
        print("\n".join([*_of_findings(found), "", *_of_rates(largest)]))
        if specs:
            print("\n".join(["", *(_of_places(largest) if len(tables) == 1 else _of_tables(tables)), "", code]))
    return int(any(each.level == "broken" for each in found))


def _as_json(table: TableAdvice) -> dict[str, Any]:
    places = [each._asdict() for each in table.options]
    return {**asdict(table.spec), "bytes": table.nbytes, "places": places, "recommended": table.best.name}


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


def _of_rates(table: TableAdvice) -> Iterator[str]:
    spec, rates, _ = table
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


def _of_places(table: TableAdvice) -> Iterator[str]:
    spec = table.spec
    size = f"{spec.rows:,} rows × {table.rates.record_bytes:,} bytes = {_gib(table)}"
    yield f"{size}; a step of {spec.batch:,} ids:"
    for each in table.options:
        mark = "→" if each is table.best else " "
        yield f"{mark} {each.name:<10}{'yes' if each.fits else 'no':<5}{_step_time(each):<20}{each.why}"


def _of_tables(tables: Sequence[TableAdvice]) -> Iterator[str]:
    yield f"Embeddings, their places, and a step of {tables[0].spec.batch:,} ids in each:"
    for each in tables:
        rows = f"{each.spec.rows:,} × {each.spec.dim}"
        yield f"  {each.spec.name:<17}{rows:>20}{_gib(each):>12}  {each.best.name:<10}{_step_time(each.best)}"


def _gib(table: TableAdvice) -> str:
    return f"{table.nbytes / 2**30:,.1f} GiB"


def _step_time(place: PlaceEstimate) -> str:
    return "" if place.seconds is None else f"about {1000 * place.seconds:,.1f} ms"
