"""From a table to a file of another program."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from speedswap.errors import TableFullError
from speedswap.tables.files.manifest_file import part_of_ranks, remedy_for_part
from speedswap.tables.files.open_directory import says_if_full
from speedswap.tables.files.whole import remove_leftovers, write_whole
from speedswap.tables.formats.format import FORMATS, format_of, least_bytes
from speedswap.tables.formats.keys import KeySource, RowKeys, keys_of_map, opened_keys
from speedswap.tables.formats.pieces import Outgoing
from speedswap.tables.id_map import IdMap

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = ["NOTHING_LEFT", "export_table", "require_folder", "require_room", "write_rows"]

NOTHING_LEFT = "nothing was left there: free space, or give another place"
"""The outcome of a full disk, for :func:`says_if_full`."""


def export_table(
    table: Table,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    columns: Sequence[str] = ("weight",),
    keys: KeySource | RowKeys | None = None,
    overwrite: bool = False,
) -> None:
    """Write columns of a table to a file; see :meth:`speedswap.Table.export`."""
    if (part := part_of_ranks(table.columns["weight"])) is not None:
        raise ValueError(f"table {table.name!r} is {part}, which are not in its order; {remedy_for_part(table.path)}")
    name = format_of(Path(path), format)
    kind = FORMATS[name]
    if table.ranks is not None and kind.keys != "never":  # every rank has a part of the keys
        id_map = table.id_map if keys is None else keys
        keys = keys_of_map(id_map, table.num_embeddings) if isinstance(id_map, IdMap) else keys
    with table.store.alone() as store:
        if store is not None:
            _write(table if store is table.store else type(table)(store), Path(path), name, columns, keys, overwrite)


def _write(
    table: Table, path: Path, format: str, columns: Sequence[str], keys: KeySource | RowKeys | None, overwrite: bool
) -> None:
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.lexists(real) and not overwrite:
        raise FileExistsError(
            f"path is {os.fspath(path)!r}, which exists; give overwrite=True (--overwrite) to replace it"
        )
    require_folder(real.parent)
    remove_leftovers(real.parent)
    with says_if_full(real, NOTHING_LEFT), ExitStack() as written:
        rows = written.enter_context(outgoing(table, format, columns, keys))
        require_room(least_bytes(FORMATS[format], rows), real)
        FORMATS[format].write(written.enter_context(write_whole(real)), rows)


def write_rows(file: BinaryIO, table: Table, format: str, *, keys: KeySource | None = None) -> None:
    """Write a table's weights to an open file, in a format of :data:`FORMATS`."""
    with outgoing(table, format, ["weight"], keys) as rows:
        FORMATS[format].write(file, rows)


@contextmanager
def outgoing(table: Table, format: str, columns: Sequence[str], keys: KeySource | RowKeys | None) -> Iterator[Outgoing]:
    """Provide the rows for a format, while no thread can change them.

    Raises:
        ValueError, TypeError: the format does not hold these columns, or these keys; there is no such column.
    """
    kind = FORMATS[format]
    if isinstance(columns, str) or not columns or (len(columns) > 1 and not kind.many):
        wanted = "a list of names" if kind.many else "a list of one name"
        raise ValueError(f"columns is {columns!r}; give {wanted} for {format}")
    if keys is not None and kind.keys == "never":
        raise ValueError(f"{format} holds no keys; leave out keys, or export to word2vec or Parquet")
    with table.lock, ExitStack() as held:
        table.check_open()
        for name in columns:
            if name not in table.columns:
                raise ValueError(f"column {name!r} is not in table {table.name!r}; it has {', '.join(table.columns)}")
        if keys is None and kind.keys != "never":
            keys = table.id_map if table.id_map is not None else "rows" if kind.keys == "always" else None
        found = None if keys is None else held.enter_context(opened_keys(keys, table.num_embeddings))
        yield Outgoing(table.store, columns, found)


def require_folder(folder: Path) -> None:
    """Raise FileNotFoundError if a folder does not exist."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder; make it first", str(folder))


def require_room(nbytes: int, path: Path) -> None:
    """Raise TableFullError if a file of so many bytes cannot be written beside the present one at a path."""
    disk = os.statvfs(path.parent)
    free = disk.f_bfree * disk.f_frsize
    if disk.f_blocks and nbytes > free:  # some file systems do not tell
        raise TableFullError(
            errno.ENOSPC,
            f"no room on the disk of {path.parent}: the rows take at least {nbytes} bytes, and {free} are free; "
            f"{NOTHING_LEFT}",
        )
