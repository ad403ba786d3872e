"""Save a checkpoint: its tables, then the dense half, then one rename."""

from __future__ import annotations

import operator
import os
import secrets
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedswap._process import all_held
from speedswap.collectives import Kind, Lane, of_all_ranks
from speedswap.errors import CheckpointError, TableFormatError
from speedswap.swapping.attach import require_between_steps
from speedswap.swapping.checkpoints.dense import attach_all, content_of, listed, require_path_and_model
from speedswap.swapping.checkpoints.files import NewFiles, new_digest, path_from, raw, verify_part
from speedswap.swapping.checkpoints.folders import Folders, release
from speedswap.swapping.checkpoints.format import Delta, Encoder, Manifest, SavedTable, word
from speedswap.swapping.optimizers import holds
from speedswap.swapping.table_module import TableModule
from speedswap.tables import RowStore, Table
from speedswap.tables.files.manifest import require_shared, shard_name
from speedswap.tables.idle import IdleStore, RowsAsStored
from speedswap.tables.many import own_shard, remove_former
from speedswap.tables.owners import InOrder
from speedswap.tables.store import CHECKPOINT, CHECKPOINT_FOLDER, ChangedRows, Commits

ROWS = "rows"


class CopiedIn(NamedTuple):
    """The checkpoint with a store's content before these changes."""

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
        optimizers: among several modules over one table, prefer one that these train;
        names: then one with any of these names.
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
def all_locked(modules: Mapping[str, TableModule]) -> Iterator[None]:
    """Lock every table between two steps of its optimizer, so all are saved consistently; later steps wait.

    Raises:
        ThreadError: a step is under way.
    """
    steps, tables = ({getattr(module, name) for module in modules.values()} for name in ("_step", "table"))
    with all_held([step.lock for step in steps]), all_held([table.lock for table in tables]):
        require_between_steps(steps)
        for table in tables:
            table.check_open()
        yield


def as_stored(table: Table) -> Table:
    """Return a table of the same rows that excludes the steps they may have missed; the attributes hold these."""
    return Table(RowsAsStored(table.store)) if isinstance(table.store, IdleStore) else table


def descriptions_of(table: Table) -> dict[str, list[Any]]:
    """Return, by column, the properties that must be equal to copy rows, as plain data."""
    columns = table.columns.values()
    return {each.name: [list(each.row_shape), word(each.dtype), word(each.stored_dtype)] for each in columns}


def lane_of(modules: Mapping[str, TableModule]) -> Lane:
    """Return the lane of the ranks that own the tables of a model; that of this process alone if none do.

    Raises:
        ValueError: a table is local to each rank, so it has no common state; or tables belong to several groups.
    """
    groups = {each.table.ranks for each in modules.values()} - {None}
    if len(groups) > 1:
        raise ValueError(
            f"model has tables of {len(groups)} process groups, but a checkpoint has tables of one; give all tables "
            "the same group, or save parts of the model separately"
        )
    for name, each in modules.items():
        if groups and each.table.ranks is None and each.weight.requires_grad:
            raise ValueError(
                f"table {each.table.name!r} of the model ({name or 'itself'}) is local to each rank, but all ranks own "
                "others; give it the same storage=speedswap.Ranks(), or save it separately"
            )
    group = next(iter(groups), None)
    return Lane(None, "checkpoint") if group is None else group.main


