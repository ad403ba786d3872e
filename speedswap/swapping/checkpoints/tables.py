"""Tables in a checkpoint: referred to as of a commit, or copied, and later the rows that have changed since."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.manifest import Manifest
from speedswap.swapping.optimizers import holds
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Column, RowStore, Table
from speedswap.tables.notes import ChangedRows

__all__ = [
    "KEEPER",
    "ROWS",
    "TOKEN",
    "CopiedIn",
    "all_locked",
    "copied",
    "description_of",
    "is_referred_to",
    "let_go",
    "modules_of",
    "path_from",
    "path_in",
    "piece_rows",
    "tables_of",
]

_PIECE_BYTES = 8 << 20
ROWS = "rows"
# Among a table's attributes, of the last checkpoint that refers to it: its token, and the directory that it is in.
TOKEN, KEEPER = "checkpoint", "checkpoints"


class CopiedIn(NamedTuple):
    """The checkpoint that has a store as it was before these changes."""

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
        optimizers: of several modules over one table, the one is preferred that these are to train;
        names: then one with such a name.
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


@contextmanager
def all_locked(modules: dict[str, TableModule]) -> Iterator[None]:
    """Hold every table, so that all are saved as of one moment."""
    with ExitStack() as held:
        for table in sorted({module.table for module in modules.values()}, key=id):
            held.enter_context(table.lock)
            table.check_open()
        yield


def let_go(table: Table, existing: Iterable[tuple[Manifest, Path]], after: int = 0) -> None:
    """Let go of the commits of a table on disk that no checkpoint refers to any more, there or in another directory.

    Args:
        table: it.
        existing: the checkpoints there.
        after: this commit and earlier ones stay.
    """
    commits = table.store.commits
    if commits is None or not any(commit > after for commit in commits.held):
        return
    table.flush()
    known = _commits_of(existing, table)
    for commit in commits.held:
        if commit > after and commit not in known:
            keeper = commits.attributes_of(commit).get(KEEPER)
            if commit not in _commits_of(_kept_at(table, keeper), table):
                commits.let_go(commit)


def _kept_at(table: Table, keeper: object) -> list[tuple[Manifest, Path]]:
    """Return the checkpoints of the directory for which a commit was held."""
    return Folders(table.path / keeper).manifests() if table.path and isinstance(keeper, str) else []


def is_referred_to(existing: Iterable[tuple[Manifest, Path]], table: Table) -> bool:
    """Return whether a checkpoint refers to a table on disk."""
    return bool(_commits_of(existing, table))


def _commits_of(existing: Iterable[tuple[Manifest, Path]], table: Table) -> set[int]:
    """Return the commits of a table on disk that checkpoints refer to."""
    files = table.store.files
    return {
        part.commit
        for manifest, folder in existing
        for saved in manifest.tables
        for part in saved.parts
        if part.path and files is not None and files.lives_at(path_in(folder, part.path))
    }


def path_from(here: Path, there: Path, above: Path) -> str:
    """Return a path: relative to another one where both lie in one directory and move together, without a link between.

    Args:
        here: what it is relative to.
        there: what it leads to.
        above: the directory.
    """
    near = os.path.relpath(there, here)
    moves = here.is_relative_to(above) and there.is_relative_to(above)
    return near if moves and os.path.realpath(here / near) == os.path.realpath(there) else str(there)


def path_in(folder: Path, path: str) -> Path:
    """Return where a table is that a checkpoint refers to.

    Args:
        folder: the checkpoint's, or a link to it.
        path: as it stands in the checkpoint.
    """
    near = folder.parent / path
    return near if near.exists() else Path(os.path.realpath(folder)).parent / path


def description_of(column: Column) -> list[Any]:
    """Return what must be equal where rows of a column are copied, as JSON has it."""
    dtype, stored = (str(each).removeprefix("torch.") for each in (column.dtype, column.stored_dtype))
    return [list(column.row_shape), dtype, stored]


def piece_rows(table: Table) -> int:
    return max(1, _PIECE_BYTES * table.num_embeddings // max(table.nbytes, 1))
