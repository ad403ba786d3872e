"""The facts of a table in files, for ``speedswap info``, and its check for damage, for ``speedswap verify``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedswap._words import size_in_words
from speedswap.apps.running import show_progress
from speedswap.errors import TableFormatError
from speedswap.tables import Column, Table
from speedswap.tables.files.directory import facts_of
from speedswap.tables.files.manifest import part_of_ranks
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
    found = {"row_shape": list(column.row_shape), "dtype": _name(column.dtype), "row_bytes": column.row_bytes}
    if column.compact:
        found |= {"stored_dtype": _name(column.stored_dtype), "rounding": column.rounding}
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
