"""Load a checkpoint: check everything, then load its tables, then the dense half."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._words import require_kind
from speedswap.collectives import Kind, of_all_ranks
from speedswap.errors import CheckpointError, TableClosedError, TableFormatError
from speedswap.swapping.attach import warn_of_idle_rows
from speedswap.swapping.checkpoints.dense import (
    attach_all,
    check_model,
    check_optimizers,
    check_random_state,
    listed,
    load_dense,
    random_of,
    require_path_and_model,
    require_restorable,
    restore_random_state,
    restored,
)
from speedswap.swapping.checkpoints.files import TensorsOf, open_folder, open_part, verify_rows
from speedswap.swapping.checkpoints.folders import Folders, release
from speedswap.swapping.checkpoints.format import MANIFEST, Delta, Manifest, SavedTable, damaged, decode, says_malformed
from speedswap.swapping.checkpoints.saving import (
    ROWS,
    CopiedIn,
    all_locked,
    as_stored,
    copied,
    descriptions_of,
    lane_of,
    modules_of,
    tables_of,
)
from speedswap.swapping.optimizer_state import FoundState, OptimizerState
from speedswap.swapping.optimizers import innermost, saved_settings
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Block, Column, Table
from speedswap.tables.averages import averages_of, kept_columns, recall_averages
from speedswap.tables.files.damage import require
from speedswap.tables.idle import LAST_STEP, IdleStore
from speedswap.tables.many import Shard, own_shard, place_rows, take_shards
from speedswap.tables.owners import InOrder, Owners
from speedswap.tables.record import bases_in
from speedswap.tables.store import IDLE_STEPS, Commits, WrappedStore

_PIECE_BYTES = 8 << 20


class LoadedCheckpoint(NamedTuple):
    """A loaded checkpoint."""

    step: int
    extra: Any
    """As it was saved, with tensors on the CPU; of objects their ``state_dict()``."""
    path: Path
    """Its folder."""

    def __repr__(self) -> str:
        return f"LoadedCheckpoint(step={self.step}, extra={reprlib.repr(self.extra)}, path={str(self.path)!r})"


@of_all_ranks
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    random_state: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint of :func:`save_checkpoint` into a model and its optimizers, to resume training.

    Build the model as for the training, with any storage: rows saved from memory can be loaded to disk, and vice versa.
    Its tables get the checkpoint's rows, whatever they held. Everything is checked before anything is changed;
    untrusted files are safe to load. A checkpoint of tables owned by ranks can be loaded by one process or by any
    number of ranks, which must all call this; ranks can also load a checkpoint of one process.

    Args:
        path: as for :func:`save_checkpoint`; or the folder of one checkpoint.
        model: a model with the same parameters, buffers and tables. None to read only step and extra, e.g. the settings
            to build the model with.
        optimizer: the optimizers, matching the saved ones in number, class and order; they get the checkpoint's
            settings. None to load only the model: an optimizer that trains it keeps all of its state.
        step: load the newest checkpoint of this step; by default the newest.
        extra: objects with a ``load_state_dict()``, and ``torch.Generator``, to load what was saved under their keys.
        random_state: also restore the global random generators.

    Raises:
        CheckpointError: it does not exist, is damaged, or belongs to another model. Nothing was changed.
        TableClosedError: a table of the model is closed. Nothing was changed.
        ThreadError: an optimizer's step of a table's rows is under way. Nothing was changed.
        TypeError: an object in extra cannot load what was saved. Nothing was changed.
        ValueError: model is None, but other objects to load were given. Nothing was changed.
        PeerError: another rank has failed.
        TableFullError: a table's disk has no room for its rows.

    Example:
        >>> import tempfile, torch, speedswap
        >>> folder = tempfile.mkdtemp()
        >>> items = speedswap.Embedding(10, 2)
        >>> _ = speedswap.save_checkpoint(folder, items)
        >>> there = speedswap.Embedding(10, 2, path=folder + "/items")
        >>> _ = speedswap.load_checkpoint(folder, there)
        >>> torch.equal(there.read(), items.read())
        True
    """
    require_path_and_model(path, nn.Identity() if model is None else model)
    optimizers = listed(optimizer)
    if model is None and (optimizers or extra):
        given = "optimizer" if optimizers else "extra"
        raise ValueError(
            f"model is None, to read only step and extra, so {given} would not be loaded; give the model too, "
            f"or leave {given} out"
        )
    if extra is not None:
        require_kind("extra", extra, Mapping, "objects by the names under which they were saved")
    while True:
        folder = Path(path).absolute()
        if is_chosen := step is not None or not (folder / MANIFEST).exists():
            folder = Folders(folder).choose(step).path
        try:
            return _loaded(folder, model, optimizers, extra or {}, random_state=random_state)
        except (CheckpointError, TableClosedError) as error:
            if folder.exists():
                raise
            if not is_chosen or any(each.table.ranks for each in modules_of(model or nn.Identity()).values()):
                raise CheckpointError(f"checkpoint {folder} was removed while it was loaded; load another") from error


