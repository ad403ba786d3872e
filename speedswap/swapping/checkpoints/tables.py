"""The tables of a model in a checkpoint, and the ranks that own them.

A table is referred to as of a commit, or copied, and later the rows that have changed since.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from speedswap.collectives import Kind, RankGroup, Task
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.format import Manifest
from speedswap.swapping.optimizers import holds
from speedswap.swapping.table_module import TableModule
from speedswap.tables import RowStore, Table
from speedswap.tables.notes import ChangedRows

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


def all_locked(modules: Mapping[str, TableModule]) -> ExitStack:
    """Hold every table until the stack is closed, so that all are saved as of one moment."""
    with ExitStack() as held:
        for table in sorted({module.table for module in modules.values()}, key=id):
            held.enter_context(table.lock)
            table.check_open()
        return held.pop_all()


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
    known = commits_of(existing, table)
    for commit in commits.held:
        if commit > after and commit not in known:
            keeper = commits.attributes_of(commit).get(KEEPER)  # the directory for whose checkpoint it was held
            kept = Folders(table.path / keeper).manifests() if table.path and isinstance(keeper, str) else []
            if commit not in commits_of(kept, table):
                commits.let_go(commit)


def commits_of(existing: Iterable[tuple[Manifest, Path]], table: Table) -> set[int]:
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


def descriptions_of(table: Table) -> dict[str, list[Any]]:
    """Return what must be equal where rows are copied, by column, as JSON has it."""
    columns = table.columns.values()
    return {each.name: [list(each.row_shape), _word(each.dtype), _word(each.stored_dtype)] for each in columns}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def piece_rows(table: Table) -> int:
    return max(1, _PIECE_BYTES * table.num_embeddings // max(table.nbytes, 1))


class SavingRanks:
    """The ranks of a model's tables.

    Args:
        group: theirs; None for a process alone.

    Attributes:
        rank: of this process among them; one alone is the first.
    """

    def __init__(self, group: RankGroup | None) -> None:
        self._group = group
        self._task: Task | None = None
        self.rank = 0 if group is None else group.rank

    @classmethod
    def of(cls, modules: Mapping[str, TableModule]) -> SavingRanks:
        """Return the ranks that own the tables of a model.

        Raises:
            ValueError: a table is each rank's own, so that there is no one state of it; or they are of several groups.
        """
        groups = {each.table.ranks for each in modules.values()} - {None}
        if len(groups) > 1:
            raise ValueError(
                f"model has tables of {len(groups)} process groups, and a checkpoint is of one; give all tables "
                "those of one, or save parts of the model apart"
            )
        for name, each in modules.items():
            if groups and each.table.ranks is None and each.weight.requires_grad:
                raise ValueError(
                    f"table {each.table.name!r} of the model ({name or 'itself'}) is each rank's own, and others are "
                    "owned by all of them; give it their storage=speedswap.Ranks() too, or save it apart"
                )
        return cls(next(iter(groups), None))

    def once(self, work: Callable[[], Any], elsewhere: Callable[[], Any]) -> Any:
        """Let the first rank do what is done once for all, and the others something else."""
        return work() if self.rank == 0 else elsewhere()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surround what the ranks do together: what fails in it is an error of all."""
        if self._group is None:
            yield
            return
        with self._group.main.task(Kind.CHECKPOINT) as self._task:
            yield
            self._task.finish()

    def wait(self) -> None:
        """Return when all ranks have come here, and nothing has failed."""
        if self._task is not None:
            self._task.round()

    def give_up(self) -> None:
        """Let the others fail in their next round, and return when they have come there."""
        if self._task is not None:
            self._task.give_up()

    def share(self, data: Any) -> list[Any]:
        """Return the data of all ranks, in their order.

        Args:
            data: of this one, as JSON can hold it.
        """
        return [data] if self._task is None else self._task.share(data)
