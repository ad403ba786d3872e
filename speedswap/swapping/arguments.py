"""Checks of arguments that every module over a table takes; each error names the argument, its value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping

from speedswap._words import a_kind
from speedswap.tables import IdMap, Table
from speedswap.tables.disk.options import DiskOptions

__all__ = ["disk_options", "refuse_disk", "require_id_map", "require_table"]


def disk_options(callee: str, given: Mapping[str, object]) -> DiskOptions:
    """Return the settings of a table on disk among the keyword arguments of a call.

    Args:
        callee: the name of what was called.
        given: the keyword arguments that are not parameters of its own.

    Raises:
        TypeError: one is unknown, with Python's words for it; or scratch is not True or False.
    """
    for name in given:
        if name not in DiskOptions._fields:
            raise TypeError(f"{callee}() got an unexpected keyword argument {name!r}")
    scratch = given.get("scratch", False)
    if not isinstance(scratch, bool):
        raise TypeError(f"scratch is {scratch!r}; give True for a table that is gone with its process, or False")
    return DiskOptions(**given)  # type: ignore[arg-type]


def refuse_disk(table: Table, path: str | os.PathLike[str] | None, disk: DiskOptions) -> None:
    """Raise ValueError if something was given for a new table on disk, beside an existing table."""
    if path is not None:
        raise ValueError(
            f"path is {os.fspath(path)!r}, but table is {table!r}; give one of the two, and a path to Table.create or "
            "Table.open"
        )
    for name, value in disk._asdict().items():
        if value != DiskOptions._field_defaults[name]:
            where = "Table.create" if name == "scratch" else "Table.open or Table.create"
            raise ValueError(f"{name} is {value!r}, but table is {table!r}, which exists; give it to {where}")


def require_table(table: object) -> None:
    """Raise TypeError unless a table is one."""
    if isinstance(table, str | os.PathLike):
        raise TypeError(f"table is {os.fspath(table)!r}, a path; give speedswap.Table.open({os.fspath(table)!r})")
    if not isinstance(table, Table):
        raise TypeError(f"table is {_shown(table)}; give a speedswap.Table")


def require_id_map(id_map: object) -> None:
    """Raise TypeError unless an id map is one."""
    if not isinstance(id_map, IdMap):
        raise TypeError(f"id_map is {_shown(id_map)}; give a speedswap.IdMap, such as speedswap.IdMap(capacity)")


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else a_kind(value)
