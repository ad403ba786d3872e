"""The command ``speedswap doctor``."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedswap.apps.doctor.findings import Finding, examine, of_disk
from speedswap.apps.doctor.places import Rates, TableAdvice, TableSpec, advise, built, embeddings, lines
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.files import check_scratch
from speedswap.apps.options import ROW_BY_ROW, in_gib

_WIDTH = 80
_ROWS = "1e7"  # of the samples' table, if none is asked about


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
        "--path", type=Path, default=Path(), metavar="DIR", help="for tables on disk (default: the current directory)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, measure, print; return the exit status."""
    given = {"rows": _ROWS if args.rows is None else args.rows, "dim": args.dim, "batch": args.batch}
    rows, dim, batch = (_whole(name, text) for name, text in given.items())
    sample = TableSpec(rows, dim, args.optimizer, batch)
    check_scratch(args.path, "path")
    specs, found, code = [sample] if args.rows else [], list[Finding](), ""
    if args.model is not None:
        specs, finding = embeddings(built(args.model), sample)
        found.append(finding)
    tables, rates = advise(specs or [sample], args.path)
    if specs and not (found and found[0].remedy):
        code = lines(tables, is_model=args.model is not None)
    found += [of_disk(args.path, rates.reads), *examine(sum(spec.nbytes for spec in specs))]
    if args.json:
        document: dict[str, Any] = {"findings": [each._asdict() for each in found], "rates": rates._asdict()}
        if specs:
            document |= {"tables": [*map(_as_json, tables)], "code": code}
        print(json.dumps(document, indent=1, default=str))
    else:
        advice = () if not specs else _of_places(tables[0]) if len(tables) == 1 else _of_tables(tables)
        print("\n".join([*_of_findings(found), *_of_rates(tables, rates), *advice, code]).rstrip())
    return int(any(each.level == "broken" for each in found))


def _whole(name: str, text: str) -> int:
    """Read a whole number, also as 1e8."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise SettingsError(f"{named(name)} is {text[:40]!r}: give a whole number, such as 100000000 or 1e8")
    return int(number)


def _as_json(table: TableAdvice) -> dict[str, Any]:
    places = [each._asdict() for each in table.options]
    return {**asdict(table.spec), "bytes": table.spec.nbytes, "places": places, "recommended": table.best.name}


def _of_findings(found: Sequence[Finding]) -> Iterator[str]:
    for each in sorted(found, key=lambda each: ("broken", "slow", "ok").index(each.level)):
        yield textwrap.fill(f"{each.level:<8}{each.what:<15}{each.says}", _WIDTH, subsequent_indent=" " * 23)
        if each.remedy:
            yield f"{'':<23}→ {each.remedy}"
    counts = Counter(each.level for each in found)
    yield f"\n{counts['broken']} broken, {counts['slow']} slow, {counts['ok']} ok\n"


def _of_rates(tables: Sequence[TableAdvice], rates: Rates) -> Iterator[str]:
    spec = tables[-1].spec
    yield f"Measured with rows of {rates.record_bytes:,} bytes ({spec.dim} numbers and the state of {spec.optimizer}):"
    for place, seconds in rates.step_seconds.items():
        yield f"  {f'{place}, ids of a step':<26}{1 / seconds:12,.0f} per second"
    yield f"  {'disk, random rows read':<26}{rates.reads:12,.0f} per second"
    yield f"  {'disk, rows written':<26}{rates.writes / rates.record_bytes:12,.0f} per second"
    if others := {table.spec.record_bytes for table in tables} - {rates.record_bytes}:
        yield textwrap.fill(f"Scaled from these: rows of {', '.join(map(str, sorted(others)))} bytes.", _WIDTH)


def _of_places(table: TableAdvice) -> Iterator[str]:
    spec = table.spec
    weights = spec.dim * spec.dtype.itemsize
    parts = f"{weights:,} bytes of weights + {spec.record_bytes - weights:,} of {spec.optimizer}'s state"
    size = f"{spec.rows:,} rows × ({parts}) = {in_gib(spec.nbytes)} GiB"
    yield "\n" + textwrap.fill(f"{size}; a step of {spec.batch:,} ids:", _WIDTH)
    for each in table.options:
        mark = "→" if each is table.best else " "
        yield f"{mark} {each.name:<10}{'yes' if each.fits else 'no':<5}{_in_ms(each.seconds):>18}  {each.why}"
    yield ""


def _of_tables(tables: Sequence[TableAdvice]) -> Iterator[str]:
    yield f"\nTables, their places, and a step of {tables[0].spec.batch:,} ids in each:"
    for spec, best in ((each.spec, each.best) for each in tables):
        rows = f"{spec.rows:,} × {spec.dim}"
        yield f"{rows:>20}{in_gib(spec.nbytes):>9} GiB  {best.name:<9}{_in_ms(best.seconds):>18}  {spec.name}"
    seconds, nbytes = [each.best.seconds for each in tables], in_gib(sum(each.spec.nbytes for each in tables))
    in_all = None if None in seconds else sum(filter(None, seconds))
    yield f"{'in all':>20}{nbytes:>9} GiB  {'':<9}{_in_ms(in_all):>18}\n"


def _in_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"about {1000 * seconds:,.1f} ms"
