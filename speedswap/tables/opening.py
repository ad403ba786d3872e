"""Stores by the arguments of a table: made in the storage that is asked for, or opened as their files have them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.copies import layout_of
from speedswap.tables.disk.layout import LogLayout
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import host as storages
from speedswap.tables.record import Column
from speedswap.tables.store import RowStore

__all__ = ["create_store", "lives_there", "open_store", "save_copy", "save_store"]

_log = logging.getLogger("speedswap")
_SAVE_BYTES = 64 * 2**20
_TRIES = 100


def create_store(
    num_embeddings: int,
    weight: Column,
    *,
    storage: str = "auto",
    engine: str = "auto",
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    disk: DiskOptions = DiskOptions(),  # noqa: B008
) -> RowStore:
    """Return a new store with initial values; other arguments and errors are those of :meth:`Table.create`.

    Args:
        num_embeddings: rows, at least 1.
        weight: the first column.
        disk: settings of a table on disk.
    """
    kind = storages.resolve_storage(storage, path)
    engine = storages.resolve_engine(engine, storage, kind)
    if kind != "disk":
        disk.require_none(storage)
        return LocalStore.create(num_embeddings, weight, storage=storage, engine=engine, seed=seed, name=name)
    disk.require()
    assert path is not None
    directory = TableDirectory.create(Path(path))
    store = None
    try:
        layout = LogLayout.of([weight])
        store = LogStore.create(directory, name or directory.path.name, num_embeddings, seed, layout, disk)
        directory.publish()
    except BaseException:
        if store is not None:
            store.close_log()
        directory.remove()
        raise
    return store


def open_store(
    path: str | os.PathLike[str],
    mode: str = "r+",
    disk: DiskOptions = DiskOptions(),  # noqa: B008
    commit: int | None = None,
) -> RowStore:
    """Open a store in files; arguments and errors are those of :meth:`Table.open`."""
    if mode not in ("r", "r+"):
        raise ValueError(f"mode is {mode!r}; give 'r+' to read and write, or 'r' to read")
    if commit is not None and (isinstance(commit, bool) or not isinstance(commit, int) or commit < 0):
        raise ValueError(f"commit is {commit!r}; give the number of a commit that is kept, or None for the last one")
    disk.require()
    if (sharded := _opened_shards(Path(path), mode, disk)) is not None:
        return _of_last_commit(sharded, commit)
    for last in (*[False] * _TRIES, True):
        directory, manifest, contents = TableDirectory.open(Path(path), writable=mode == "r+")
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


def _of_last_commit(store: RowStore, commit: int | None) -> RowStore:
    """Return a store without commits of its own.

    Raises:
        ValueError: it was to be opened at one.
    """
    if commit is not None:
        store.close()
        raise ValueError(f"commit is {commit}, but table {store.name!r} keeps no commits; leave it out")
    return store


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
