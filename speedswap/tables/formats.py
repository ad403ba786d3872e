"""Tables in other programs' formats, written and read in bounded pieces of rows.

========================  =====================  ==========================================================
format                    suffix                 holds
========================  =====================  ==========================================================
``npy``                   ``.npy``               one column as an array
``safetensors``           ``.safetensors``       columns as tensors of their names
``word2vec``              ``.txt``, ``.vec``     keys, and one column as text that reads back to its bits
``word2vec-binary``       ``.bin``               keys, and one float32 column
``parquet``               ``.parquet``, ``.pq``  columns as lists, and keys
========================  =====================  ==========================================================

Only Parquet needs another package (pyarrow). A column that is stored in fewer bytes is written as the values that a
lookup returns. bfloat16 and float8 are written as float32, which is exact, if a format lacks them.
"""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableClosedError, TableFormatError, TableFullError
from speedswap.tables import init, vectors
from speedswap.tables.files.manifest import part_of_ranks, remedy_for_part
from speedswap.tables.files.open_directory import says_if_full, sync_names
from speedswap.tables.files.place import (
    fresh_folder,
    open_regular,
    refuse_within_table,
    remove_leftovers,
    rename_without_replacing,
    write_whole,
)
from speedswap.tables.id_map import IdMap
from speedswap.tables.record import Column, column_among
from speedswap.tables.storage import Disk, Storage, create_store
from speedswap.tables.store import RowStore, innermost, keep_map, origins_in, read_alone, require_alike
from speedswap.tables.whole_table import (
    Incoming,
    KeySink,
    KeySource,
    Outgoing,
    RowKeys,
    keys_of_map,
    numpy_dtype,
    opened_keys,
)


class Format(NamedTuple):
    """A file format.

    Attributes:
        suffixes: its file suffixes.
        write: writes rows to an open file.
        read: checks an open file's head, and returns its rows.
        many: True if a file can hold several columns.
        keys: when rows have keys: ``"always"``, ``"maybe"`` or ``"never"``.
        item_bytes: the fewest bytes per item of a dtype.
    """

    suffixes: tuple[str, ...]
    write: Callable[[BinaryIO, Outgoing], None]
    read: Callable[[BinaryIO, str], Incoming]
    many: bool
    keys: str
    item_bytes: Callable[[torch.dtype], float]


_exact = operator.attrgetter("itemsize")


def _in_parquet(dtype: torch.dtype) -> float:
    return 1 / 8 if dtype == torch.bool else _in_numpy(dtype)


def _in_numpy(dtype: torch.dtype) -> int:
    return dtype.itemsize if numpy_dtype(dtype) is not None else torch.float32.itemsize


FORMATS = {
    "npy": Format((".npy",), vectors.write_npy, vectors.NpyRows, False, "never", _in_numpy),
    "safetensors": Format((".safetensors",), vectors.write_safetensors, vectors.SafetensorsRows, True, "never", _exact),
    "word2vec": Format(
        (".txt", ".vec"), vectors.write_word2vec, vectors.Word2vecRows, False, "always", lambda _: len(" 0")
    ),
    "word2vec-binary": Format(
        (".bin",),
        partial(vectors.write_word2vec, binary=True),
        partial(vectors.Word2vecRows, binary=True),
        False,
        "always",
        lambda _: 4,
    ),
    "parquet": Format((".parquet", ".pq"), vectors.write_parquet, vectors.read_parquet, True, "maybe", _in_parquet),
}


def least_bytes(form: Format, rows: Outgoing) -> int:
    """Return a lower bound on the bytes that rows take in a format, for any values and keys."""
    return int(len(rows) * sum(each.width * form.item_bytes(each.dtype) for each in rows.forms.values()))


def format_of(path: Path, name: str | None) -> str:
    """Return a format's name: the given one, or the one of the file's suffix.

    Raises:
        ValueError: the format or the suffix is unknown.
    """
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"format is {name!r}; choose one of {', '.join(FORMATS)}")
        return name
    for known, form in FORMATS.items():
        if path.suffix.lower() in form.suffixes:
            return known
    raise ValueError(f"{path.name!r} has none of the suffixes of a format; give format, one of {', '.join(FORMATS)}")


NOTHING_LEFT = "nothing was left there: free space, or give another place"
"""The outcome of a full disk, for :func:`says_if_full`."""


def export_rows(
    store: RowStore,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    columns: Sequence[str] = ("weight",),
    keys: KeySource | RowKeys | None = None,
    overwrite: bool = False,
) -> None:
    """Write columns of a table's store to a file; see :meth:`speedswap.Table.export`."""
    facts = store.facts
    require_in_order(store)
    name = format_of(Path(path), format)
    if facts.ranks is not None and FORMATS[name].keys != "never":  # each rank holds part of the keys
        id_map = _map_of(store) if keys is None else keys
        keys = keys_of_map(id_map, facts.num_embeddings) if isinstance(id_map, IdMap) else keys
    with read_alone(store) as alone:
        if alone is not None:
            real = target_file(path, overwrite, [store])
            with says_if_full(real.parent, NOTHING_LEFT), ExitStack() as written:
                rows = written.enter_context(outgoing(alone, name, columns, keys))
                require_room(least_bytes(FORMATS[name], rows), real)
                FORMATS[name].write(written.enter_context(write_whole(real)), rows)


