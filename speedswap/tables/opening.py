"""Stores in files: opened, and written as copies of others."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.copies import layout_of
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.store import RowStore

__all__ = ["lives_there", "open_store", "save_copy", "save_store"]

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
        return _of_last_commit(sharded, commit)
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
