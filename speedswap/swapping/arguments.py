"""Checks of the arguments of modules over a table; each error names the argument, its value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from speedswap._words import a_kind
from speedswap.tables import IdMap, Storage, Table


def refuse_place(table: Table, storage: Storage | str, path: str | os.PathLike[str] | None) -> None:
    """Raise ValueError if an existing table was given together with a place for a new one."""
    for name, value in (("path", path), ("storage", storage if isinstance(storage, Storage) else None)):
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, but table is {table!r}, which exists; give it to Table.create or Table.open"
            )


_REFUSED = {
    "max_norm": (None, ", but a lookup does not change the table; scale the rows it returns"),
    "norm_type": (2.0, ", but it belongs to max_norm, which is not set; leave it out"),
    "scale_grad_by_freq": (False, "; leave it out, and weight the loss by the ids' frequency"),
    "sparse": (False, "; leave it out: gradients are dense, but only of the batch's rows"),
}


def refuse_torchs(callee: str, by_place: Sequence[object], by_name: dict[str, Any]) -> None:
    """Raise unless the torch arguments that a table does not support have their defaults.

    Args:
        callee: the name of what was called.
        by_place: values passed by position: max_norm, norm_type, scale_grad_by_freq, sparse.
        by_name: keyword arguments; torch's are removed from it.

    Raises:
        ValueError: an argument is set.
        TypeError: there are too many arguments.
    """
    if len(by_place) > len(_REFUSED):
        raise TypeError(f"{callee}() takes at most {len(_REFUSED)} of torch's arguments by position, from max_norm on")
    given = [*zip(_REFUSED, by_place, strict=False)]
    given += [(name, by_name.pop(name)) for name in _REFUSED if name in by_name]
    for name, value in given:
        default, remedy = _REFUSED[name]
        if value != default:
            raise ValueError(f"{name} is {value!r}{remedy}")


def refuse_copied(file: object, settings: dict[str, Any]) -> None:
    """Raise TypeError if settings need rows other than the file's, unchanged."""
    for name in sorted(settings.keys() & {"storage", "path", "dtype", "init", "seed", "stored_dtype", "table"}):
        raise TypeError(
            f"{name} is {settings[name]!r}, but the rows are read in place from {file!r}, unchanged; leave it out, or "
            f"copy them with Table.from_file(file, columns=[name], {name}=…)"
        )


def require_table(table: object) -> None:
    """Raise TypeError unless the argument is a table."""
    if isinstance(table, str | os.PathLike):
        raise TypeError(f"table is {os.fspath(table)!r}, a path; give speedswap.Table.open({os.fspath(table)!r})")
    if not isinstance(table, Table):
        raise TypeError(f"table is {_shown(table)}; give a speedswap.Table")


def require_id_map(id_map: object) -> None:
    """Raise TypeError unless the argument is an id map."""
    if not isinstance(id_map, IdMap):
        raise TypeError(f"id_map is {_shown(id_map)}; give a speedswap.IdMap, such as speedswap.IdMap(capacity)")


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else a_kind(value)