def _loaded(
    folder: Path,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    extra: Mapping[str, Any],
    *,
    random_state: bool,
) -> LoadedCheckpoint:
    """Load the checkpoint in a folder; arguments and errors are those of :func:`load_checkpoint`."""
    if model is None:
        manifest, files = _opened(folder)
        return LoadedCheckpoint(manifest.step, _decoded(manifest, files, ("extra",))["extra"], folder)
    modules = tables_of(model)
    lane = lane_of(modules)
    with lane.task(Kind.CHECKPOINT) as task, all_locked(modules):
        manifest, files = _opened(folder)
        if len({*task.share(manifest.token)}) > 1:
            raise CheckpointError(f"path is {folder}, where ranks find different checkpoints; give all the same path")
        random = random_of(lane.rank)
        names = ("model", "optimizers", "extra", *({random} & manifest.content.keys()))
        content = _decoded(manifest, files, names)
        check_model(content["model"], model, folder)
        if optimizers:
            with says_malformed(folder, "the optimizers"):
                check_optimizers(content["optimizers"], optimizers, folder)
        if random_state and random in content:
            with says_malformed(folder, "the state of the random generators"):
                check_random_state(content[random])
        for key, target in extra.items():
            if not isinstance(content["extra"], dict) or key not in content["extra"]:
                raise CheckpointError(f"extra has {key!r}, but the checkpoint {folder} has no extra of this name")
            require_restorable(target, content["extra"][key], key)
        modules = tables_of(model, optimizers, [each.name for each in manifest.tables])
        tables = _tables(manifest, files, model, modules)
        attach_all(optimizers, modules.values(), frozen=[table.module for table in tables if table.goes_on])
        states = [each["state"] for each in content["optimizers"]] if optimizers else []
        state_of = dict(zip(map(innermost, optimizers), states, strict=True))
        for table in tables:
            trainer = table.module._step.state.optimizer
            table.trainer = trainer if trainer in state_of else None
            table.check()
            table.verify()
        _take_settings(tables, state_of)
        with restored(extra, content["extra"], folder):
            task.round()  # nothing else has changed yet, on any rank
        for table in tables:
            table.load()
        task.round()  # before dense parameters are split, which needs all ranks
        load_dense(model, content["model"], optimizers, states)
        for table in tables:
            if table.trainer is not None:
                table.module._step.state.resume(table.trainer, initial=table.saved.is_initial)
        if random_state and random in content:
            restore_random_state(content[random])
        task.round()
        task.finish()
    Folders.known_sound = manifest.token
    return LoadedCheckpoint(manifest.step, content["extra"], folder)


def _opened(folder: Path) -> tuple[Manifest, TensorsOf]:
    """Return the description of the checkpoint in a folder, and its tensors.

    Raises:
        CheckpointError: it does not exist, or is damaged.
    """
    directory = open_folder(folder)
    return Manifest.read(directory), TensorsOf(directory)


