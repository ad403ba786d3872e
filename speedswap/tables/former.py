"""Arguments of version 0.1 that a place has now: taken for one more release, with a DeprecationWarning."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from speedswap._warnings import warn
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.storage import Device, Disk, Pageable, Pinned, Storage, as_storage

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OF_DISKS = {each.name: each.default for each in fields(DiskOptions)}
_FORMER = {"engine": "auto", "process_group": None, "reduction": "mean", "local_to_rank": False, **_OF_DISKS}


def takes_former(
    place: str = "storage",
    path: str | None = "path",
    default: Callable[[Mapping[str, Any]], str] = lambda given: "auto",
) -> Callable[[_Function], _Function]:
    """Let a function take ``engine``, ``process_group``, ``reduction``, ``local_to_rank`` and the settings of a Disk.

    Args:
        place: the function's argument that takes the place which they describe.
        path: its argument with the directory of a new table.
        default: returns the storage that the function's other arguments stand for.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function)
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.parameters.values())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            owner = args[0] if args else None
            callee = type(owner).__name__ if function.__name__ == "__init__" else function.__name__
            callee = f"{owner.__name__}.{callee}" if isinstance(owner, type) else callee
            former = {name: kwargs.pop(name) for name in [*kwargs] if name in _FORMER}
            for unknown in () if takes_all else kwargs.keys() - parameters.parameters.keys():
                raise TypeError(f"{callee}() got an unexpected keyword argument {unknown!r}")
            if not former:
                return function(*args, **kwargs)
            bound = parameters.bind_partial(*args, **kwargs)
            given, remedy = bound.arguments, ""
            changed = {name: value for name, value in former.items() if value != _FORMER[name]}
            if (table := given.get("table")) is not None:
                is_local = changed.pop("local_to_rank", False)
                if is_local and getattr(table, "ranks", None) is not None:
                    raise ValueError("local_to_rank is True, but the ranks own the rows together; leave it out")
                for name, value in changed.items():
                    raise ValueError(
                        f"{name} is {value!r}, but table is {table!r}, which exists; give it to Table.create or "
                        "Table.open"
                    )
                if is_local and hasattr(table, "local_to_rank"):  # otherwise the function refuses it
                    table.local_to_rank = True
                    remedy = "storage=speedswap.Pinned(local_to_rank=True), or another place, to its Table.create"
            else:
                stands_for = default(given)
                directory = None if path is None else given.pop(path, None)
                storage = given.pop(place, None)
                if place == "path" and not isinstance(storage, Storage):
                    storage, directory = "disk", storage
                given[place] = _place_of(stands_for if storage is None else storage, directory, changed)
                remedy = f"{place}=speedswap.{given[place]!r}"
            if remedy:
                names = ", ".join(f"{name}=" for name in former)
                message = f"{names} of {callee} will be removed; give {remedy}"
                warn("SW002", message, DeprecationWarning)
            return function(*bound.args, **bound.kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _place_of(storage: Storage | str, path: Any, changed: Mapping[str, Any]) -> Storage:
    """Return the place that storage, path and the arguments that are not at their defaults describe."""
    place = as_storage(storage, path)
    of_disk = {name: value for name, value in changed.items() if name in _OF_DISKS}
    if isinstance(place, Disk):
        place = replace(place, **of_disk)
    for name, value in of_disk.items() if not isinstance(place, Disk) else ():
        raise ValueError(f"{name} is {value!r} but storage is {storage!r}; only tables on disk have it")
    engine = Pinned(changed.get("engine", "auto")).engine
    if isinstance(place, Pinned):
        place = replace(place, engine=engine) if engine != "auto" else place
    elif isinstance(place, Device) and engine != "auto":
        raise ValueError(f"engine is {engine!r}, but a table in device memory needs none; leave it out")
    elif engine not in ("auto", "staged") and not (storage == "auto" and isinstance(place, Pageable)):
        raise ValueError(
            f"engine is {engine!r}, but a GPU cannot read the memory of {place!r}, whose rows are staged; use "
            "storage='pinned', or engine='auto'"
        )
    if changed.get("local_to_rank"):
        place = replace(place, local_to_rank=True)
    if changed.keys() & {"process_group", "reduction"}:
        ranks = importlib.import_module("speedswap.ranks").Ranks  # by name: this package does not depend on ranks
        over_ranks = ranks(place, changed.get("process_group"), changed.get("reduction", "mean"))
        place = over_ranks if "process_group" in changed else place
    return place
