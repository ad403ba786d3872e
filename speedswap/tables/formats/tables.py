"""From a table to a file of another program and back; and the formats by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError, TableFullError
from speedswap.tables import init
from speedswap.tables.files.manifest import part_of_ranks, remedy_for_part
from speedswap.tables.files.open_directory import says_if_full, sync_names
from speedswap.tables.files.place import rename_anew
from speedswap.tables.files.whole import fresh_folder, open_regular, remove_leftovers, write_whole
from speedswap.tables.formats import arrays, parquet, word2vec
from speedswap.tables.formats.pieces import (
    ColumnForm,
    Incoming,
    KeySink,
    KeySource,
    Outgoing,
    RowKeys,
    keys_of_map,
    opened_keys,
    vocabulary_file,
)
from speedswap.tables.id_map import IdMap
from speedswap.tables.record import Column
from speedswap.tables.storage import Disk, Storage
from speedswap.tables.whole_table import numpy_dtype

if TYPE_CHECKING:
    from speedswap.tables.table import Table


class Format(NamedTuple):
    """A format of files.

    Attributes:
        suffixes: of its files.
        write: writes rows to an open file.
        read: checks an open file's head, and returns its rows.
        many: True if it holds several columns.
        keys: ``"always"``, ``"maybe"`` or ``"never"``: rows have keys in it.
        item_bytes: the fewest bytes that an item of a dtype takes in it.
    """

    suffixes: tuple[str, ...]
    write: Callable[[BinaryIO, Outgoing], None]
    read: Callable[[BinaryIO, str], Incoming]
    many: bool
    keys: str
    item_bytes: Callable[[torch.dtype], float]


def _in_numpy(dtype: torch.dtype) -> int:
    return dtype.itemsize if numpy_dtype(dtype) is not None else torch.float32.itemsize


def _in_parquet(dtype: torch.dtype) -> float:
    return 1 / 8 if dtype == torch.bool else _in_numpy(dtype)


def _as_text(dtype: torch.dtype) -> int:
    return len(" 0")


FORMATS = {
    "npy": Format((".npy",), arrays.write_npy, arrays.read_npy, False, "never", _in_numpy),
    "safetensors": Format(
        (".safetensors",),
        arrays.write_safetensors,
        arrays.read_safetensors,
        True,
        "never",
        lambda dtype: dtype.itemsize,
    ),
    "word2vec": Format((".txt", ".vec"), word2vec.write, word2vec.read, False, "always", _as_text),
    "word2vec-binary": Format(
        (".bin",), word2vec.write_binary, word2vec.read_binary, False, "always", lambda dtype: torch.float32.itemsize
    ),
    "parquet": Format((".parquet", ".pq"), parquet.write, parquet.read, True, "maybe", _in_parquet),
}


def least_bytes(form: Format, rows: Outgoing) -> int:
    """Return the fewest bytes that rows take in a format, whatever their values and keys."""
    return int(len(rows) * sum(each.width * form.item_bytes(each.dtype) for each in rows.forms.values()))


def format_of(path: Path, name: str | None) -> str:
    """Return a format's name: the one given, or by the file's suffix.

    Raises:
        ValueError: there is no such format, or no format has the suffix.
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


_KEYS = ("map", "drop")
_CACHE_BYTES = 64 << 20  # every row is written once


