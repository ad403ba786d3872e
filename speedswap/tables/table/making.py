"""Tables made anew, opened, loaded, and read from other programs' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap.errors import TableFormatError
from speedswap.tables import init as initializers
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.files.shards_manifest import part_of_ranks, remedy_for_part
from speedswap.tables.formats import import_table
from speedswap.tables.init import Initializer
from speedswap.tables.opening import create_store, open_store
from speedswap.tables.record import Column, count, require_name, seed_of
from speedswap.tables.table.whole_columns import require_zero_row

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = ["create", "from_file", "load", "open"]


def create(
    cls: type[Table],
    num_embeddings: int,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    storage: str = "auto",
    engine: str = "auto",
    path: str | os.PathLike[str] | None = None,
    init: Initializer | Callable[..., Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    cache_bytes: int | None = None,
    commit_every: int | None = None,
    commit_seconds: float | None = 30.0,
    synchronous_commit: bool = False,
    scratch: bool = False,
) -> Table:
    """Create a table, filled with its initial values.

    Args:
        num_embeddings: rows, at least 1.
        embedding_dim: items in a row's weight, at least 1.
        dtype: of the weights; any torch dtype with a fixed item size.
        storage: ``device`` (GPU memory), ``pinned`` (host memory that the GPU reads directly), ``pageable``
            (ordinary memory), ``disk`` (a directory with the rows in a log on disk, and a cache of them in memory:
            larger than memory, and consistent whatever ends the process), or ``auto``: disk where a path is given,
            else pinned where there is a GPU, else pageable. Where there is no GPU, ``pinned`` works as ``pageable`` and
            says so once.
        engine: how rows go between a pinned table and a GPU: ``zero_copy`` (kernels read and write the table over
            the bus), ``staged`` (CPU threads gather, the copy engine carries; tables in pageable memory or on disk
            have no other way), ``split`` (both at once), or ``auto``: zero_copy.
        path: the directory of a table on disk; it must not exist yet, and does once it is complete and durable.
        init: one of :mod:`speedswap.init`, or a function of ``torch.nn.init``; zeros by default.
        seed: of the initial values; the same seed gives the same bits everywhere.
        name: for messages; the path's last part, or ``table``, by default.
        zero_row: a row that starts as zeros whatever ``init`` says.
        stored_dtype: float16, bfloat16, or int8 with a scale per row, to hold float32 weights in fewer bytes;
            blocks stay float32. See :class:`Column`.
        rounding: ``nearest`` or ``stochastic``, for scattered rows.
        cache_bytes: memory for rows of a table on disk; by default a quarter of the memory that is free and not
            promised to the caches of other tables. A cache never takes more than the whole table.
        commit_every: optimizer steps after which a table on disk commits; by default time alone decides. A step waits
            until the commit before is durable, so that a killed process loses fewer than twice as many steps.
        commit_seconds: seconds after which it commits; None for steps alone. Direct calls of :meth:`scatter` count
            as steps. A killed process leaves the table as of its last commit.
        synchronous_commit: let a step that commits return once its commit is durable; with ``commit_every=1``, no
            completed step is ever lost.
        scratch: a table on disk that is gone with its process: nothing is committed or synced. What is left of it at
            ``path`` when its process is killed is removed by the next table that is made there.

    Raises:
        ValueError: a number that is out of range or not whole, an unknown storage, engine or rounding, or a path where
            none belongs.
        TypeError: weights of ``dtype`` cannot be stored as ``stored_dtype``.
        FileExistsError: ``path`` exists.
        TableBusyError: another process is making a table there.
        TableFullError: the disk has no room for the initial values. Nothing is left behind.
        TableTooLargeError: the memory could not be allocated, or the bytes cannot be counted.
    """
    num_embeddings = count("num_embeddings", num_embeddings)
    embedding_dim = count("embedding_dim", embedding_dim)
    seed = seed_of(seed)
    require_name(name)
    zero_row = require_zero_row(zero_row, num_embeddings)
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}, whose scales are not in the rows; use torch.int8 and keep the scales apart")
    weight = Column("weight", (embedding_dim,), dtype, initializers.resolve(init), zero_row, stored_dtype, rounding)
    disk = DiskOptions(cache_bytes, commit_every, commit_seconds, synchronous_commit, scratch)
    return cls(
        create_store(num_embeddings, weight, storage=storage, engine=engine, path=path, seed=seed, name=name, disk=disk)
    )


def open(
    cls: type[Table],
    path: str | os.PathLike[str],
    mode: str = "r+",
    *,
    commit: int | None = None,
    cache_bytes: int | None = None,
    commit_every: int | None = None,
    commit_seconds: float | None = 30.0,
    synchronous_commit: bool = False,
) -> Table:
    """Open a table on disk, or one that :meth:`save` wrote.

    Args:
        path: the table's directory.
        mode: ``r+`` to read and write, as the only writer; ``r`` to read, also what another process commits
            meanwhile.
        commit: the number of a commit that is kept, to which the table returns; with mode ``r+`` for good, unless a
            later one is kept. By default the last one.
        cache_bytes, commit_every, commit_seconds, synchronous_commit: as for :meth:`create`.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: there is no such commit; or a later one is kept, and the table is to be written.
        TableFormatError: the directory is damaged, or not a table; links within it are not followed, and other
            things than files not opened. Or it is to be written, and is one of several ranks' part of a table.
        TableBusyError: another process, or another Table of this one, has it open for writing.
    """
    disk = DiskOptions(cache_bytes, commit_every, commit_seconds, synchronous_commit)
    table = cls(open_store(path, mode, disk, commit))
    if mode != "r" and (part := part_of_ranks(table.columns["weight"])) is not None:
        table.close()
        raise TableFormatError(
            f"path is {os.fspath(path)!r}, {part}, which these alone write; {remedy_for_part(Path(path))}"
        )
    return table


def load(cls: type[Table], path: str | os.PathLike[str], *, storage: str = "auto", engine: str = "auto") -> Table:
    """Load a copy of a table in files, such as :meth:`save` writes, into memory.

    Args:
        path: the table's directory.
        storage, engine: as in :meth:`create`, but for disk.

    Raises:
        FileNotFoundError, TableFormatError, TableTooLargeError: as :meth:`open` and :meth:`create` do.
    """
    with cls.open(path, mode="r") as source:
        return cls(source.store.copy(storage, engine))


def from_file(
    cls: type[Table],
    file: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    keys: str | os.PathLike[str] = "map",
    allow_nan: bool = False,
    dtype: torch.dtype | None = None,
    storage: str = "auto",
    engine: str = "auto",
    seed: int = 0,
    name: str | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
) -> Table:
    """Make a table of the rows in a file of another program, a bounded piece at a time.

    The file may come from any source: nothing in it is executed, and sizes that it declares are checked against its
    own before memory is taken.

    Args:
        file: ``.npy``, ``.safetensors``, word2vec's text (``.txt``, ``.vec``) or binary format (``.bin``), or
            Parquet (``.parquet``, ``.pq``; needs pyarrow).
        path: the directory of a table on disk, which appears there complete or not at all; it must not exist yet. By
            default the table is in memory.
        format: ``npy``, ``safetensors``, ``word2vec``, ``word2vec-binary`` or ``parquet``; by suffix by default.
        columns: names of tensors or columns in the file, as many as are to be read; the first becomes the weight.
            By default ``weight``, or the only one.
        keys: for rows with keys, as in word2vec's formats and in a Parquet column ``key`` of strings, bytes or
            integers but uint64: ``"map"`` keeps them as the table's :attr:`id_map`, so that the first row is row 1,
            and row 0, zeros, that of other keys; ``"drop"`` ignores them; a path makes a text file there, with a key
            per line, line i for row i.
        allow_nan: True to take values that are not finite as they are.
        dtype: of the weights; the file's by default.
        storage, engine, seed, name, stored_dtype, rounding: as for :meth:`create`.

    Returns:
        The table. Rows without a value in the file are zeros.

    Raises:
        TableFormatError: the file is damaged, too short, not of the format, or has a value that is not finite, rows
            of different lengths or a key twice; it names the row. Or its keys are of a type that is not read.
            Nothing is left behind.
        ValueError: ``columns``, ``format`` or ``keys`` do not fit the file.
        FileExistsError, TableFullError, TableTooLargeError: as for :meth:`create`.
        ModuleNotFoundError: pyarrow is missing.

    Example:
        >>> import pathlib, tempfile, torch, speedswap
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "vectors.txt"
        >>> _ = file.write_text("2 3\\ncat 1 2 3\\ndog 4 5 6.5\\n")
        >>> table = speedswap.Table.from_file(file)
        >>> rows = table.id_map.lookup(["dog", "mouse"])
        >>> table.gather(rows).weight
        tensor([[4.0000, 5.0000, 6.5000],
                [0.0000, 0.0000, 0.0000]])
    """
    return import_table(
        cls,
        file,
        path,
        format,
        columns=columns,
        keys=keys,
        allow_nan=allow_nan,
        dtype=dtype,
        storage=storage,
        engine=engine,
        seed=seed,
        name=name,
        stored_dtype=stored_dtype,
        rounding=rounding,
    )