def require_in_order(store: RowStore) -> None:
    """Raise ValueError if a store holds one rank's part of a table, whose rows are not in the order of their ids."""
    if (part := part_of_ranks(store.columns["weight"])) is not None:
        remedy = remedy_for_part(None if store.files is None else store.files.path)
        raise ValueError(f"table {store.facts.name!r} is {part}, which are not in its order; {remedy}")


def _map_of(store: RowStore) -> IdMap | None:
    return store.notes.id_maps.get(store.facts.part_name)


def target_file(path: str | os.PathLike[str], overwrite: bool, stores: Iterable[RowStore]) -> Path:
    """Return the real path of a file that is to be written; remove what killed runs have left in its folder.

    Raises:
        FileExistsError: it exists and ``overwrite`` is not set, is inside a table's directory, or is one that
            untouched rows of a store in files are read from.
        FileNotFoundError, IsADirectoryError: its folder does not exist, or it is a folder.
    """
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if os.path.lexists(real) and not overwrite:
        raise FileExistsError(
            f"path is {os.fspath(path)!r}, which exists; give overwrite=True (--overwrite) to replace it"
        )
    refuse_within_table(real)
    for store in stores:
        origins = () if store.files is None else origins_in(innermost(store)).values()
        bases = [base for origin in origins for base in origin.start.init.bases]
        if any(real == file.resolve() for base in bases for file in base.rows.paths):
            raise FileExistsError(
                f"path is {os.fspath(path)!r}, from which the untouched rows of table {store.facts.name!r} are read; "
                "give another path"
            )
    require_folder(real.parent)
    remove_leftovers(real.parent)
    return real


def write_rows(file: BinaryIO, store: RowStore, format: str, *, keys: KeySource | None = None) -> None:
    """Write a table's weights to an open file, in a format of :data:`FORMATS`."""
    with outgoing(store, format, ["weight"], keys) as rows:
        FORMATS[format].write(file, rows)


@contextmanager
def outgoing(
    store: RowStore, format: str, columns: Sequence[str], keys: KeySource | RowKeys | None
) -> Iterator[Outgoing]:
    """Provide the rows for a format, while no thread can change them.

    Raises:
        ValueError, TypeError: a column does not exist, or the format cannot hold these columns or keys.
    """
    kind = FORMATS[format]
    if isinstance(columns, str) or not columns or (len(columns) > 1 and not kind.many):
        wanted = "a list of names" if kind.many else "a list of one name"
        raise ValueError(f"columns is {columns!r}; give {wanted} for {format}")
    if keys is not None and kind.keys == "never":
        raise ValueError(f"{format} holds no keys; export without them, or to word2vec or Parquet")
    facts = store.facts
    with facts.locked.lock, ExitStack() as held:
        if store.notes.closed:
            raise TableClosedError(f"table {facts.name!r} is closed; open it again with Table.open")
        for name in columns:
            column_among(store.columns, name, facts.name)
        if keys is None and kind.keys != "never":
            keys = "rows" if kind.keys == "always" and _map_of(store) is None else _map_of(store)
        found = None if keys is None else held.enter_context(opened_keys(keys, facts.num_embeddings))
        yield Outgoing(store, columns, found)


def require_folder(folder: Path) -> None:
    """Raise FileNotFoundError if a folder does not exist."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "this folder does not exist; make it first", str(folder))


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide the temporary path of a folder to be made, which takes its name when the block ends without an error.

    Raises:
        FileExistsError: the name is taken.
        FileNotFoundError: the folder above it does not exist.
        TableFullError: the disk has no room. In all cases nothing is left behind.
    """
    real = Path(os.path.realpath(path))
    if os.path.lexists(real):
        raise FileExistsError(f"path is {os.fspath(path)!r}, which exists; give another path, or remove it")
    require_folder(real.parent)
    remove_leftovers(real.parent)
    with says_if_full(real.parent, NOTHING_LEFT), fresh_folder(real.parent) as folder:
        yield folder / real.name
        rename_without_replacing(folder / real.name, real)
        sync_names(real.parent)


def require_room(nbytes: int, path: Path) -> None:
    """Raise TableFullError if the disk has no room for a new file next to the present one at a path."""
    disk = os.statvfs(path.parent)
    free = disk.f_bfree * disk.f_frsize
    if disk.f_blocks and nbytes > free:  # some file systems do not say
        raise TableFullError(
            errno.ENOSPC,
            f"no room on the disk of {path.parent}: the rows take at least {nbytes} bytes, and {free} are free; "
            f"{NOTHING_LEFT}",
        )


_KEYS = ("map", "drop")
_CACHE_BYTES = 64 << 20  # every row is written once


