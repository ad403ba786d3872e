"""Tables on their way into a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from speedswap.swapping.checkpoints.files import NewFiles
from speedswap.swapping.checkpoints.manifest import Delta, Manifest, SavedTable
from speedswap.swapping.checkpoints.plain import Encoder
from speedswap.swapping.checkpoints.tables import (
    KEEPER,
    ROWS,
    TOKEN,
    CopiedIn,
    copied,
    description_of,
    let_go,
    path_from,
    piece_rows,
)
from speedswap.swapping.table_module import TableModule
from speedswap.tables import RowStore, Table
from speedswap.tables.files.manifest import shard_name
from speedswap.tables.notes import ChangedRows
from speedswap.tables.shards import InOrder, own_shard
from speedswap.tables.store import Commits

__all__ = ["Saving"]

_MOST_DELTAS = 0.5  # of the bytes of the copy; beyond that, another copy is written
_MOST_HELD = 2  # commits that a table keeps


class Saving:
    """The tables of a model on their way into a checkpoint.

    Args:
        files: of the checkpoint.
        number, token: of it.
        existing: the checkpoints there, each with its folder, oldest first.
        suffix: of the names of this rank's files.
        copies: True to copy tables on disk too.
    """

    def __init__(
        self,
        files: NewFiles,
        number: int,
        token: str,
        existing: Sequence[tuple[Manifest, Path]],
        suffix: str,
        *,
        copies: bool,
    ) -> None:
        self._files = files
        self._number = number
        self._token = token
        self._existing = existing
        self._suffix = suffix
        self._previous = existing[-1] if existing else None
        self._copies = copies
        self._changes: dict[RowStore, ChangedRows | None] = {}
        self._held: list[tuple[Table, Commits, int]] = []

    def save(self, index: int, name: str, module: TableModule, encoder: Encoder) -> SavedTable:
        """Write a table, or its changes; of one that ranks own the rows of this rank.

        Args:
            index: of the table among those of the model.
            name: of the module, in the model.
            module: it.
            encoder: takes tensors.
        """
        table, owners, rank = own_shard(module.table)
        store, shard = table.store, "" if isinstance(owners, InOrder) else "/" + shard_name(rank, owners.world_size)
        live = {key: value for key, source in table.live_attributes.items() if (value := source()) is not None}
        maps = {}
        for key, id_map in store.notes.id_maps.items():
            maps[key] = f"tables.{name}.id_maps.{key}{shard}"
            encoder.tensors[maps[key]] = id_map.to_bytes()
        table.drain()
        saved = SavedTable(
            name,
            {each.name: description_of(each) for each in table.columns.values()},
            table.num_embeddings,
            table.seed,
            table.writes,
            {**table.attributes, **live},
            module._step.state.is_initial,
            maps,
        )
        commit = self._hold(table)
        if commit is not None and table.path is not None:
            checkpoints = self._files.folder.parent
            return replace(saved, path=path_from(checkpoints, table.path, checkpoints.parent), commit=commit)
        copy, deltas = self._copied(name, table, index, shard)
        return replace(saved, copy=copy, deltas=deltas)

    def _hold(self, table: Table) -> int | None:
        """Begin a commit of a table on disk that stays; return its number, or None where the table has to be copied."""
        commits = table.store.commits
        if self._copies or table.path is None or commits is None:
            return None
        let_go(table, self._existing)
        if len(commits.held) >= _MOST_HELD:
            return None
        checkpoints = self._files.folder.parent
        keeper = path_from(table.path, checkpoints, checkpoints.parent)
        table.attributes.update({TOKEN: self._token, KEEPER: keeper})
        commit = commits.hold()
        self._held.append((table, commits, commit))
        return commit

    def wait(self) -> None:
        """Return when the commits that were begun are durable."""
        for table, _, _ in self._held:
            table.flush()

    def give_up(self) -> None:
        """Let go of the commits of a checkpoint that will not be."""
        for table, commits, commit in self._held:
            with suppress(Exception):  # the error that led here counts
                table.flush()
                commits.let_go(commit)

    def _copied(self, name: str, table: Table, index: int, shard: str) -> tuple[str, tuple[Delta, ...]]:
        """Write a copy of a table, or link the one before and write the changes since.

        Args:
            shard: the path of this rank's rows within the copy.
        """
        store = table.store
        before = self._before(name, table, shard)
        changed = None if before is None else copied[store].changes.rows()
        self._changes[store] = store.notes.track_changes(store.num_embeddings)
        if before is not None and changed is not None and self._previous is not None:
            row_bytes = sum(column.row_bytes for column in table.columns.values()) + 8
            exact = all(column.stored_dtype != torch.int8 or not column.compact for column in table.columns.values())
            rows = len(changed) + sum(delta.rows for delta in before.deltas)
            if exact and rows * row_bytes <= _MOST_DELTAS * table.nbytes:
                for file in (before.copy, *(delta.file for delta in before.deltas)):
                    self._files.link(self._previous[1], file)
                more = (self._delta(table, changed, index),) if len(changed) else ()
                return before.copy, (*before.deltas, *more)
        copy = f"table-{self._number}-{index}{shard}"
        self._files.add_copy(table, copy)
        return copy, ()

    def _before(self, name: str, table: Table, shard: str) -> SavedTable | None:
        """Return the table in the checkpoint before, if what has changed since is known."""
        saved = copied.get(table.store)
        if self._previous is None or saved is None or table.store.notes.changes is not saved.changes:
            return None
        manifest = self._previous[0]
        columns = {each.name: description_of(each) for each in table.columns.values()}
        for before in (part for each in manifest.tables for part in each.parts):
            is_same = before.name == name and before.columns == columns and before.copy.endswith(shard)
            files = (before.copy, *(delta.file for delta in before.deltas))
            is_there = bool(before.copy) and all((self._previous[1] / each).exists() for each in files)
            if saved.token == manifest.token and is_same and is_there:
                return before
        return None

    def _delta(self, table: Table, rows: Tensor, index: int) -> Delta:
        """Write some rows, as they are stored."""
        name = f"rows-{self._number}-{index}{self._suffix}.safetensors"
        columns = table.columns.values()
        shapes = {each.name: (each.stored_dtype, (len(rows), *each.row_shape)) for each in columns}
        digests = {key: hashlib.blake2b(digest_size=16) for key in (ROWS, *shapes)}
        step = piece_rows(table)
        with self._files.new_tensors(name, {ROWS: (torch.int64, rows.shape), **shapes}) as writer:
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                values = table.lease(some, device=torch.device("cpu")).columns
                for key, value in {ROWS: some, **values}.items():
                    value = value.to(writer.places[key].dtype).contiguous()
                    writer.write(key, value, first_row=start)
                    digests[key].update(value.reshape(-1).view(torch.uint8).numpy().data)
        return Delta(name, len(rows), {key: digest.hexdigest() for key, digest in digests.items()})

    def published(self) -> None:
        """Note that the checkpoint is complete: later ones need only what changes from now on."""
        for store, changes in self._changes.items():
            if changes is None:
                copied.pop(store, None)
            else:
                copied[store] = CopiedIn(self._token, changes)
