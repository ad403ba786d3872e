"""A table's files and its end: saved, exported, flushed, closed and removed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speedswap.tables.formats import export_table
from speedswap.tables.id_map import IdMap
from speedswap.tables.opening import lives_there, save_copy

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = ["close", "discard", "export", "flush", "remove", "save"]


def save(table: Table, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the whole table, in chunks of rows, to a directory that :meth:`open` reads.

    Of a table that ranks own, each writes its rows, and all of them call this; :meth:`load`, and :meth:`open` with
    mode ``r``, read them as one table in any process.

    Args:
        path: the directory; it appears there complete or not at all, durably. If it is a symbolic link to a
            table, that table is replaced, since it is the one that opens under this name, and the link stays.
        overwrite: replace an existing table.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is not set, or is this table itself, or holds other files
            than a table's.
        TableBusyError: the table there is open for writing, or being made.
        TableFullError: the disk has no room. An existing table is unchanged.
    """
    table.check_open()
    store = table.store
    if store.joint is not None:
        store.joint.save(Path(path), overwrite=overwrite)
        return
    if store.files is not None and store.files.lives_at(path):
        raise lives_there(path)
    save_copy(store, Path(path), overwrite=overwrite)


def export(
    table: Table,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    columns: Sequence[str] = ("weight",),
    keys: str | os.PathLike[str] | IdMap | Sequence[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write rows to a file that other programs read, a bounded piece at a time.

    Values are written bit for bit, in text as the shortest decimal that reads back to the same bits. A column that
    is stored in fewer bytes is written as the values that a lookup gives. Where a format does not have bfloat16 or
    float8 (all but safetensors, which has bfloat16), they are written as float32, which holds the same numbers.

    Args:
        path: the file; it appears there complete or not at all, durably.
        format: ``npy``: one column as an array. ``safetensors``: columns as tensors of their names. ``word2vec``,
            ``word2vec-binary``: keys and vectors, as gensim's ``KeyedVectors.load_word2vec_format`` reads them.
            ``parquet``: columns as lists of fixed size, and keys as ``key`` (needs pyarrow). By default by the
            suffix: ``.npy``, ``.safetensors``, ``.txt`` or ``.vec``, ``.bin``, ``.parquet`` or ``.pq``.
        columns: names; one for ``npy`` and word2vec's formats.
        keys: the rows' keys, where the format has them: an :class:`IdMap`, of which the rows that have a key are
            written; the path of a text with a key per line, or a list of strings, one per row; or ``"rows"`` for
            the rows' numbers. By default those of :attr:`id_map`; without one the numbers in word2vec's formats,
            and none in Parquet. Keys that occur twice are written as they are; :meth:`from_file` then takes the file
            with ``keys="drop"`` alone.
        overwrite: replace an existing file.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is not set.
        ValueError: there is no such format or column; the format does not hold several columns, or keys; there are
            other keys than rows, or a key that word2vec's formats cannot hold: an empty one, or with whitespace.
            Or the table is one of several ranks' part of another.
        TypeError: the format does not hold a column's dtype.
        TableFullError: the disk has no room. In all cases nothing is left behind.
        ModuleNotFoundError: pyarrow is missing.

    Example:
        >>> import pathlib, tempfile, torch, speedswap
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "vectors.txt"
        >>> table = speedswap.Table.create(2, 3, init=speedswap.init.constant(0.1))
        >>> table.export(file, keys=["cat", "dog"])
        >>> print(file.read_text())
        2 3
        cat 0.1 0.1 0.1
        dog 0.1 0.1 0.1
        <BLANKLINE>
    """
    export_table(table, path, format, columns=columns, keys=keys, overwrite=overwrite)


def flush(table: Table) -> None:
    """Commit everything written so far, and return when it is durable (tables on disk; a no-op for others).

    A table that is not closed is flushed when it is freed, or when the process ends by itself.
    """
    with table.lock:
        table.check_open()
        table.store.flush()


def close(table: Table) -> None:
    """Flush, and release memory, file and lock. Closing twice is harmless, and completes an interrupted close.

    Raises:
        TableFullError: the disk has no room for the last commit. The table stays open, to be closed once there is room.
        TypeError, ValueError: :attr:`attributes` are not plain data, or too much of it. The table stays open.
    """
    with table.lock:
        try:
            table.store.close()
        finally:
            if table.closed:
                table._flush_at_end.detach()


def remove(table: Table) -> None:
    """Close the table and remove its files."""
    try:
        table.close()
    finally:
        if table.store.files is not None:
            table.store.files.remove()


def discard(table: Table) -> None:
    """Close a table because what was to use it could not be made; remove its files if they are new."""
    if table.was_found:
        table.close()
    else:
        table.remove()