_MOST_DELTAS = 0.5  # changes beyond this share of the copy's bytes make a new copy
_MOST_HELD = 2  # commits that a table keeps
_PIECE_BYTES = 8 << 20


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is complete and durable."""

    path: Path
    """Its folder."""
    step: int
    bytes_written: int
    """For this checkpoint, without data shared with the previous one."""


@of_all_ranks
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    keep: int | Iterable[int] | None = 1,
    tables: str = "auto",
) -> SavedCheckpoint:
    """Save a consistent snapshot of a training; resumed from it, training continues bit for bit as if uninterrupted.

    A checkpoint holds the model's tables with their optimizer state and id maps, every other parameter and buffer, the
    optimizers' state and parameter groups, the global random generators of torch, NumPy and Python, and ``extra``. Call
    this between two steps; inside a :func:`lookahead` is fine.

    A checkpoint is a folder in ``path``, named like ``000007-step-500``. It gets that name, with one rename, once it is
    complete, durable and verified by reading it back. A kill at any instant or a full disk leaves the earlier
    checkpoints, which are removed only afterwards. So the disk needs room for one more than ``keep``. Data unchanged
    since the previous checkpoint is not written again: tensors with the same bytes, and rows of a table in memory as
    long as this process trains it and fewer than half of them have changed; folders share these files by hard links.
    Nothing is pickled: tensors are in safetensors files, the rest is JSON.

    Args:
        path: the directory for the checkpoints of one training, created if needed. In a job of several processes each
            passes its own directory. Ranks that own tables together save one checkpoint: all of them must call this,
            with a shared directory.
        model: any module. Ranks that save together gather what ``fully_shard`` splits; each loads its shard.
        optimizer: one or several optimizers; those whose state is in the tables are attached.
        step: the number of steps taken, at least 0, for information.
        extra: anything else: numbers, text, lists, dicts, tensors, arrays, ``torch.Generator``, and objects with a
            ``state_dict()`` (a learning rate scheduler, a GradScaler).
        tables: ``"auto"`` to reference tables on disk by a held commit, or ``"copy"``. A referenced table stays where
            it is: the checkpoint can be restored only while the table's files exist. A table holds one commit for all
            checkpoints, in ``path`` or elsewhere, in addition to the one being saved: with a larger ``keep``, or with
            checkpoints in two directories, some have copies.
        keep: the checkpoints to keep: the newest ``keep``, or this one and the newest of each of these steps; None for
            all. Damaged ones do not count.

    Raises:
        CheckpointError: another process is saving there, or the bytes read back differ from those written.
        PeerError: another rank has failed.
        TableFullError: the disk has no room. Earlier checkpoints are intact.
        ThreadError: an optimizer's step of a table's rows is under way. Steps that begin later, in other threads, wait.
        TypeError: extra, or some state, cannot be written without pickle.
        ValueError: extra contains itself, or is nested too deeply; step, keep or tables is out of range.
            Nothing was written.
        OptimizerError: the optimizer cannot train a table's rows.

    Example:
        >>> import tempfile, torch, speedswap
        >>> def training():
        ...     model = torch.nn.Sequential(speedswap.Embedding(1000, 8, seed=1), torch.nn.Linear(8, 1))
        ...     return model, torch.optim.Adam(model.parameters())
        >>> model, optimizer = training()
        >>> model(torch.tensor([3, 997])).sum().backward()
        >>> optimizer.step()
        >>> folder = tempfile.mkdtemp()
        >>> saved = speedswap.save_checkpoint(folder, model, optimizer, step=1, extra={"epoch": 0})
        >>> saved.path.name
        '000001-step-1'
        >>> other_model, other_optimizer = training()
        >>> loaded = speedswap.load_checkpoint(folder, other_model, other_optimizer)
        >>> loaded.step, loaded.extra
        (1, {'epoch': 0})
        >>> torch.equal(other_model[0].read(), model[0].read())
        True
    """
    require_path_and_model(path, model)
    step = operator.index(step)
    if not 0 <= step < 2**63:
        raise ValueError(f"step is {step}; give the number of steps taken, from 0 to 2**63 - 1")
    keep = _kept(keep)
    optimizers = listed(optimizer)
    if tables not in ("auto", "copy"):
        raise ValueError(f"tables is {tables!r}; give 'auto' or 'copy'")
    attach_all(optimizers, tables_of(model, optimizers).values())
    folders = Folders(Path(path).absolute())
    modules = tables_of(model)
    own = [own_shard(module.table)[0] for module in modules.values()]
    lane = lane_of(modules)
    is_first = lane.rank == 0
    with lane.task(Kind.CHECKPOINT) as task, folders.locked() if is_first else nullcontext():
        number = _next_number(folders, extra) if is_first else 0
        number, token = task.share([number, secrets.token_hex(16)])[0]
        previous = folders.tidy(task, own, keep if isinstance(keep, int) else None).newest
        with folders.writing(number, step, token) if is_first else folders.joining(token) as folder:
            saving = None
            try:
                task.round()
                files = NewFiles(require_shared(folder, folders.path), folders.sound)
                encoder, suffix = Encoder(), "" if is_first else f"-{lane.rank}"
                saving = TablesToSave(folders, files, number, step, token, previous, suffix, copies=tables == "copy")
                with all_locked(modules):
                    saved = tuple(
                        saving.save(index, name, module, encoder)
                        for index, (name, module) in enumerate(modules.items())
                        if is_first or module._step.is_sharded
                    )
                    task.round()  # detects a failed rank before dense parameters are gathered
                    content = content_of(model, optimizers, extra, encoder, lane.rank)
                    name = f"tensors-{number}{suffix}.safetensors"
                    tensors = files.write_changed(name, encoder.tensors, previous)
                saving.wait()
                with _says_unreadable(folders):
                    written = files.written  # and linked files, which are known to be sound
                    written.check(tensors.values())
                    for part in saved:
                        if part.copy:
                            verify_part(part, written, token)
                description = Manifest(token, step, content, tensors, saved)
                parts = task.share([asdict(description), files.bytes_written])
                bytes_written = sum(nbytes for _, nbytes in parts)
                if is_first:
                    num_rows = {n: each.table.num_embeddings for n, each in modules.items() if each._step.is_sharded}
                    whole = Manifest.merged([Manifest.of(part) for part, _ in parts], num_rows)
                    bytes_written += whole.write(files.directory)
                    with _says_unreadable(folders):
                        Manifest.read(files.directory)
            except BaseException:
                task.give_up()  # so the others have finished before the folder is removed
                if saving is not None:
                    saving.give_up()
                raise
        Folders.known_sound = token
        task.round()  # the folder has its name
        saving.published()
        found = folders.tidy(task, own, keep, token)
        for module in modules.values():
            table, owners, _ = own_shard(module.table)
            if module._step.is_sharded and table.path is not None and is_first:
                remove_former(table.path.parent, owners.world_size, lambda former: release(former, found))
        task.finish()
    return SavedCheckpoint(folders.path / Folders.name(number, step), step, bytes_written)


def _next_number(folders: Folders, extra: Any) -> int:
    """Return the number of the next checkpoint, once ``extra`` is known to fit.

    Raises:
        CheckpointError: no number is left.
    """
    Encoder(gathers=False).encode(extra, "extra")  # report what cannot be written before writing tables
    entries = folders.entries()
    number = entries[-1].number + 1 if entries else 1
    if number >= 10**18:
        raise CheckpointError(f"path has {entries[-1].path.name}, the largest checkpoint number; move it elsewhere")
    return number


@contextmanager
def _says_unreadable(folders: Folders) -> Iterator[None]:
    """Raise CheckpointError, with the remedy, if what was written cannot be read back."""
    try:
        yield
    except (CheckpointError, TableFormatError) as error:
        raise CheckpointError(
            f"the checkpoint written to {folders.path} cannot be read back ({error.__cause__ or error}); earlier ones "
            "are intact: check the disk, or give another path"
        ) from error


def _kept(keep: int | Iterable[int] | None) -> int | Collection[int] | None:
    """Return the checkpoints to keep: a number of the newest, or their steps.

    Raises:
        ValueError: ``keep`` is neither.
    """
    if keep is None or isinstance(keep, range):
        return keep
    with suppress(TypeError):
        if isinstance(keep, Iterable):
            return frozenset(map(operator.index, keep))
        if operator.index(keep) >= 1:
            return operator.index(keep)
    shown = keep if isinstance(keep, SupportsIndex) else repr(keep)
    raise ValueError(f"keep is {shown}; give 1 or more, steps to keep, or None for all")


class TablesToSave:
    """The tables of a model being saved to a checkpoint.

    Args:
        folders: the directory's checkpoints.
        files: the checkpoint's files.
        number, step, token: the checkpoint's.
        previous: the newest of the existing checkpoints, and its folder.
        suffix: suffix of this rank's file names.
        copies: True to copy tables on disk too.
    """

    def __init__(
        self,
        folders: Folders,
        files: NewFiles,
        number: int,
        step: int,
        token: str,
        previous: tuple[Manifest, Path] | None,
        suffix: str,
        *,
        copies: bool,
    ) -> None:
        self._folders, self._files, self._token, self._suffix = folders, files, token, suffix
        self._number, self._name = number, folders.name(number, step)
        self._previous, self._copies = previous, copies
        self._changes: dict[RowStore, ChangedRows | None] = {}
        self._held: list[tuple[Table, Commits, int]] = []

    def save(self, index: int, name: str, module: TableModule, encoder: Encoder) -> SavedTable:
        """Write a table, or its changes; if ranks own it, this rank's rows.

        Args:
            index: the table's index in the model.
            name: the module's name in the model.
            module: the module.
            encoder: collects tensors.
        """
        table, owners, rank = own_shard(module.table)
        stored = as_stored(table)
        store, shard = table.store, "" if isinstance(owners, InOrder) else "/" + shard_name(rank, owners.world_size)
        live = {key: value for key, source in table.live_attributes.items() if (value := source()) is not None}
        maps = {}
        for key, id_map in store.notes.id_maps.items():
            maps[key] = f"tables.{name}.id_maps.{key}{shard}"
            encoder.tensors[maps[key]] = id_map.to_bytes()
        table.drain()
        attributes = {**table.attributes, **live}  # before those of the commit
        return SavedTable(
            name,
            descriptions_of(table),
            table.num_embeddings,
            table.seed,
            table.writes,
            attributes,
            module._step.state.is_initial,
            maps,
            **(self._held_by(table) or self._copied(name, table, stored, index, shard)),
        )

    def _held_by(self, table: Table) -> dict[str, Any]:
        """Begin a held commit of a table on disk; return its path and number, or nothing if it must be copied."""
        commits = table.commits
        if self._copies or table.path is None or commits is None or len(commits.held) >= _MOST_HELD:
            return {}
        checkpoints = self._folders.path
        keeper = path_from(table.path, checkpoints, checkpoints.parent)
        table.attributes.update({CHECKPOINT: self._token, CHECKPOINT_FOLDER: f"{keeper}/{self._name}"})
        commit = commits.hold()
        self._held.append((table, commits, commit))
        return {"path": path_from(checkpoints, table.path, checkpoints.parent), "commit": commit}

    def wait(self) -> None:
        """Wait until the begun commits are durable."""
        for table, _, _ in self._held:
            table.flush()

    def give_up(self) -> None:
        """Release the commits of an abandoned checkpoint."""
        for table, commits, commit in self._held:
            with suppress(Exception):  # the original error matters
                table.flush()
                commits.let_go(commit)

    def _copied(self, name: str, table: Table, stored: Table, index: int, shard: str) -> dict[str, Any]:
        """Write a copy of a table, or link the previous copy and write the changes since.

        Args:
            stored: its rows as stored, which are written.
            shard: the path of this rank's rows within the copy.
        """
        store = table.store
        before = self._before(name, table, shard)
        changed = None if before is None else copied[store].changes.rows()
        self._changes[store] = store.notes.track_changes(store.facts.num_embeddings)
        if before is not None and changed is not None and self._previous is not None:
            row_bytes = sum(column.row_bytes for column in stored.columns.values()) + 8
            exact = all(column.stored_dtype != torch.int8 or not column.compact for column in stored.columns.values())
            rows = len(changed) + sum(delta.rows for delta in before.deltas)
            names = [before.copy, *(delta.file for delta in before.deltas)]
            verify = partial(verify_part, before, token=self._token)
            few = exact and rows * row_bytes <= _MOST_DELTAS * stored.nbytes
            if few and self._files.link(self._previous[1], names, verify):
                more = (self._delta(stored, changed, index),) if len(changed) else ()
                return {"copy": before.copy, "deltas": (*before.deltas, *more)}
        copy = f"table-{self._number}-{index}{shard}"
        self._files.add_copy(stored, copy)
        return {"copy": copy}

    def _before(self, name: str, table: Table, shard: str) -> SavedTable | None:
        """Return the table in the previous checkpoint, if the changes since are known."""
        saved = copied.get(table.store)
        if self._previous is None or saved is None or table.store.notes.changes is not saved.changes:
            return None
        manifest = self._previous[0]
        columns = descriptions_of(table)
        for before in (part for each in manifest.tables for part in each.parts):
            is_same = before.name == name and before.columns == columns and before.copy.endswith(shard)
            if saved.token == manifest.token and is_same and before.copy:
                return before
        return None

    def _delta(self, table: Table, rows: Tensor, index: int) -> Delta:
        """Write some rows in their stored form."""
        name = f"rows-{self._number}-{index}{self._suffix}.safetensors"
        columns = table.columns.values()
        shapes = {each.name: (each.stored_dtype, (len(rows), *each.row_shape)) for each in columns}
        shapes = {ROWS: (torch.int64, tuple(rows.shape)), **shapes}
        digests = {key: new_digest(*shape) for key, shape in shapes.items()}
        at_once = max(1, _PIECE_BYTES * table.num_embeddings // max(table.nbytes, 1))
        with self._files.new_tensors(name, shapes) as writer:
            for start in range(0, len(rows), at_once):
                some = rows[start : start + at_once]
                values = table.lease(some, device=torch.device("cpu")).columns
                for key, value in {ROWS: some, **values}.items():
                    value = value.to(writer.places[key].dtype).contiguous()
                    writer.write(key, value, first_row=start)
                    digests[key].update(raw(value))
        return Delta(name, len(rows), {key: digest.hexdigest() for key, digest in digests.items()})

    def published(self) -> None:
        """Record that the checkpoint is complete: later ones need only the changes from now on."""
        for store, changes in self._changes.items():
            if changes is None:
                copied.pop(store, None)
            else:
                copied[store] = CopiedIn(self._token, changes)