def _decoded(manifest: Manifest, files: TensorsOf, parts: Sequence[str]) -> dict[str, Any]:
    """Return parts of the checkpoint's data.

    Raises:
        CheckpointError: it is damaged.
    """
    with says_malformed(files.folder, "its content"):
        content = {
            part: decode(manifest.content[part], lambda name: files.read(manifest.tensors[name])) for part in parts
        }
        for each in content.get("optimizers", []):
            is_whole = isinstance(each["class"], str) and {"state", "param_groups"} <= each["state"].keys()
            require(is_whole, "an optimizer's state is missing")
        require(isinstance(content.get("model", {}), dict), "the model's state is missing")
    return content


def _take_settings(tables: Iterable[TableToLoad], state_of: Mapping[Optimizer, dict[str, Any]]) -> None:
    """Add columns for state that optimizers keep only with a checkpoint's settings, not with their current ones.

    Args:
        tables: every table of the checkpoint.
        state_of: the optimizers' state in the checkpoint, not loaded yet.

    Raises:
        CheckpointError, OptimizerError: with these settings they keep different state than was saved. No table has
            changed.
    """
    found: list[tuple[OptimizerState, FoundState]] = []
    for table in tables:
        state = table.module._step.state
        if table.trainer is not None and not table.columns.keys() <= {"weight", *state.names}:
            with saved_settings(table.trainer, state_of[table.trainer]):
                kept = state.examine(table.trainer)
            table.check_columns(kept.columns)
            found.append((state, kept))
    for state, kept in found:
        state.add(kept)


def _tables(
    manifest: Manifest, files: TensorsOf, model: nn.Module, modules: dict[str, TableModule]
) -> list[TableToLoad]:
    """Return the tables of a checkpoint, each checked.

    Args:
        modules: one module per table of the model; the saving model may have named a different module of the same
            table.

    Raises:
        CheckpointError: a table is damaged, or the tables do not match the model's.
    """
    names = [saved.name for saved in manifest.tables]
    every, of_store = modules_of(model), {module.table.store: module for module in modules.values()}
    found = {name: of_store[every[name].table.store] for name in names if name in every}
    if len(names) != len(modules) or len({*found.values()}) != len(modules):
        raise CheckpointError(
            f"the model has tables at {sorted(modules)}, but the checkpoint {files.folder} at {sorted(names)}; make "
            "the model as for the training"
        )
    tables = []
    for saved in manifest.tables:
        tables.append(table := TableToLoad(saved, found[saved.name], files, manifest.token))
        table.check()
        for key in {key: None for part in saved.parts for key in part.id_maps}:
            with says_malformed(files.folder, f"an id map of table {saved.name!r}"):
                table.check_id_map(key, (files.read(manifest.tensors[part.id_maps[key]]) for part in saved.parts))
    return tables


class _Source(NamedTuple):
    """Rows of a checkpoint's table: all, or those saved by one rank."""

    saved: SavedTable
    shard: Shard


