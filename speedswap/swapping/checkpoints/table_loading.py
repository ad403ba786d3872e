"""Tables of a checkpoint on their way into a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.checkpoints.files import TensorsOf
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.manifest import Delta, SavedTable, damaged
from speedswap.swapping.checkpoints.tables import (
    ROWS,
    TOKEN,
    CopiedIn,
    copied,
    description_of,
    let_go,
    path_in,
    piece_rows,
)
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Column, Table
from speedswap.tables.shards import InOrder, Owners, Shard, place_rows, take_shards
from speedswap.tables.store import Commits

__all__ = ["Loading"]


class _Source(NamedTuple):
    """Rows of a checkpoint's table: all, or those of one of the ranks that have saved it."""

    saved: SavedTable
    path: Path
    shard: Shard


class Loading:
    """A table of a checkpoint on its way into a model.

    Args:
        saved: the table.
        tensors: the checkpoint's files.
        token: of the checkpoint.
        target: the rows of the model's table that are in this process.

    Attributes:
        trainer: the optimizer that goes on with the rows' state; None where it is not loaded.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, saved: SavedTable, tensors: TensorsOf, token: str, target: Shard) -> None:
        self.saved = saved
        self._folder = tensors.folder
        self._tensors = tensors
        self._token = token
        self._target = target
        owners = Owners(saved.num_embeddings, len(saved.shards)) if saved.shards else InOrder(saved.num_embeddings)
        ranks = range(owners.world_size)
        self._is_as_saved = owners == target.owners
        if self._is_as_saved:
            ranks = range(target.rank, target.rank + 1)
        self._sources = [
            self._open(saved.parts[rank], owners, rank)
            for rank in ranks
            if len(owners.places_shared(rank, target.owners, target.rank))
        ]
        self._columns = self._sources[0].shard.table.columns
        self.trainer: Optimizer | None = None
        self._id_maps = ExitStack()  # which changes no map if it is never closed

    def _open(self, part: SavedTable, owners: Owners | InOrder, rank: int) -> _Source:
        """Open the files of some rows, and check that they are those of the checkpoint."""
        path = self._folder / part.copy if part.copy else path_in(self._folder, part.path)
        if not part.copy and not path.exists():
            which = f"table {self.saved.name!r}" if self.saved.name else "the table"
            raise CheckpointError(
                f"checkpoint {self._folder} refers to {which} at {os.path.normpath(path)}, which is not there; put the "
                "table's directory back there"
            )
        try:
            if part.copy and (path.is_symlink() or (path.parent.is_symlink() and path.parent != self._folder)):
                raise TableFormatError(f"{path} is a symbolic link, which is not followed")
            table = Table.open(path, mode="r", commit=None if part.copy else part.commit)
            if part.path and table.attributes.get(TOKEN) != self._token:
                raise TableFormatError(f"commit {part.commit} of the table at {path} is not that of this checkpoint")
        except (OSError, ValueError) as error:
            raise damaged(self._folder, error, part.copy or str(path)) from error
        columns = {each.name: description_of(each) for each in table.columns.values()}
        if (table.num_embeddings, columns) != (owners.rows_of(rank), part.columns):
            raise damaged(self._folder, f"{path} is not the table {self.saved.name!r}")
        for delta in part.deltas:
            self._tensors.check(delta.file, delta.digests)
            self._check_delta(delta, table)
        return _Source(part, path, Shard(table, owners, rank))

    def _check_delta(self, delta: Delta, table: Table) -> None:
        places = self._tensors.file(delta.file).places
        shapes: dict[str, tuple[int, ...]] = {ROWS: (delta.rows,)}
        shapes |= {each.name: (delta.rows, *each.row_shape) for each in table.columns.values()}
        if {key: place.shape for key, place in places.items()} != shapes or places[ROWS].dtype != torch.int64:
            raise damaged(self._folder, f"{delta.file} has not the rows of table {self.saved.name!r}")
        for column in table.columns.values():
            if places[column.name].dtype != column.stored_dtype:
                raise damaged(self._folder, f"{delta.file} has {column.name!r} as {places[column.name].dtype}")
        last, step = -1, piece_rows(table)
        for start in range(0, delta.rows, step):
            rows = self._tensors.rows(delta.file, ROWS, start, min(start + step, delta.rows))
            if not last < int(rows[0]) <= int(rows[-1]) < table.num_embeddings or bool((rows.diff() <= 0).any()):
                raise damaged(self._folder, f"{delta.file} has rows that table {self.saved.name!r} lacks, or has twice")
            last = int(rows[-1])

    def check(self, module: TableModule) -> None:
        """Check that the table fits a module's.

        Raises:
            CheckpointError: the message names the difference.
        """
        table, saved = module.table, self.saved
        where = self._in_model(module)
        table.check_open(writing=True)
        if table.num_embeddings != saved.num_embeddings:
            raise CheckpointError(
                f"{where} has {table.num_embeddings} rows, but the checkpoint {self._folder} has {saved.num_embeddings}"
                "; make the model with the same"
            )
        columns, is_trained = table.columns, self.trainer is not None
        self.check_columns(module, [each for each in columns.values() if is_trained or each.name in self._columns])
        if saved.id_maps.keys() != table.store.notes.id_maps.keys():
            raise CheckpointError(
                f"{where} has {len(table.store.notes.id_maps)} id maps, but the checkpoint {self._folder} has "
                f"{len(saved.id_maps)}; make the model with the same"
            )
        renews = any(id_map.evict is not None for id_map in table.store.notes.id_maps.values())
        draws = any(column.rounding == "stochastic" for column in table.columns.values())
        if is_trained and table.seed != saved.seed and (renews or draws):
            why = "rows that start anew" if renews else "stochastic rounding"
            raise CheckpointError(
                f"{where} has seed {table.seed}, but the checkpoint {self._folder} has {saved.seed}, on which {why} "
                f"depends; make it with seed={saved.seed}"
            )

    def _name_of(self, module: TableModule, key: str) -> str:
        return f"the id map of table {(key or module.table.name)!r} in checkpoint {self._folder}"

    def check_columns(self, module: TableModule, columns: Iterable[Column]) -> None:
        """Check that columns that a module's table has, or will have, are those that were saved.

        Raises:
            CheckpointError: one is not.
        """
        for column in columns:
            theirs = self._columns.get(column.name)
            if theirs is None or (theirs.row_shape, theirs.dtype) != (column.row_shape, column.dtype):
                found = "not there" if theirs is None else f"{theirs.row_shape} of {theirs.dtype} per row"
                raise CheckpointError(
                    f"column {column.name!r} of {self._in_model(module)} is {column.row_shape} of {column.dtype} per "
                    f"row, but in the checkpoint {self._folder} it is {found}; make model and optimizer with the same "
                    "settings"
                )

    def check_id_maps(self, module: TableModule, id_maps: Mapping[str, Iterable[Tensor]]) -> None:
        """Read the id maps of a module's table, which :meth:`load` replaces.

        Args:
            module: it.
            id_maps: bytes of the maps, by name; of all parts where ranks have saved them.

        Raises:
            CheckpointError: one is damaged, or is of a map with other settings.
        """
        for key, raw in id_maps.items():
            what = self._name_of(module, key)
            try:
                self._id_maps.enter_context(module.table.store.notes.id_maps[key].restoring(raw, what=what))
            except CheckpointError:
                raise
            except TableFormatError as error:
                raise damaged(self._folder, error) from error
            except ValueError as error:
                raise CheckpointError(f"{error}, in {self._in_model(module)}") from error

    def _in_model(self, module: TableModule) -> str:
        return f"table {module.table.name!r} of the model ({self.saved.name or 'itself'})"

    @property
    def has_state(self) -> bool:
        """True if an optimizer had stepped on the rows."""
        return not self.saved.is_initial

    def lacks_state_in(self, module: TableModule) -> bool:
        """Return whether state was saved that a module's optimizer does not keep as it is set."""
        return not self._columns.keys() <= {"weight", *module._step.state.names}

    def load(self, module: TableModule) -> None:
        """Replace the rows of a module's table, its id maps and its attributes; of one that ranks own this rank's.

        The state stays that an attached optimizer keeps there, unless it is the one that goes on.

        Args:
            module: it, which was checked.
        """
        table = module.table
        keeps_state = self.trainer is None and module._step.state.optimizer is not None
        module._step.abandon()
        with table.lock, self._target.table.lock:  # no rows of the next batch are gathered from a part of it
            self._id_maps.close()
            own, first = self._target.table, self._sources[0]
            commits = None if keeps_state else self._commits_to_return_to(own)
            if commits is not None:
                first.shard.table.close()
                commits.return_to(first.saved.commit)
                own.store.note_change(None)
            else:
                names = [name for name in own.columns if name in self._columns]
                self._copy_to(own, ["weight"] if keeps_state else names)
            attributes = dict(first.saved.attributes)
            if keeps_state:
                attributes = {key: value for key, value in attributes.items() if key not in own.live_attributes}
            own.attributes.clear()
            own.attributes.update(attributes)
            if (joint := table.store.joint) is not None:
                joint.torn = None

    def _commits_to_return_to(self, table: Table) -> Commits | None:
        """Return the commits of a table that goes back to the checkpoint's, which no later one of another forbids."""
        source, files, commits = self._sources[0], table.store.files, table.store.commits
        if not self._is_as_saved or not source.saved.path or files is None or not files.lives_at(source.path):
            return None
        let_go(table, Folders(self._folder.parent).manifests(), after=source.saved.commit)
        return commits if commits is not None and max(commits.held, default=0) <= source.saved.commit else None

    def _copy_to(self, table: Table, names: list[str]) -> None:
        """Write columns of the rows to another table."""
        table.check_open(writing=True)
        table.store.note_change(None)
        if self._is_as_saved:
            table.store.take_rows(self._sources[0].shard.table.store, names)
        else:
            take_shards(self._target, [source.shard for source in self._sources], names)
        for source in self._sources:
            for delta in source.saved.deltas:
                self._apply(delta, source.shard, names)
        table.store.notes.writes = self.saved.writes
        changes, first = table.store.notes.track_changes(table.num_embeddings), self._sources[0].saved
        if self._is_as_saved and first.copy and names == list(table.columns) and changes is not None:
            copied[table.store] = CopiedIn(self._token, changes)
        for source in self._sources:
            source.shard.table.close()

    def _apply(self, delta: Delta, source: Shard, names: list[str]) -> None:
        read, table = functools.partial(self._tensors.rows, delta.file), self._target.table
        step = piece_rows(source.table)
        for start in range(0, delta.rows, step):
            stop = min(start + step, delta.rows)
            owned, places = place_rows(read(ROWS, start, stop), source, self._target)
            values = {name: read(name, start, stop).to(table.columns[name].dtype)[owned] for name in names}
            table.scatter(places, values)
