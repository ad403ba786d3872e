"""Tables created, opened, loaded, and read from other programs' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap.errors import TableFormatError
from speedswap.tables import init as initializers
from speedswap.tables.files.manifest_file import part_of_ranks, remedy_for_part
from speedswap.tables.formats import import_table
from speedswap.tables.init import Initializer
from speedswap.tables.record import Column, count, require_name, seed_of
from speedswap.tables.storage import Storage, as_storage, opened_place
from speedswap.tables.table.whole_columns import require_zero_row

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = ["create", "from_file", "load", "open"]


def create(
    cls: type[Table],
    /,
    num_embeddings: int,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    storage: Storage | str = "auto",
    path: str | os.PathLike[str] | None = None,
    init: Initializer | Callable[..., Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    **former: Any,
) -> Table:
    """Create a table, filled with its initial values.

    Args:
        num_embeddings: rows, at least 1.
        embedding_dim: items in a row's weight, at least 1.
        dtype: of the weights; any torch dtype with a fixed item size.
        storage: where the rows live: :class:`speedswap.Device`, :class:`speedswap.Pinned`, :class:`speedswap.Pageable`,
            :class:`speedswap.Disk`, :class:`speedswap.Ranks`; or, for short, ``device``, ``pinned``, ``pageable``,
            ``disk``, or ``auto``: disk where a path is given, else pinned where there is a GPU, else pageable.
        path: the directory of a table on disk, for short; ``storage=Disk(path, …)`` has its settings.
        init: one of :mod:`speedswap.init`, or a function of ``torch.nn.init``; zeros by default.
        seed: of the initial values; the same seed gives the same bits everywhere.
        name: for messages; the path's last part, or ``table``, by default.
        zero_row: a row that starts as zeros whatever ``init`` says.
        stored_dtype: float16, bfloat16, or int8 with a scale per row, to hold float32 weights in fewer bytes;
            blocks stay float32. See :class:`Column`.
        rounding: ``nearest`` or ``stochastic``, for scattered rows.
        former: arguments of version 0.1, with a DeprecationWarning.

    Raises:
        ValueError: a number that is out of range or not whole, an unknown storage or rounding, or a path where
            none belongs.
        TypeError: weights of ``dtype`` cannot be stored as ``stored_dtype``.
        FileExistsError: ``path`` exists.
        TableBusyError: another process is making a table there.
        TableFullError: the disk has no room for the initial values. Nothing is left behind.
        TableTooLargeError: the memory could not be allocated, or the bytes cannot be counted.
    """
    place = as_storage(storage, path, former, "Table.create")
    num_embeddings = count("num_embeddings", num_embeddings)
    embedding_dim = count("embedding_dim", embedding_dim)
    seed = seed_of(seed)
    require_name(name)
    zero_row = require_zero_row(zero_row, num_embeddings)
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}, whose scales are not in the rows; use torch.int8 and keep the scales apart")
    weight = Column("weight", (embedding_dim,), dtype, initializers.resolve(init), zero_row, stored_dtype, rounding)
    return cls(place.create(num_embeddings, weight, seed=seed, name=name))


def open(
    cls: type[Table],
    /,
    path: str | os.PathLike[str] | Storage,
    mode: str = "r+",
    *,
    commit: int | None = None,
    **former: Any,
) -> Table:
    """Open a table on disk, or one that :meth:`save` wrote.

    Args:
        path: the table's directory; or ``speedswap.Disk(directory, …)``, with settings of its cache and its commits.
        mode: ``r+`` to read and write, as the only writer; ``r`` to read, also what another process commits
            meanwhile.
        commit: the number of a commit that is kept, to which the table returns; with mode ``r+`` for good, unless a
            later one is kept. By default the last one.
        former: arguments of version 0.1, with a DeprecationWarning.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: there is no such commit; or a later one is kept, and the table is to be written.
        TableFormatError: the directory is damaged, or not a table; links within it are not followed, and other
            things than files not opened. Or it is to be written, and is one of several ranks' part of a table.
        TableBusyError: another process, or another Table of this one, has it open for writing.
    """
    place = opened_place(path, former, "Table.open")
    table = cls(place.open(mode, commit))
    if mode != "r" and (part := part_of_ranks(table.columns["weight"])) is not None:
        directory = table.path or Path()
        table.close()
        raise TableFormatError(
            f"path is {str(directory)!r}, {part}, which these alone write; {remedy_for_part(directory)}"
        )
    return table


def load(
    cls: type[Table], /, path: str | os.PathLike[str] | Storage, *, storage: Storage | str = "auto", **former: Any
) -> Table:
    """Load a copy of a table in files, such as :meth:`save` writes, into memory.

    Args:
        path: the table's directory, as for :meth:`open`.
        storage, former: as for :meth:`create`, but for disk and ranks.

    Raises:
        FileNotFoundError, TableFormatError, TableTooLargeError: as :meth:`open` and :meth:`create` do.
    """
    place = as_storage(storage, None, former, "Table.load")
    with cls.open(path, mode="r") as source:
        return cls(place.copy(source.store))


def from_file(
    cls: type[Table],
    /,
    file: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    keys: str | os.PathLike[str] = "map",
    allow_nan: bool = False,
    dtype: torch.dtype | None = None,
    storage: Storage | str = "auto",
    seed: int = 0,
    name: str | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    **former: Any,
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
        storage, seed, name, stored_dtype, rounding, former: as for :meth:`create`.

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
        as_storage(storage, path, former, "Table.from_file"),
        format,
        columns=columns,
        keys=keys,
        allow_nan=allow_nan,
        dtype=dtype,
        seed=seed,
        name=name,
        stored_dtype=stored_dtype,
        rounding=rounding,
    )