class TableToLoad:
    """A table of a checkpoint being loaded into a model.

    Args:
        saved: the table's description.
        module: a module over the model's table to load into.
        tensors: the checkpoint's files.
        token: the checkpoint's token.

    Attributes:
        columns: the saved columns, by name.
        trainer: the optimizer that resumes the rows' state; None if the state is not loaded.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, saved: SavedTable, module: TableModule, tensors: TensorsOf, token: str) -> None:
        self.saved, self.module = saved, module
        self.trainer: Optimizer | None = None
        self._folder, self._tensors, self._token = tensors.folder, tensors, token
        self._where = f"table {module.table.name!r} of the model ({saved.name or 'itself'})"
        self._target = target = own_shard(module.table)  # the rows in this process
        owners = Owners(saved.num_embeddings, len(saved.shards)) if saved.shards else InOrder(saved.num_embeddings)
        self._is_as_saved = owners == target.owners
        self._sources = [
            self._open(saved.parts[rank], owners, rank)
            for rank in ([target.rank] if self._is_as_saved else range(owners.world_size))
            if len(owners.places_shared(rank, target.owners, target.rank))
        ]
        self.columns = self._sources[0].shard.table.columns
        self._id_maps = ExitStack()  # if never closed, no map changes

    @property
    def goes_on(self) -> bool:
        """True if the table resumes its state, even if it is currently frozen."""
        return not self.saved.is_initial and self.module.table.columns["weight"].stored_dtype != torch.int8

    def _open(self, part: SavedTable, owners: Owners | InOrder, rank: int) -> _Source:
        """Open a part's files, check that they belong to the checkpoint, and read all data to be copied."""
        bases = bases_in(self._target.table.columns.values())
        table = open_part(part, self._folder, self._token, bases)
        with says_malformed(self._folder, "its rows", part.copy or str(table.path)):
            is_same = (table.num_embeddings, descriptions_of(table)) == (owners.rows_of(rank), part.columns)
            require(is_same, f"{table.path} is not the table {self.saved.name!r}")
            if isinstance(table.store, IdleStore):
                if IDLE_STEPS in part.attributes:  # rows have changed since the copy was made, and lack different steps
                    table.attributes[IDLE_STEPS] = part.attributes[IDLE_STEPS]
                _ = table.store.steps
            for delta in part.deltas:
                self._tensors.check(delta.tensors)
                self._check_delta(delta, as_stored(table))
        return _Source(part, Shard(table, owners, rank))

    def _lives_in(self, table: Table) -> bool:
        """Return whether a table is the model's own table at an earlier commit."""
        files = self._target.table.store.files
        return table.path is not None and files is not None and files.lives_at(table.path)

    def verify(self) -> None:
        """Read all rows that :meth:`load` will copy.

        Raises:
            CheckpointError: one is damaged, cannot be read, or has a value that the model's table cannot store.
        """
        own, owners, rank = self._target
        for part, (table, their, number) in self._sources:
            first = next(each for each in range(owners.world_size) if len(their.places_shared(number, owners, each)))
            returns = own.commits is not None and max(own.commits.held, default=0) <= part.commit
            if first == rank and not (returns and self._lives_in(table) and not self._keeps_state):
                verify_rows(table, self._folder)  # if several ranks copy from it, the first reads it all
            for column in own.columns.values():
                if column.name == "weight" or (column.name in self.columns and not self._keeps_state):
                    self._require_storable(column, table, part.deltas)

    def _require_storable(self, column: Column, table: Table, deltas: Iterable[Delta]) -> None:
        if not column.compact or column.stored_dtype == table.columns[column.name].stored_dtype:
            return
        step = max(1, _PIECE_BYTES // column.row_bytes)
        starts = range(0, table.num_embeddings, step)
        pieces = ((at, table.read(at, min(at + step, starts.stop), column=column.name)) for at in starts)
        changed = ((0, piece) for delta in deltas for (piece,) in self._tensors.pieces(delta.file, column.name))
        for start, values in chain(pieces, changed):
            try:
                column.require_storable(values, start)
            except ValueError as error:
                raise CheckpointError(f"{error}, in {self._where}") from error

    @property
    def _keeps_state(self) -> bool:
        return self.trainer is None and self.module._step.state.optimizer is not None

    def _check_delta(self, delta: Delta, table: Table) -> None:
        """Check that changed rows are the table's.

        Raises:
            Damage: they are not.
        """
        places, name = self._tensors.file(delta.file).places, self.saved.name
        shapes = {each.name: (each.stored_dtype, (delta.rows, *each.row_shape)) for each in table.columns.values()}
        shapes[ROWS] = torch.int64, (delta.rows,)
        found = {key: (place.dtype, place.shape) for key, place in places.items()}
        require(
            found == shapes and shapes.keys() == delta.digests.keys(),
            f"{delta.file} does not have the rows of table {name!r}",
        )
        last = -1
        for (rows,) in self._tensors.pieces(delta.file, ROWS):
            is_ascending = last < int(rows[0]) <= int(rows[-1]) < table.num_embeddings and bool((rows.diff() > 0).all())
            require(is_ascending, f"{delta.file} has rows that table {name!r} lacks, or has twice")
            last = int(rows[-1])

    def check(self) -> None:
        """Check that the table matches the model's.

        Raises:
            CheckpointError: the message names the difference.
        """
        table, saved = self.module.table, self.saved
        maps = table.store.notes.id_maps
        table.check_open(writing=True)
        if table.num_embeddings != saved.num_embeddings:
            raise CheckpointError(
                f"{self._where} has {table.num_embeddings} rows, but the checkpoint {self._folder} has "
                f"{saved.num_embeddings}; make the model with that number"
            )
        if self.trainer is not None:
            warn_of_idle_rows(self.trainer, self.module._step, self._sources[0].saved.attributes)
        has_state = not saved.is_initial or not self.columns.keys().isdisjoint(self.module._step.state.names)
        goes_on = self.trainer is not None and has_state  # else the table was frozen, and starts with initial state
        self.check_columns(each for each in table.columns.values() if goes_on or each.name in self.columns)
        if saved.id_maps.keys() != maps.keys():
            raise CheckpointError(
                f"{self._where} has {len(maps)} id maps, but the checkpoint {self._folder} has {len(saved.id_maps)}; "
                "make the model with that number"
            )
        renews = any(id_map.evict is not None for id_map in maps.values())
        draws = any(column.rounds_at_random for column in table.columns.values())
        if self.trainer is not None and table.seed != saved.seed and (renews or draws):
            why = "resetting rows" if renews else "stochastic rounding"
            raise CheckpointError(
                f"{self._where} has seed {table.seed}, but the checkpoint {self._folder} has {saved.seed}, on which "
                f"{why} depends; make it with seed={saved.seed}"
            )

    def check_columns(self, columns: Iterable[Column]) -> None:
        """Check that the model table's present or future columns match the saved ones.

        Raises:
            CheckpointError: a column does not match.
        """
        for column in columns:
            theirs = self.columns.get(column.name)
            if theirs is None or (theirs.row_shape, theirs.dtype) != (column.row_shape, column.dtype):
                found = "not there" if theirs is None else f"{theirs.row_shape} of {theirs.dtype} per row"
                raise CheckpointError(
                    f"column {column.name!r} of {self._where} is {column.row_shape} of {column.dtype} per row, but in "
                    f"the checkpoint {self._folder} it is {found}; make model and optimizer with the same settings"
                )

    def check_id_map(self, key: str, parts: Iterable[Tensor]) -> None:
        """Read an id map of the model's table, which :meth:`load` replaces.

        Args:
            key: the map's name.
            parts: its bytes, from each rank that saved a part.

        Raises:
            CheckpointError: it is damaged, or belongs to a map with other settings.
        """
        table = self.module.table
        what = f"the id map of table {(key or table.name)!r} in checkpoint {self._folder}"
        try:
            self._id_maps.enter_context(table.store.notes.id_maps[key].restoring(parts, what=what))
        except CheckpointError:
            raise
        except TableFormatError as error:
            raise damaged(self._folder, error) from error
        except ValueError as error:
            raise CheckpointError(f"{error}, in {self._where}") from error

    def load(self) -> None:
        """Replace the model table's rows, id maps and attributes; if ranks own it, this rank's part.

        An attached optimizer's state stays, unless that optimizer resumes the saved state.
        """
        table, step = self.module.table, self.module._step
        keeps_state = self._keeps_state
        step.abandon()
        with table.lock, self._target.table.lock:  # a prefetch must not read a half-loaded table
            self._id_maps.close()
            own, first = self._target.table, self._sources[0]
            initial = [column for column in own.columns.values() if self.trainer and column.name not in self.columns]
            commits = None if keeps_state else self._commits_to_return_to(own)
            if commits is not None:
                first.shard.table.close()
                commits.return_to(first.saved.commit)
                own.note_change(None)
            else:
                kept = [] if keeps_state else kept_columns(first.saved.attributes)  # the next Averaged takes them up
                missing = [self.columns[name] for name in kept if name in self.columns and name not in own.columns]
                own.add_columns(missing, commit=False)
                names = [name for name in own.columns if name in self.columns]
                lack_steps = self._copy_to(own, ["weight"] if keeps_state else names)
            lacking = [column for column in initial if column.name not in own.columns]
            own.add_columns(lacking, commit=False)
            own.reset_columns([column for column in initial if column not in lacking])
            attributes = dict(first.saved.attributes)
            if commits is None and not lack_steps:
                attributes.pop(IDLE_STEPS, None)
            if keeps_state:
                attributes = {key: value for key, value in attributes.items() if key not in own.live_attributes}
            own.attributes.clear()
            own.attributes.update(attributes)
            if commits is None and lack_steps:
                own.store.notes.adopted += 1  # the steps are now those of the attributes
            if not keeps_state:
                recall_averages(own)
            if (joint := table.joint) is not None:
                joint.torn = None

    def _commits_to_return_to(self, table: Table) -> Commits | None:
        """Return the commits of a table that can be rolled back to the checkpoint's; None if a later commit is held."""
        source = self._sources[0]
        if not self._is_as_saved or not self._lives_in(source.shard.table):
            return None
        is_later_held = release(table, Folders(self._folder.parent).read(), after=source.saved.commit)
        return None if is_later_held else table.commits

    def _copy_to(self, table: Table, names: list[str]) -> bool:
        """Write columns of the rows to another table; return whether they still lack steps as when saved."""
        table.check_open(writing=True)
        table.note_change(None, names)
        if isinstance(table.store, IdleStore):
            table.store.bring_up_to_date()
        target, sources = self._target, [source.shard for source in self._sources]
        if lack_steps := self._take_as_stored(table, names):
            table.store = idle = IdleStore.over(table.store)
            idle.number_rows()
            target, *sources = (each._replace(table=as_stored(each.table)) for each in (target, *sources))
            names = [*names, LAST_STEP]
        files, found = table.store.files, sources[0].table.store
        if lack_steps and isinstance(found, WrappedStore):
            found = found.inner
        if not (self._is_as_saved and files is not None and files.take_rows(found, names)):
            take_shards(target, sources, names)
        for source, shard in zip(self._sources, sources, strict=True):
            for delta in source.saved.deltas:
                self._apply(delta, shard, target, names)
        table.store.notes.writes = self.saved.writes
        changes, first = table.store.notes.track_changes(table.num_embeddings), self._sources[0].saved
        is_whole = {*names} == {*as_stored(table).columns} == {*as_stored(sources[0].table).columns}
        if self._is_as_saved and first.copy and is_whole and changes is not None:
            copied[table.store] = CopiedIn(self._token, changes)
        for source in self._sources:
            source.shard.table.close()
        return lack_steps

    def _take_as_stored(self, table: Table, names: list[str]) -> bool:
        """Return whether a table takes rows as saved, all of which lack the same steps."""
        found = [source.shard.table.store for source in self._sources]
        logs = [source.saved.attributes.get(IDLE_STEPS) for source in self._sources]
        is_same = all(isinstance(each, IdleStore) for each in found) and logs.count(logs[0]) == len(logs)
        is_whole = {*names} == {*self.columns} and not averages_of(table)
        return is_same and is_whole and bool(logs[0] and (logs[0]["steps"] or isinstance(table.store, IdleStore)))

    def _apply(self, delta: Delta, source: Shard, target: Shard, names: list[str]) -> None:
        columns = as_stored(source.table).columns
        for rows, *values in self._tensors.pieces(delta.file, ROWS, *columns):
            owned, places = place_rows(rows, source, target)
            own = {
                name: value.to(column.dtype)[owned]
                for (name, column), value in zip(columns.items(), values, strict=True)
            }
            if isinstance(source.table.store, IdleStore):
                source.table.store.take(Block(places, own))
            target.table.scatter(places, {name: own[name] for name in names})
