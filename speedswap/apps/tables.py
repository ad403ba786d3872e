"""Tables in files at the command line: ``info``, ``verify``, ``salvage``, ``export``, ``import`` and ``merge``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedswap._words import size_in_words
from speedswap.apps.errors import SettingsError, named
from speedswap.apps.info import describe
from speedswap.apps.running import show_progress
from speedswap.errors import SpeedswapError, TableFormatError
from speedswap.kernels import dtype_name
from speedswap.tables import Column, Disk, Table, merge_rows
from speedswap.tables.files.directory import facts_of
from speedswap.tables.files.manifest import part_of_ranks
from speedswap.tables.files.place import write_whole
from speedswap.tables.formats import FORMATS
from speedswap.tables.store import Checked

_MOST_SHOWN = 20
_OF_A_MAP = ("keys", "capacity", "admit_after", "evict")
_OF_A_TABLE = re.compile(r"MANIFEST|LOCK|HEAD.*|(rows|data|keys).*\.(log|bin)")


def table_facts(path: Path) -> dict[str, Any]:
    """Return what is known of a table in files, as JSON can hold it. Nothing is changed, and no lock taken.

    Raises:
        FileNotFoundError: there is nothing.
        TableFormatError: it is not a table, or it is damaged.
    """
    facts = facts_of(path)
    with Table.open(path, mode="r") as table:
        return {
            "path": str(table.path),
            "name": table.name,
            **({} if (part := part_of_ranks(table.columns["weight"])) is None else {"part": part}),
            "rows": table.num_embeddings,
            "columns": {name: _column(column) for name, column in table.columns.items()},
            "bytes": table.nbytes,
            "writes": table.writes,
            "seed": table.seed,
            "attributes": dict(table.attributes),
            "id_maps": {
                name: {"used": len(id_map), **{each: getattr(id_map, each) for each in _OF_A_MAP}}
                for name, id_map in table.store.notes.id_maps.items()
            },
            **facts,
            **(table.store.files.details() if table.store.files is not None else {}),
        }


def _column(column: Column) -> dict[str, Any]:
    found = {"row_shape": list(column.row_shape), "dtype": dtype_name(column.dtype), "row_bytes": column.row_bytes}
    if column.compact:
        found |= {"stored_dtype": dtype_name(column.stored_dtype), "rounding": column.rounding}
    return found


def describe_table(facts: dict[str, Any]) -> str:
    """Return the facts as lines of text."""
    lines = [*_lines(facts)]
    width = max(len(name) for name, _ in lines)
    return "\n".join([f"table {facts['name']!r}", *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        match name:
            case "name" | "bytes_on_disk" | "left_open":
                continue  # said with others
            case "columns":
                yield from ((column, _of_column(found)) for column, found in value.items())
            case "bytes":
                yield "size", f"{size_in_words(value)} of rows, {size_in_words(facts['bytes_on_disk'])} on disk"
            case "id_maps":
                yield from (("id map" + (f" {key!r}" if key else ""), _text(found)) for key, found in value.items())
            case "open_for_writing_in":
                left = "no; its last writer did not close it" if facts["left_open"] else "no"
                yield "open for writing", left if value is None else f"in process {value}"
            case _:
                yield name.replace("_", " "), _text(value)


def _of_column(found: dict[str, Any]) -> str:
    shape = " × ".join(map(str, found["row_shape"])) or "1"
    stored = f" stored as {found['stored_dtype']}, rounded {found['rounding']}" if "stored_dtype" in found else ""
    return f"{shape} {found['dtype']}{stored}, {found['row_bytes']} bytes"


def _text(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
        case list():
            return ", ".join(map(_text, value)) or "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
    return "none" if value is None else str(value)


class Verified(NamedTuple):
    """The outcome for one table.

    Attributes:
        path: its directory.
        rows: rows of the table; None where its files do not tell.
        touched: rows that were ever written, which are the ones that were read; None where that is not known.
        checked: bytes read, damaged rows, and problems.
        part: whose rows these are, if the table is one of several ranks' part of another.
    """

    path: Path
    rows: int | None
    touched: int | None
    checked: Checked
    part: str | None = None

    @property
    def whole(self) -> bool:
        """True if nothing is wrong."""
        return not self.checked.problems

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON can hold it, with damaged rows as pairs: the first, and the one after the last."""
        return {
            "path": str(self.path),
            **({} if self.part is None else {"part": self.part}),
            "whole": self.whole,
            "rows": self.rows,
            "bytes_read": self.checked.nbytes,
            "touched_rows": self.touched,
            "damaged_rows": [[rows.start, rows.stop] for rows in self.checked.damaged],
            "problems": self.checked.problems,
        }

    def lines(self) -> list[str]:
        """Return the outcome as lines of text."""
        problems = self.checked.problems
        if not problems:
            rows = f"{self.rows:,} rows" + ("" if self.touched is None else f", {self.touched:,} of them written")
            whose = "" if self.part is None else f" ({self.part})"
            return [f"{self.path}{whose} is whole: {rows}; {self.checked.nbytes:,} bytes read; every checksum matches"]
        more = len(problems) - _MOST_SHOWN
        shown = [each if str(self.path) in each else f"{self.path}: {each}" for each in problems[:_MOST_SHOWN]]
        return [*shown, f"{self.path}: and {more:,} more"] if more > 0 else shown


def verify(path: Path, *, shown: bool = False) -> Verified:
    """Read everything in a table's files, and check whatever has a checksum. Nothing is changed.

    Args:
        path: the table's directory.
        shown: True for a progress bar on standard error.

    Raises:
        FileNotFoundError: there is nothing, or a directory without a file of a table.
        OSError: the files cannot be opened, so that nothing is known of them.
    """
    try:
        with Table.open(path, mode="r") as table:
            files = table.store.files
            assert files is not None
            touched = files.details().get("touched_rows")
            touched = touched if isinstance(touched, int) else None
            total = len(table) if touched is None else touched
            with show_progress(total, shown=shown, unit=" rows") as progress:
                checked, part = files.verify(progress.update), part_of_ranks(table.columns["weight"])
                return Verified(path, len(table), touched, checked, part)
    except TableFormatError as error:
        if path.is_dir() and not any(_OF_A_TABLE.fullmatch(each.name) for each in path.iterdir()):
            raise FileNotFoundError(f"path is {str(path)!r}, where there is no table") from error
        return Verified(path, None, None, Checked(problems=[str(error)]))


_DTYPES = ("float32", "float64", "float16", "bfloat16")
_CACHE_BYTES = 64 << 20
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
    add = command(_merge, "write a copy of a checkpoint whose tables have the rows in files")
    add("base", type=Path, metavar="BASE", help="the checkpoint's folder")
    add("rows", type=Path, nargs="+", metavar="ROWS", help="files that Table.save_rows or save_pretrained wrote")
    add("out", type=Path, metavar="OUT", help="the new folder")


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


def _merge(args: argparse.Namespace) -> int:
    """Copy a checkpoint's folder, and write changed rows into its tables, a bounded piece at a time.

    The folder appears complete or not at all. Hidden files are left out. Of a row in several files the last one counts.
    """
    with _refusals():
        merge_rows(args.base, args.rows, args.out)
    print(f"saved {args.out}")
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