def import_rows(
    file: str | os.PathLike[str],
    place: Storage,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    keys: str | os.PathLike[str] = "map",
    allow_nan: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> RowStore:
    """Create a table's store from a file's rows; see :meth:`speedswap.Table.from_file`."""
    source, what = Path(file), os.fspath(file)
    name = format_of(source, format)
    with open_regular(source) as handle:
        rows = FORMATS[name].read(handle, what)
        if keys != "drop":
            rows.require_readable_keys(columns or ())
        wanted = _chosen(rows, columns, what)
        rows.choose(wanted)
        vocabulary, has_keys = None if keys in _KEYS else Path(keys), rows.key_kind is not None and keys != "drop"
        if vocabulary is not None and rows.key_kind is None:
            raise ValueError(f"keys is {os.fspath(keys)!r}, but the rows of {source} have no keys; leave it out")
        first_row = 1 if has_keys and keys == "map" else 0  # row 0 is for keys without a row
        weight = rows.columns[wanted[0]]
        for column in wanted if dtype is None else wanted[1:]:
            if (held := rows.columns[column].dtype).is_floating_point and held.itemsize == 1:
                raise TableFormatError(
                    f"{what} has {column!r} as {held}, whose scales are in another tensor, if any; for a weight that "
                    "has none give dtype=torch.float32 (--dtype float32), or save the products in a wider dtype"
                )

        def filled(at: Storage) -> RowStore:
            with nullcontext() if vocabulary is None else write_whole(vocabulary) as lines:
                sink = KeySink(str(rows.key_kind), rows.num_rows, lines, what) if has_keys else None
                dim = math.prod(weight.row_shape)
                store = create_store(at, rows.num_rows + first_row, dim, dtype=dtype or weight.dtype, **options)
                try:
                    _fill(store, rows, wanted, first_row, sink, "" if allow_nan else what)
                except BaseException:
                    store.close()
                    if store.files is not None:
                        store.files.remove()
                    raise
                return store

        if place.folder is None:
            return filled(place)
        with new_folder(place.folder) as folder:
            options |= {"name": options["name"] or folder.name}
            filled(Disk(folder, cache_bytes=_CACHE_BYTES, commit_seconds=None)).close()  # commits once
    return place.open("r+", None)


def _chosen(rows: Incoming, columns: Sequence[str] | None, what: str) -> list[str]:
    """Return the columns to read: the given ones, or ``weight``, or the only one. The first becomes the weight."""
    known = [*rows.columns]
    if columns is None and "weight" not in known and len(known) > 1:
        raise ValueError(f"{what} has columns {', '.join(known)}; say which is the weight: columns=[...] (--columns)")
    if columns is None:
        columns = ["weight" if "weight" in known else known[0]]
    missing = [name for name in columns if name not in known]
    if missing or isinstance(columns, str) or not columns or len({*columns}) < len(columns):
        raise ValueError(f"columns is {columns!r}; {what} has {', '.join(known)}: give a list of some of them")
    if "weight" in columns[1:]:
        raise ValueError(f"columns is {columns!r}; the first becomes the weight, so 'weight' cannot follow it")
    if len(shape := rows.columns[columns[0]].row_shape) > 1:
        raise TableFormatError(f"{what} has rows of shape {shape}; save a matrix, a vector per row")
    return list(columns)


def _fill(
    store: RowStore, rows: Incoming, columns: list[str], first_row: int, sink: KeySink | None, finite: str
) -> None:
    """Write all rows of a file to a new table, from row ``first_row`` on.

    Args:
        columns: names in the file; the first becomes the weight.
        sink: where the rows' keys go.
        finite: the file, for messages, if values must be finite.
    """
    names = dict(zip(columns, ["weight", *columns[1:]], strict=True))
    forms = {name: rows.columns[name] for name in columns[1:]}
    if forms:
        store.add_columns([Column(name, form.row_shape, form.dtype, init.zeros()) for name, form in forms.items()])
    if store.files is not None:
        store.files.reserve(range(store.facts.num_embeddings))  # every row is written
    for piece in rows.pieces(columns):
        for column, values in piece.values.items():
            found, begin = store.columns[names[column]], first_row + piece.start
            values = values.to(found.dtype).reshape(-1, *found.row_shape)
            if finite:
                is_narrower = found.compact and found.stored_dtype.is_floating_point
                _check_finite(values.to(found.stored_dtype) if is_narrower else values, column, piece.start, finite)
            found.require_storable(values, begin)
            require_alike(store, values, f"values of column {found.name!r} of")
            store.write(found.name, begin, values)
            store.commit()
        if sink is not None:
            assert piece.keys is not None
            sink.add(piece.start, piece.keys)
    if first_row and sink is not None:
        keep_map(store, sink.id_map)


def _check_finite(values: Tensor, column: str, start: int, what: str) -> None:
    if values.is_floating_point() or values.is_complex():
        readable = values.float() if values.dtype.itemsize == 1 else values  # float8 lacks isfinite
        wrong = (~readable.isfinite().reshape(len(values), -1).all(1)).nonzero()
        if len(wrong):
            raise TableFormatError(
                f"{what}, row {start + int(wrong[0])}: {column!r} has a value that is not finite, as {values.dtype}; "
                "correct it, or give allow_nan=True (--allow-nan)"
            )
