"""The commands ``speedswap info``, ``verify``, ``salvage``, ``export`` and ``import``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from speedswap.apps.errors import SettingsError, named
from speedswap.apps.info import describe
from speedswap.apps.tables.facts import describe_table, table_facts, verify
from speedswap.errors import SpeedswapError
from speedswap.tables import Disk, Table
from speedswap.tables.files.whole import write_whole
from speedswap.tables.formats import FORMATS

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_CACHE_BYTES = 64 << 20
_MOST_SHOWN = 20
_STORED = ("float16", "bfloat16", "int8")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to a parser's commands."""
    table: dict[str, Any] = {"type": Path, "metavar": "TABLE", "help": "a table's directory"}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    form: dict[str, Any] = {"choices": [*FORMATS], "help": "by default by the suffix"}
    formats = "; ".join(f"{name}: {', '.join(form.suffixes)}" for name, form in FORMATS.items())

    def command(run: Callable[[argparse.Namespace], int], help: str, more: str = "") -> Callable[..., Any]:
        """Add a command, which its function's name and documentation describe."""
        description = " ".join([*(run.__doc__ or "").split(), more]).strip()
        parser = commands.add_parser(run.__name__.lstrip("_"), help=help, description=description)
        parser.set_defaults(run=run)
        return parser.add_argument

    add = command(_info, "what was built and found here, and why anything is missing; or the facts of a table in files")
    add("table", nargs="?", **table)
    add("--json", action="store_true", help="print a table's facts as JSON")
    add = command(_verify, "read everything in tables' files and check it")
    add("tables", nargs="+", **table)
    add("--json", action="store_true", help="print a line of JSON per table")
    add = command(_salvage, "save every intact row of a damaged table to a new one")
    add("table", type=Path, metavar="TABLE", help="the damaged table's directory")
    add("out", type=Path, metavar="OUT", help="the new table's directory")
    add(
        "--manifest",
        **file,
        help="the MANIFEST of a copy, or of a table that was made with the same arguments, in place of a lost one",
    )
    add("--json", action="store_true", help="print a line of JSON")
    add = command(_export, "write a table's rows to a file that other programs read", f"Formats by suffix: {formats}.")
    add("table", **table)
    add("file", **file)
    add("--format", **form)
    add(
        "--columns",
        default="weight",
        help="names, separated by commas, or all (default: %(default)s); npy and word2vec's formats hold one",
    )
    add(
        "--keys",
        metavar="rows|FILE",
        help="the rows' keys: their numbers, or the lines of a text file, one per row; by default the table's id map, "
        "and without one the numbers in word2vec's formats",
    )
    add("--overwrite", action="store_true", help="replace an existing file")
    add = command(_import, "make a table of the rows in a file of another program", f"Formats by suffix: {formats}.")
    add("file", **file)
    add("table", type=Path, metavar="TABLE", help="the new table's directory")
    add("--format", **form)
    add(
        "--columns",
        metavar="NAMES",
        help="tensors or columns in the file, separated by commas; the first becomes the weight (default: weight, or "
        "the only one)",
    )
    add(
        "--keys",
        default="map",
        metavar="map|drop|FILE",
        help="map: keep the rows' keys as the table's id map, whose row 0 is that of other keys; drop: ignore them; or "
        "a text file to make, with a key per line (default: %(default)s)",
    )
    add("--dtype", choices=_DTYPES, help="of the weights; the file's by default")
    add("--stored-dtype", choices=_STORED, help="hold float32 weights in fewer bytes")
    add("--allow-nan", action="store_true", help="take values that are not finite as they are")


def _info(args: argparse.Namespace) -> int:
    """Describe the build and the machine, with the reasons for anything missing; or with TABLE that table.

    Its rows, columns, bytes on disk, last commit, attributes, writer, and the way its rows are read and written.
    """
    if args.table is not None:
        facts = table_facts(args.table)
        print(json.dumps(facts, indent=2) if args.json else describe_table(facts))
    elif args.json:
        raise SettingsError("--json is for a table: give its directory")
    else:
        print(describe())
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Read everything in tables' files and check every checksum; name damaged rows.

    Exit status 0: all is whole; 1: something is damaged; 2: a table could not be looked at. Nothing is changed.
    """
    status = 0
    for path in args.tables:
        try:
            found = verify(path, shown=sys.stderr.isatty() and not args.json)
        except OSError as error:
            print(f"speedswap: {path} cannot be looked at: {error.strerror or error}", file=sys.stderr)
            status = 2
            continue
        print(json.dumps(found.to_json()) if args.json else "\n".join(found.lines()), flush=True)
        status = max(status, 0 if found.whole else 1)
    return status


def _salvage(args: argparse.Namespace) -> int:
    """Save every intact row of a damaged table, with its state, attributes and id maps, to a new table.

    The rest is named. A flipped bit in anything but a row is put back. Rows whose newest version is damaged have an
    older one, or initial values. Exit status 0: nothing is lost; 1: OUT.salvaged.json lists what is lost; 2: nothing
    could be saved. TABLE is only read.
    """
    report = args.out.with_name(f"{args.out.name}.salvaged.json")
    if os.path.lexists(report):
        raise SettingsError(f"{report} exists, where what is lost would be listed; move it away")
    with _refusals():
        found = Table.salvage(args.table, args.out, manifest=args.manifest)
    listed = json.dumps(found.to_json())
    lines = found.lines()
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"and {len(lines) - _MOST_SHOWN:,} more lines"]
    if not found.whole:
        with write_whole(report) as file:
            file.write(listed.encode())
        lines.append(f"all of it: {report}")
    print(listed if args.json else "\n".join(lines))
    return 0 if found.whole else 1


def _export(args: argparse.Namespace) -> int:
    """Write a table's rows to a file, a bounded piece at a time, bit for bit.

    The file appears complete or not at all.
    """
    with Table.open(Disk(args.table, cache_bytes=_CACHE_BYTES), mode="r") as table, _refusals():
        columns = [*table.columns] if args.columns == "all" else args.columns.split(",")
        table.export(args.file, args.format, columns=columns, keys=args.keys, overwrite=args.overwrite)
    print(f"saved {args.file}")
    return 0


def _import(args: argparse.Namespace) -> int:
    """Make a table of the rows in a file, a bounded piece at a time.

    The table appears complete or not at all.
    """
    dtypes = {"dtype": args.dtype, "stored_dtype": args.stored_dtype}
    with _refusals():
        table = Table.from_file(
            args.file,
            args.table,
            args.format,
            columns=None if args.columns is None else args.columns.split(","),
            keys=args.keys,
            allow_nan=args.allow_nan,
            **{name: value and getattr(torch, value) for name, value in dtypes.items()},
        )
    with table:
        print(f"saved {table!r} in {args.table}")
    return 0


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the refusal of an argument into an error that the command line shows in a line."""
    try:
        yield
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        if isinstance(error, SpeedswapError):
            raise
        raise SettingsError(re.sub(r"^(columns|keys)(?= is )", lambda name: named(name[0]), str(error))) from error