def import_table(
    make: type[Table],
    file: str | os.PathLike[str],
    place: Storage,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    keys: str | os.PathLike[str] = "map",
    allow_nan: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Table:
    """Make a table of a file's rows; see :meth:`speedswap.Table.from_file`."""
    source = Path(file)
    name = format_of(source, format)
    with ExitStack() as held:
        handle = held.enter_context(open_regular(source))
        rows = FORMATS[name].read(handle, str(source))
        if keys != "drop":
            rows.require_readable_keys(columns or ())
        wanted = _chosen(rows, columns, str(source))
        rows.choose(wanted)
        vocabulary = None if keys in _KEYS else Path(keys)
        if vocabulary is not None and rows.key_kind is None:
            raise ValueError(f"keys is {os.fspath(keys)!r}, but the rows of {source} have no keys; leave it out")
        filling = _Filling(rows, wanted, str(source), allow_nan=allow_nan, keeps_map=keys == "map")

        def filled(at: Storage) -> Table:
            with vocabulary_file(vocabulary) as lines:
                has_keys = rows.key_kind is not None and keys != "drop"
                sink = KeySink(str(rows.key_kind), rows.num_rows, lines, str(source)) if has_keys else None
                return filling.fill(_new(make, filling, at, dtype, options), sink)

        if place.folder is None:
            return filled(place)
        real = Path(os.path.realpath(place.folder))
        if os.path.lexists(real):
            raise FileExistsError(f"path is {str(place.folder)!r}, which exists; give another one, or remove it")
        require_folder(real.parent)
        remove_leftovers(real.parent)
        options |= {"name": options["name"] or real.name}
        with says_if_full(real, NOTHING_LEFT), fresh_folder(real.parent) as folder:
            filled(Disk(folder / "table", cache_bytes=_CACHE_BYTES, commit_seconds=None)).close()  # commits once
            rename_anew(folder / "table", real)
            sync_names(real.parent)
    return make.open(place)


def _chosen(rows: Incoming, columns: Sequence[str] | None, what: str) -> list[str]:
    """Return the file's columns to read: the ones given, the weight or the only one."""
    known = [*rows.columns]
    if columns is None:
        if "weight" in known or len(known) == 1:
            return ["weight" if "weight" in known else known[0]]
        raise ValueError(f"{what} has columns {', '.join(known)}; say which is the weight with columns=[...]")
    missing = [name for name in columns if name not in known]
    if missing or isinstance(columns, str) or not columns or len({*columns}) < len(columns):
        raise ValueError(f"columns is {columns!r}; {what} has {', '.join(known)}: give a list of some of them")
    return list(columns)


class _Filling:
    """The way of a file's rows into a new table.

    Args:
        rows: of the file.
        columns: names there; the first becomes the weight.
        what: the file, for messages.
        allow_nan: True for rows that are not finite.
        keeps_map: True if keys are mapped to rows, so that row 0 is that of keys that have none.
    """

    def __init__(self, rows: Incoming, columns: list[str], what: str, *, allow_nan: bool, keeps_map: bool) -> None:
        self.first_row = 1 if keeps_map and rows.key_kind is not None else 0
        self.num_rows = rows.num_rows + self.first_row
        self._rows, self._columns, self._what, self._allow_nan = rows, columns, what, allow_nan
        self._names = {name: "weight" if place == 0 else name for place, name in enumerate(columns)}
        if "weight" in columns[1:]:
            raise ValueError(f"columns is {columns!r}; the first becomes the weight, so 'weight' cannot follow it")
        (self.dim, *more) = self.forms["weight"].row_shape or (1,)
        if more:
            raise TableFormatError(f"{what} has rows of shape {(self.dim, *more)}; save a matrix, a vector per row")

    @property
    def forms(self) -> dict[str, ColumnForm]:
        """The columns' forms in the file, by their names in the table."""
        return {name: self._rows.columns[column] for column, name in self._names.items()}

    def fill(self, table: Table, sink: KeySink | None) -> Table:
        """Write all rows to a table, which is removed if that fails."""
        try:
            table.reserve(["weight"])  # every row is written
            for piece in self._rows.pieces(self._columns):
                for column, values in piece.values.items():
                    name = self._names[column]
                    found = table.columns[name]
                    values = values.to(found.dtype).reshape(-1, *found.row_shape)
                    self._check_finite(values, column, piece.start)
                    table.write(self.first_row + piece.start, values, column=name)
                if sink is not None:
                    assert piece.keys is not None
                    sink.add(piece.start, piece.keys)
            if self.first_row:
                assert sink is not None
                table.set_id_map(sink.id_map)
        except BaseException:
            table.remove()
            raise
        return table

    def _check_finite(self, values: Tensor, column: str, start: int) -> None:
        if self._allow_nan or not (values.is_floating_point() or values.is_complex()):
            return
        wrong = (~values.isfinite().reshape(len(values), -1).all(1)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise TableFormatError(
                f"{self._what}, row {start + place}: {column!r} has a value that is not finite, as {values.dtype}; "
                "correct it, or give allow_nan=True (--allow-nan)"
            )


def _new(make: type[Table], filling: _Filling, place: Storage, dtype: torch.dtype | None, options: Any) -> Table:
    """Make the table, filled with zeros."""
    forms = filling.forms
    table = make.create(filling.num_rows, filling.dim, dtype=dtype or forms["weight"].dtype, storage=place, **options)
    try:
        table.add_columns(
            [Column(name, form.row_shape, form.dtype, init.zeros()) for name, form in forms.items() if name != "weight"]
        )
    except BaseException:
        table.remove()
        raise
    return table
