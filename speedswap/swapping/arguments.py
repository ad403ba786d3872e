"""Checks of the arguments of modules over a table; each error names the argument, its value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from speedswap._words import require_kind
from speedswap.tables import IdMap, Storage, Table
from speedswap.tables.record import require_dtype, whole_number


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


class TorchsAttribute:
    """An attribute of torch's embeddings that has its default, and refuses any other value as the constructor does."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        return _REFUSED[self._name][0]

    def __set__(self, module: nn.Module, value: object) -> None:
        refuse_torchs(type(module).__name__, (), {self._name: value})


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
    require_kind("table", table, Table, "a speedswap.Table")


def row_among(name: str, row: object, num_embeddings: int) -> int:
    """Return a row's number, counted from the table's end if negative; raise ValueError unless it is one."""
    remedy = f"give one of the table's {num_embeddings} rows, or None"
    return whole_number(name, row, -num_embeddings, num_embeddings - 1, remedy=remedy) % num_embeddings


def require_flag(name: str, value: object) -> None:
    """Raise TypeError unless the argument is True or False, or equal to one of them."""
    if value not in (True, False):
        raise TypeError(f"{name} is {value!r}; give True or False")


def require_id_map(id_map: object) -> None:
    """Raise TypeError unless the argument is an id map."""
    require_kind("id_map", id_map, IdMap, "a speedswap.IdMap, such as speedswap.IdMap(capacity)")


def device_of_weights(device: torch.device | str | None) -> torch.device:
    """Return the device of a module's parameters, even if accelerate has moved them to meta since."""
    module = nn.Module()
    try:
        module.weight = nn.Parameter(torch.empty(0, device=device))
    except RuntimeError as error:
        raise RuntimeError(f"device is {device!r}; give one that torch has here, such as 'cpu' ({error})") from error
    return module.weight.device


def check_dtypes(dtype: torch.dtype, state_dtype: torch.dtype | None, lookup_dtype: torch.dtype | None) -> None:
    """Raise TypeError unless rows of this dtype can be trained with state of ``state_dtype``, and rounded so."""
    require_dtype("dtype", dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"dtype is {dtype}; an embedding is trained, so give a floating-point one")
    if state_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"state_dtype is {state_dtype!r}; give torch.bfloat16, torch.float16 or torch.float32")
    if state_dtype is not None and dtype != torch.float32:
        raise TypeError(f"state_dtype is {state_dtype}, but the rows are {dtype}; leave it out, or give float32 rows")
    if lookup_dtype not in (None, dtype) and (
        dtype != torch.float32 or lookup_dtype not in (torch.float16, torch.bfloat16)
    ):
        raise TypeError(
            f"lookup_dtype is {lookup_dtype!r}, but the rows are {dtype}; give torch.bfloat16 or torch.float16 with "
            "float32 rows, or leave it out"
        )


def require_stored(table: Table, stored_dtype: torch.dtype | None) -> None:
    """Raise ValueError unless an existing table stores its weights as requested."""
    stored = table.columns["weight"].stored_dtype
    if stored_dtype not in (None, stored):
        raise ValueError(
            f"stored_dtype is {stored_dtype!r}, but table {table.name!r} stores its weights as {stored}; leave it out, "
            "or copy them to a new table"
        )
