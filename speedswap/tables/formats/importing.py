"""From a file of another program to a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.tables import init
from speedswap.tables.files.open_directory import says_if_full, sync_names
from speedswap.tables.files.place import rename_anew
from speedswap.tables.files.whole import fresh_folder, open_regular, remove_leftovers
from speedswap.tables.formats.exporting import NOTHING_LEFT, require_folder
from speedswap.tables.formats.format import FORMATS, format_of
from speedswap.tables.formats.keys import KeySink, vocabulary_file
from speedswap.tables.formats.pieces import ColumnForm, Incoming
from speedswap.tables.record import Column
from speedswap.tables.storage import Disk, Storage

if TYPE_CHECKING:
    from speedswap.tables.table import Table

__all__ = ["import_table"]

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
