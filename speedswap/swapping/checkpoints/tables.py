"""The tables of a model in a checkpoint, and the lane of the ranks that own them.

A table is either referenced by a commit, or copied; after a copy, only changed rows are saved.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from speedswap.collectives import Lane
from speedswap.swapping.checkpoints.format import word
from speedswap.swapping.optimizers import holds
from speedswap.swapping.table_module import TableModule
from speedswap.tables import RowStore, Table
from speedswap.tables.idle import IdleStore, RowsAsStored
from speedswap.tables.store import ChangedRows

ROWS = "rows"
# A table's attributes for the last checkpoint that references it: the checkpoint's token and folder.
TOKEN, KEEPER = "checkpoint", "checkpoints"


class CopiedIn(NamedTuple):
    """The checkpoint that holds a store as it was before these changes."""

    token: str
    changes: ChangedRows


copied: weakref.WeakKeyDictionary[RowStore, CopiedIn] = weakref.WeakKeyDictionary()


def modules_of(model: nn.Module) -> dict[str, TableModule]:
    """Return all modules over tables, by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TableModule)}


def tables_of(
    model: nn.Module, optimizers: Iterable[Optimizer] = (), names: Collection[str] = ()
) -> dict[str, TableModule]:
    """Return the modules that train tables, by their names in the model; one per table.

    Args:
        model: their model.
        optimizers: among several modules over one table, prefer the one that these train;
        names: then one with one of these names.
    """
    every = modules_of(model)

    def rank(name: str) -> tuple[bool, ...]:
        module = every[name]
        is_held = any(holds(each, module.weight) for each in optimizers)
        is_trained = module._step.state.optimizer is not None
        return not is_trained, not (is_held and module.weight.requires_grad), name not in names, not is_held

    best_last = sorted(every, key=rank)[::-1]
    of_store = {every[name].table.store: name for name in best_last}
    return {name: module for name, module in every.items() if of_store[module.table.store] == name}


def all_locked(modules: Mapping[str, TableModule]) -> ExitStack:
    """Lock every table until the stack is closed, so that all are saved consistently."""
    with ExitStack() as held:
        for table in sorted({module.table for module in modules.values()}, key=id):
            held.enter_context(table.lock)
            table.check_open()
        return held.pop_all()


def path_from(here: Path, there: Path, above: Path) -> str:
    """Return a path, relative if both are in the same directory, without links between, and so move together.

    Args:
        here: the path to be relative to.
        there: the target.
        above: the common directory.
    """
    near = os.path.relpath(there, here)
    moves = here.is_relative_to(above) and there.is_relative_to(above)
    return near if moves and os.path.realpath(here / near) == os.path.realpath(there) else str(there)


def path_in(folder: Path, path: str) -> Path:
    """Return the path of a table that a checkpoint references.

    Args:
        folder: the checkpoint's, or a link to it.
        path: the path stored in the checkpoint.
    """
    near = folder.parent / path
    return near if near.exists() else Path(os.path.realpath(folder)).parent / path


def as_stored(table: Table) -> Table:
    """Return a table of the same rows without the steps that they may have missed, which are among its attributes."""
    return Table(RowsAsStored(table.store)) if isinstance(table.store, IdleStore) else table


def descriptions_of(table: Table) -> dict[str, list[Any]]:
    """Return, by column, the properties that must be equal to copy rows, as plain data."""
    columns = table.columns.values()
    return {each.name: [list(each.row_shape), word(each.dtype), word(each.stored_dtype)] for each in columns}


def lane_of(modules: Mapping[str, TableModule]) -> Lane:
    """Return the lane of the ranks that own the tables of a model; that of this process alone if none do.

    Raises:
        ValueError: a table is local to each rank, so that it has no common state; or tables belong to several groups.
    """
    groups = {each.table.ranks for each in modules.values()} - {None}
    if len(groups) > 1:
        raise ValueError(
            f"model has tables of {len(groups)} process groups, and a checkpoint is of one; give all tables those of "
            "one, or save parts of the model apart"
        )
    for name, each in modules.items():
        if groups and each.table.ranks is None and each.weight.requires_grad:
            raise ValueError(
                f"table {each.table.name!r} of the model ({name or 'itself'}) is each rank's own, and others are owned "
                "by all of them; give it their storage=speedswap.Ranks() too, or save it apart"
            )
    group = next(iter(groups), None)
    return Lane(None, "checkpoint") if group is None else group.main
