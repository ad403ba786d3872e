"""The facts that ``speedswap info TABLE`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from speedswap.tables import Column, IdMap, Table
from speedswap.tables.files.directory import facts_of
from speedswap.tables.files.manifest import part_of_ranks

__all__ = ["describe_table", "table_facts"]


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
            "id_maps": {name: _map(id_map) for name, id_map in table.store.notes.id_maps.items()},
            **facts,
            **(table.store.files.facts() if table.store.files is not None else {}),
        }


def _map(id_map: IdMap) -> dict[str, Any]:
    settings = {name: getattr(id_map, name) for name in ("keys", "capacity", "admit_after", "evict")}
    return {"used": len(id_map), **settings}


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
    yield "path", facts["path"]
    if "part" in facts:
        yield "part", facts["part"]
    yield "rows", f"{facts['rows']:,}"
    for name, column in facts["columns"].items():
        shape = " × ".join(map(str, column["row_shape"])) or "1"
        stored = (
            f" stored as {column['stored_dtype']}, rounded {column['rounding']}" if "stored_dtype" in column else ""
        )
        yield name, f"{shape} {column['dtype']}{stored}, {column['row_bytes']} bytes"
    yield "size", f"{_size(facts['bytes'])} of rows, {_size(facts['bytes_on_disk'])} on disk"
    holder, left = facts["open_for_writing_in"], facts["left_open"]
    if holder is not None:
        yield "open for writing", f"in process {holder}"
    else:
        yield "open for writing", "no; its last writer did not close it" if left else "no"
    for name, id_map in facts["id_maps"].items():
        yield "id map" + (f" {name!r}" if name else ""), _text(id_map)
    shown = {"path", "name", "part", "rows", "columns", "bytes", "bytes_on_disk", "id_maps"}
    shown |= {"open_for_writing_in", "left_open"}
    for name, value in facts.items():
        if name not in shown:
            yield name.replace("_", " "), _text(value)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"
