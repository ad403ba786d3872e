"""Stores opened from files, and copies of stores: in memory, and in files."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import get_args

import torch

from speedswap import kernels
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.disk.layout import LogLayout
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.fresh import FreshRows
from speedswap.tables.initial import is_lazy
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import host as storages
from speedswap.tables.record_groups import RecordGroups
from speedswap.tables.store import RowStore

__all__ = ["copy_rows", "layout_of", "lives_there", "open_store", "save_copy", "save_store"]

_log = logging.getLogger("speedswap")
_SAVE_BYTES = 64 * 2**20
_TRIES = 100


def open_store(
    path: Path,
    mode: str = "r+",
    disk: DiskOptions = DiskOptions(),  # noqa: B008
    commit: int | None = None,
) -> RowStore:
    """Open a store in files; arguments and errors are those of :meth:`Table.open`."""
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is {mode!r}; give 'r+' to read and write, or 'r' to read")
    if commit is not None and (isinstance(commit, bool) or not isinstance(commit, int) or commit < 0):
        raise ValueError(f"commit is {commit!r}; give the number of a commit that is kept, or None for the last one")
    if (sharded := _opened_shards(path, mode, disk)) is not None:
        if commit is not None:
            sharded.close()
            raise ValueError(f"commit is {commit}, but table {sharded.name!r} keeps no commits; leave it out")
        return sharded
    for last in (*[False] * _TRIES, True):
        directory, manifest, contents = TableDirectory.open(path, writable=mode == "r+")
        try:
            return LogStore(directory, manifest, contents, disk, commit)
        except TableFormatError:
            directory.release()
            if last or directory.writable or not directory.has_changed:
                raise  # else a writer has added columns just now
        except BaseException:
            directory.release()
            raise
    raise AssertionError


def _opened_shards(path: Path, mode: str, disk: DiskOptions) -> RowStore | None:
    """Return a store of all rows of a table that ranks own; None where another table is, or none."""
    from speedswap.tables.shards.in_files import ShardsInFiles, read_manifest

    try:
        manifest = read_manifest(path)
    except (TableFormatError, OSError):
        return None  # what opens any other table says so
    if manifest is None:
        return None
    store = ShardsInFiles(path, manifest, disk)
    if mode == "r+":
        store.close()
        store.check(writing=True)
    return store


def lives_there(path: str | os.PathLike[str]) -> FileExistsError:
    """Return the error of a table that was to be saved where its own files are."""
    return FileExistsError(f"path is {os.fspath(path)!r}, where this table lives already; use flush()")


def save_copy(source: RowStore, path: Path, *, overwrite: bool) -> None:
    """Write a copy of a store to a table's directory, which appears complete or not at all."""
    with TableDirectory.replacing(path, overwrite=overwrite) as copied, source.locked.lock:
        if source.closed:
            raise TableClosedError(f"table {source.name!r} was closed meanwhile; save it before")
        save_store(source, copied)


def save_store(source: RowStore, directory: TableDirectory) -> None:
    """Write a copy of a store's rows, attributes and id maps to a new directory, as one commit."""
    layout, disk = layout_of(source), DiskOptions(cache_bytes=_SAVE_BYTES)
    target = LogStore.create(directory, source.name, source.num_embeddings, source.seed, layout, disk, filled=False)
    try:
        for rows, held in source.written_rows():
            target.put(rows, held)
        target.notes.take_over(source.notes, source.part_name)
        target.flush()
    finally:
        target.close_log()


def layout_of(store: RowStore) -> LogLayout:
    """Return a layout of records on disk with the columns of a store, whose untouched rows are as in it."""
    return LogLayout.of([*store.columns.values()], store.origins)


def copy_rows(source: RowStore, kind: storages.MemoryKind | None = None, engine: str | None = None) -> LocalStore:
    """Return a store in memory with the same rows, attributes and id maps.

    Args:
        source: the rows.
        kind, engine: of the memory; by default those of the source, where it is in memory.
    """
    own = next((each for each in get_args(storages.MemoryKind) if each == source.storage), storages.default_kind())
    groups = RecordGroups(source.num_embeddings, kind or own, source.seed, source.name, engine=engine or source.engine)
    groups.add_unfilled(list(source.columns.values()))
    (group,) = groups
    fresh = FreshRows(layout_of(source), 1, source.num_embeddings, source.seed)
    if all(is_lazy(each.start) for each in fresh.layout.held):  # else every row was written
        for some in group.chunks(0, source.num_embeddings):
            rows = torch.arange(some.start, some.stop)
            fresh.fill(group.records(), torch.stack([rows, rows, torch.full_like(rows, -1)], dim=1))
    for rows, held in source.written_rows():
        parts = [kernels.Part(group.layout.offset(name), block) for name, block in held.items()]
        kernels.scatter_records(group.records(), rows, parts)
    copied = LocalStore(groups)
    copied.notes.take_over(source.notes, source.part_name)
    copied.notes.id_maps = copy.deepcopy(copied.notes.id_maps)
    return copied
