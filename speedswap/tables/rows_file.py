"""Safetensors files of the rows that training has changed: saved, loaded, merged into checkpoints, and given to PEFT.

For each table a file has the tensors ``{name}.ids`` (int64, ascending), ``{name}.rows``, and, if the optimizer's state
was saved, ``{name}.state.{column}``. Its metadata describe the tables, with a CRC-32 of each tensor.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap._process import all_held
from speedswap.errors import TableFormatError
from speedswap.kernels import as_read
from speedswap.tables.files.damage import is_int, ranges_of, require, says_damaged
from speedswap.tables.files.open_directory import OpenFile, says_if_full, sync_names, write_all
from speedswap.tables.files.place import write_whole
from speedswap.tables.files.tensor_files import DTYPES, TensorFiles, TensorPlace, TensorWriter, opened_tensors
from speedswap.tables.formats import NOTHING_LEFT, new_folder, require_in_order, require_room, target_file
from speedswap.tables.init import OfTensors, chunks_of, of_tensors
from speedswap.tables.record import Block, Column, initial_values, is_lazy, require_functions_of_row, with_sources
from speedswap.tables.store import RowStore, note_change, read_alone, require_alike
from speedswap.tables.whole_table import ColumnForm, changed_rows, rows_in_piece

_CPU = torch.device("cpu")
_COPIES = 4  # of a piece that is read, at once: in its dtype on file and in others
_FORMAT, _VERSION = "speedswap-rows", 1
_ABOUT = {"shape", "origin", "tensors", "since", "commit"}
_WRITES = "writes"  # with the state: their number seeds stochastic rounding
_METADATA = "__metadata__"  # among the checksums, that of the tables' description


def origin_of(store: RowStore) -> dict[str, Any] | None:
    """Return what an untouched row's weight depends on, as plain data; None if it cannot be computed again."""
    weight = store.columns["weight"]
    if not is_lazy(weight):
        return None
    seed = None if weight.init.bases else store.facts.seed
    zero_row = None if weight.init.keeps_zero_row else weight.zero_row
    known = json.dumps({"init": weight.init.identity, "seed": seed, "zero_row": zero_row})
    origin: dict[str, Any] = json.loads(known)
    return origin


def _dtype_in_file(column: Column) -> torch.dtype:
    """Return the dtype that holds a column's values exactly; int8 is written as the values that a lookup returns."""
    return column.stored_dtype if column.stored_dtype.is_floating_point else column.dtype


def _tensor_of(name: str, column: str) -> str:
    return f"{name}.rows" if column == "weight" else f"{name}.state.{column}"


@contextmanager
def _held(stores: Mapping[str, RowStore]) -> Iterator[None]:
    """Hold the tables' locks; refuse tables whose rows have no fixed numbers."""
    with all_held([store.facts.locked.lock for store in stores.values()]):
        for store in stores.values():
            require_in_order(store)
            facts = store.facts
            if facts.part_name in store.notes.id_maps:
                raise TypeError(
                    f"table {facts.name!r} has an id map, which gives rows their numbers and is not in a file of rows; "
                    "save both with Table.save, or the rows with their keys with Table.export"
                )
        yield


# ---- saved


class _Saved(NamedTuple):
    """The rows of a table that are being saved."""

    columns: dict[str, Column]
    ids: Tensor
    about: dict[str, Any]


def save_rows(
    stores: Mapping[str, RowStore],
    path: str | os.PathLike[str],
    *,
    since: int | None = None,
    state: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the changed rows of tables, by name, to one file; see :meth:`speedswap.Table.save_rows`."""
    with _held(stores):
        for store in stores.values():
            store.flush()
        saved = {name: _to_save(store, since, state) for name, store in stores.items()}
        with ExitStack() as written:
            writer = None
            if all(store.facts.ranks is None or store.facts.ranks.rank == 0 for store in stores.values()):
                real = target_file(path, overwrite, stores.values())
                written.enter_context(says_if_full(real.parent, NOTHING_LEFT))
                writer = _Writer(saved, real, written)
            for name, store in stores.items():
                with read_alone(store) as alone:
                    if alone is not None and writer is not None:
                        writer.add(name, alone)
                        if name == [*stores][-1]:
                            writer.describe()
                            written.close()  # before the other ranks go on


def _to_save(store: RowStore, since: int | None, state: bool) -> _Saved:
    columns = {name: each for name, each in store.columns.items() if state or name == "weight"}
    for name, column in columns.items():
        if _dtype_in_file(column) not in DTYPES:
            raise TypeError(
                f"column {name!r} of table {store.facts.name!r} holds {column.dtype}, which safetensors files are not "
                "written with; give the table a wider dtype, or save it with Table.save"
            )
    ids, commits = changed_rows(store, [*columns], since), None if store.files is None else store.files.commits
    init = columns["weight"].init
    about = {
        "shape": [store.facts.num_embeddings, columns["weight"].width],
        "origin": origin_of(store),
        "tensors": {**init.to_json(), "files": []} if isinstance(init, OfTensors) else None,  # without their files
        "since": since,
        "commit": None if commits is None else commits.last,
    }
    if state:
        about[_WRITES] = store.notes.writes
    return _Saved(columns, ids, about)


class _Writer:
    """A file being filled with the rows of tables.

    Args:
        saved: the tables, by name.
        path: of the file.
        written: completes the file when it is closed.
    """

    def __init__(self, saved: dict[str, _Saved], path: Path, written: ExitStack) -> None:
        self._saved = saved
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, table in saved.items():
            shapes[f"{name}.ids"] = torch.int64, (len(table.ids),)
            for column in table.columns.values():
                shape = (len(table.ids), *column.row_shape)
                shapes[_tensor_of(name, column.name)] = _dtype_in_file(column), shape
        self._crcs = dict.fromkeys(shapes, 0)
        require_room(sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values()), path)
        file = written.enter_context(write_whole(path))
        self._writer = TensorWriter(OpenFile(os.dup(file.fileno())), shapes, self._metadata())

    def _metadata(self) -> dict[str, str]:
        tables = json.dumps({name: table.about for name, table in self._saved.items()})
        crcs = self._crcs | {_METADATA: zlib.crc32(tables.encode())}
        shown = json.dumps({tensor: f"{crc:08x}" for tensor, crc in crcs.items()})
        return {"format": _FORMAT, "version": str(_VERSION), "tables": tables, "crc32": shown}

    def add(self, name: str, store: RowStore) -> None:
        """Write the rows of a table."""
        table = self._saved[name]
        self._write(f"{name}.ids", table.ids, 0)
        step = rows_in_piece([ColumnForm(each.dtype, each.row_shape) for each in table.columns.values()])
        for rows in chunks_of(len(table.ids), step):
            block = store.gather(table.ids[rows.start : rows.stop], [*table.columns], _CPU)
            for column in table.columns.values():
                self._write(_tensor_of(name, column.name), block[column.name].to(_dtype_in_file(column)), rows.start)

    def _write(self, tensor: str, values: Tensor, start: int) -> None:
        if len(values):
            self._writer.write(tensor, values, first_row=start)
            self._crcs[tensor] = _crc_of(values, self._crcs[tensor])

    def describe(self) -> None:
        """Complete the metadata."""
        self._writer.describe(self._metadata())


def _crc_of(values: Tensor, before: int) -> int:
    return zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy().data, before)


# ---- read


class RowsFile:
    """The rows of tables in a file, which may be damaged; :meth:`verify` reads all of it.

    Args:
        path: the file.

    Attributes:
        about: for each table its ``shape``, ``origin``, ``since`` and ``commit``, the ``tensors`` of its base, and,
            with its state, the number of its ``writes``.

    Raises:
        FileNotFoundError: it does not exist.
        TableFormatError: it is not a file of rows, or its header is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._reader = opened_tensors(path)
        metadata = self._reader.metadata
        if metadata.get("format") != _FORMAT or metadata.get("version") != str(_VERSION):
            raise TableFormatError(
                f"{self.path} is not a file of rows of version {_VERSION}; give one that Table.save_rows wrote"
            )
        with says_damaged(self.path):
            self.about: dict[str, dict[str, Any]] = json.loads(metadata["tables"])
            self._crcs: dict[str, str] = json.loads(metadata["crc32"])
            is_whole = self._crcs.pop(_METADATA) == f"{zlib.crc32(metadata['tables'].encode()):08x}"
            require(is_whole, "the checksum of its metadata is wrong")
            described = {tensor for name in self.about for tensor in self._tensors(name)}
            is_described = self._crcs.keys() == self._reader.places.keys() == described
            require(is_described, "it has other tensors than its metadata say")
            for name, about in self.about.items():
                require(about.keys() - {_WRITES} == _ABOUT, f"it describes {name[:100]!r} by {[*about][:10]}")
                if about["tensors"] is not None:
                    OfTensors.from_json(about["tensors"])
                require(is_int(about.get(_WRITES, 0), 0, 2**62), f"{name[:100]!r} has no proper number of writes")
                require(all(is_int(each, 1, 2**62) for each in about["shape"]), f"{name[:100]!r} has no proper shape")
                places, (_, width) = [self._reader.places[each] for each in self._tensors(name)], about["shape"]
                require(places[0].dtype == torch.int64, f"its ids are {places[0].dtype}")
                require(places[1].shape[1:] == (width,), f"its rows have the shape {places[1].shape}")
                counts = {place.shape[:1] for place in places}
                require(len(counts) == 1, f"the tensors of {name[:100]!r} have different lengths")

    def _tensors(self, name: str) -> list[str]:
        return [f"{name}.ids", f"{name}.rows", *(_tensor_of(name, each) for each in self.columns(name)[1:])]

    def columns(self, name: str) -> list[str]:
        """Return the columns of a table that the file has, the weight first."""
        prefix = _tensor_of(name, "")
        return ["weight", *(each.removeprefix(prefix) for each in self._crcs if each.startswith(prefix))]

    def form(self, name: str, column: str = "weight") -> ColumnForm:
        """Return the dtype and the row shape of a column."""
        place = self._reader.places[_tensor_of(name, column)]
        return ColumnForm(place.dtype, place.shape[1:])

    def count(self, name: str) -> int:
        """Return the number of a table's rows in the file."""
        return self._reader.places[f"{name}.ids"].shape[0]

    def pieces(self, name: str, columns: list[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield ids, int64, shape (n,), and columns, shape (n, ...), in order, a bounded piece at a time."""
        step = rows_in_piece([ColumnForm(torch.int64, ()), *(self.form(name, each) for each in columns)])
        step = max(1, step // _COPIES)
        for rows in chunks_of(self.count(name), step):
            read = partial(self._reader.read_rows, start=rows.start, stop=rows.stop)
            yield read(f"{name}.ids"), {each: read(_tensor_of(name, each)) for each in columns}

    def verify(self) -> None:
        """Read the whole file.

        Raises:
            TableFormatError: a checksum is wrong, or ids are not ascending rows of their table.
        """
        with says_damaged(self.path, "; save or copy it again"):
            for name, about in self.about.items():
                crcs, last = dict.fromkeys(self._tensors(name), 0), -1
                for ids, values in self.pieces(name, self.columns(name)):
                    for tensor, each in zip(crcs, (ids, *values.values()), strict=True):
                        crcs[tensor] = _crc_of(each, crcs[tensor])
                    is_ascending = int(ids[0]) > last and bool((ids[1:] > ids[:-1]).all())
                    last = int(ids[-1])
                    is_of_table = is_ascending and last < about["shape"][0]
                    require(is_of_table, f"the ids of {name[:100]!r} are not ascending rows")
                wrong = [tensor for tensor, crc in crcs.items() if self._crcs[tensor] != f"{crc:08x}"]
                require(not wrong, f"the checksum of {', '.join(wrong)[:200]} is wrong")


def load_rows(stores: Mapping[str, RowStore], path: str | os.PathLike[str], *, state: bool = True) -> None:
    """Write the rows in a file to tables, by their names there; see :meth:`speedswap.Table.load_rows`."""
    file = RowsFile(path)
    with _held(stores):
        columns = {name: _columns_to_load(store, file, name, state) for name, store in stores.items()}
        file.verify()
        for name, store in stores.items():
            require_alike(store, [file.about, *sorted(file._crcs.items())], f"rows in {file.path} for")
            if store.files is not None:
                store.files.reserve(file.count(name))
        for name, store in stores.items():
            _load(store, file, name, columns[name])
            if state:
                store.notes.writes = file.about[name].get(_WRITES, store.notes.writes)
            store.commit()  # all of them are one step


def _columns_to_load(store: RowStore, file: RowsFile, name: str, state: bool) -> list[str]:
    """Return the columns to read; raise ValueError or TypeError unless they fit the table."""
    facts = store.facts
    if name not in file.about:
        raise ValueError(
            f"name is {name!r}, but {file.path} has rows of {', '.join(map(repr, file.about))}; give one of these"
        )
    about, table = file.about[name], f"table {facts.name!r}"
    shape = [facts.num_embeddings, store.columns["weight"].width]
    if about["shape"] != shape:
        raise ValueError(
            f"{file.path} has rows of a table of {about['shape']}, but {table} has {shape}; load them there"
        )
    if file.count(name) < facts.num_embeddings and (found := origin_of(store)) != about["origin"]:
        raise ValueError(
            f"{file.path} has the rows that differ from {_shown(about['origin'])}, but the other rows of {table} are "
            f"those of {_shown(found)}; make the table over the same checkpoint, or with the same init and seed"
        )
    columns = file.columns(name) if state else ["weight"]
    missing = [each for each in columns if each not in store.columns]
    if missing:
        raise ValueError(
            f"{file.path} has the state {', '.join(missing)}, which {table} lacks; attach the optimizer first, or give "
            "state=False"
        )
    for each in columns:
        form, column = file.form(name, each), store.columns[each]
        if form.row_shape != column.row_shape:
            raise ValueError(
                f"column {each!r} has rows of shape {form.row_shape} in {file.path}, but {column.row_shape} in "
                f"{table}; load them into one that is trained in the same way"
            )
        if torch.promote_types(form.dtype, _dtype_in_file(column)) != _dtype_in_file(column):
            raise TypeError(
                f"column {each!r} is {form.dtype} in {file.path}, which {table} would round to "
                f"{_dtype_in_file(column)}; give it a wider dtype or stored_dtype"
            )
    require_functions_of_row(_to_reset(store, columns), facts.name)
    return columns


def _to_reset(store: RowStore, given: list[str]) -> dict[str, Column]:
    return with_sources(store.columns, store.columns.keys() - given)


def _shown(origin: object) -> str:
    return "values that cannot be computed again" if origin is None else json.dumps(origin)[:300]


def _load(store: RowStore, file: RowsFile, name: str, columns: list[str]) -> None:
    facts, reset = store.facts, _to_reset(store, columns)
    share = slice(None) if facts.ranks is None else slice(facts.ranks.rank, None, len(facts.ranks))
    for every, found in file.pieces(name, columns):
        ids = every[share].contiguous()
        values = {each: as_read(some[share].to(store.columns[each].dtype)) for each, some in found.items()}
        initial = initial_values(reset, ids, facts.seed, facts.num_embeddings)
        note_change(store, ids, initial | values)
        store.scatter(Block(ids, {}), initial | values)


# ---- merged into a checkpoint

RowsFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file of :meth:`speedswap.Table.save_rows`, or several."""

_COPIED_BYTES = 1 << 30  # at once
_CANNOT_SHARE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


_Target = tuple[Path, TensorPlace]
"""A tensor that gets rows: the path of its file, within the checkpoint's folder, and its place there."""


def merge_rows(base: str | os.PathLike[str], rows: RowsFiles, out: str | os.PathLike[str]) -> None:
    """Write a copy of a checkpoint whose tables have the rows in files.

    Files are copied by the file system, without their bytes where it can share them; then rows are written in place,
    rounded to the tensors' dtype, a bounded piece at a time. Names, shards, index and all other files are those of the
    checkpoint, hidden files excepted.

    Args:
        base: the checkpoint's folder, with safetensors files.
        rows: files of :meth:`speedswap.Table.save_rows` over that checkpoint, or with every row of a table that is
            called like its tensor, ``.weight`` or not; of a row in several files the last one counts.
        out: a new folder; it appears complete or not at all, durably.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError, TableFormatError: a file is missing, damaged, or not a file of rows.
        ValueError: rows are those of another checkpoint, a tensor or its shape does not fit, or a row would become
            infinite.
        TypeError: the tensors are of float8, whose scales the rows do not fit.
        TableFullError: the disk has no room. In all cases nothing is left behind.
    """
    folder = Path(os.path.abspath(base))
    files = [RowsFile(path) for path in ([rows] if isinstance(rows, str | os.PathLike) else rows)]
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "give the folder of a checkpoint", str(folder))
    tensors = TensorFiles(folder)
    targets = [(file, name, _targets(file, name, tensors, folder)) for file in files for name in file.about]
    for file in files:
        file.verify()
    with _filled_folder(out) as new:
        for path in _visible(folder):
            copied = new / path.relative_to(folder)
            copied.mkdir() if path.is_dir() else _copy(path, copied)
        for file, name, found in targets:
            _write(file, name, [(new / path, place) for path, place in found])


def _targets(file: RowsFile, name: str, tensors: TensorFiles, folder: Path) -> list[_Target]:
    """Return the tensors of a table, in the order of their rows."""
    about, base = file.about[name], file.about[name]["tensors"]
    if base is not None:
        found = [each for pattern in base["names"] for each in tensors.matching(pattern)]
        if (places := [tensors.place(each) for each in found])[0].dtype.itemsize < 2:
            raise TypeError(
                f"{found[0]!r} of {folder} is {places[0].dtype} with scales, in which rows cannot be written; keep the "
                f"rows in {file.path}, or merge them into a checkpoint that is saved in a wider dtype"
            )
        now = of_tensors(folder, base["names"], block=base["block"]).fingerprint
        if now != base["fingerprint"]:
            raise ValueError(
                f"{file.path} has rows of a checkpoint with the fingerprint {base['fingerprint']}, but that of "
                f"{folder} is {now}; give the checkpoint that the table {name!r} was made over"
            )
    else:
        found = [each for each in (f"{name}.weight", name) if each in tensors][:1]
        if not found:
            raise ValueError(tensors.missing(f"{name}.weight"))
        if file.count(name) < about["shape"][0]:
            raise ValueError(
                f"{file.path} has some rows of {name!r}, whose others are not those of {folder}; save a table made "
                "with init=speedswap.init.of_tensors(…), or one with every row"
            )
    places = [tensors.place(each) for each in found]
    rows, shapes = sum(place.shape[0] for place in places), {place.shape[1:] for place in places}
    if [rows] != about["shape"][:1] or shapes != {(about["shape"][1],)} or not places[0].dtype.is_floating_point:
        raise ValueError(
            f"{file.path} has rows of a table of {about['shape']}, but {found[0]!r} of {folder} has {rows} rows of "
            f"{shapes}; give the checkpoint that the table {name!r} was made over"
        )
    return [(tensors.path(each).relative_to(folder), place) for each, place in zip(found, places, strict=True)]


def _visible(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder, folders before what is in them."""
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            yield path
            if path.is_dir():
                yield from _visible(path)


@contextmanager
def _filled_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a new folder that takes its name, with all of its files durable, when the block ends without an error."""
    with new_folder(out) as new:
        new.mkdir()
        yield new
        for path in (new, *_visible(new)):
            if path.is_dir():
                sync_names(path)
            else:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    """Copy a file's bytes, or have the file system share them."""
    try:
        with open(source, "rb") as one, open(target, "wb") as other:
            while os.copy_file_range(one.fileno(), other.fileno(), _COPIED_BYTES):
                pass
    except OSError as error:
        if error.errno not in _CANNOT_SHARE:
            raise
        shutil.copyfile(source, target)


def _write(file: RowsFile, name: str, targets: list[_Target]) -> None:
    """Write a table's rows to its tensors in place."""
    opened = {path: OpenFile(os.open(path, os.O_WRONLY)) for path in {path for path, _ in targets}}
    firsts = torch.tensor([*accumulate((place.shape[0] for _, place in targets), initial=0)])
    for ids, values in file.pieces(name, ["weight"]):
        edges = torch.searchsorted(ids, firsts).tolist()
        for (path, place), first, (begin, end) in zip(targets, firsts.tolist(), pairwise(edges), strict=False):
            rows = _rounded(values["weight"][begin:end], place.dtype, ids[begin:end], name)
            _write_runs(opened[path].fd, place, ids[begin:end] - first, rows)


def _rounded(rows: Tensor, dtype: torch.dtype, ids: Tensor, name: str) -> Tensor:
    if rows.dtype == dtype:
        return rows
    rounded = rows.to(dtype)
    lost = (rounded.isinf() & rows.isfinite()).any(1).nonzero()
    if len(lost):
        raise ValueError(f"row {int(ids[lost[0]])} of {name!r} has a value beyond the range of {dtype}; scale the rows")
    return rounded


def _write_runs(fd: int, place: TensorPlace, rows: Tensor, values: Tensor) -> None:
    """Write rows of a tensor, consecutive ones at once."""
    rest = values.contiguous().view(torch.uint8).numpy()
    for run in ranges_of(rows.numpy()):
        some, rest = rest[: len(run)], rest[len(run) :]
        write_all(fd, some.reshape(-1).data, place.rows(run.start, run.stop).start)


# ---- PEFT

_CONFIG, _MODEL, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def save_trainable_tokens(
    rows: str | os.PathLike[str], out: str | os.PathLike[str], *, adapter: str | os.PathLike[str] | None = None
) -> None:
    """Write rows as trainable tokens of PEFT, which ``PeftModel.from_pretrained(model, out)`` loads onto a plain model.

    The plain model has the whole table in memory, and its configuration every id, so this is for small tables.

    Args:
        rows: a file of :meth:`speedswap.Table.save_rows` whose tables have the names of the model's modules, e.g.
            ``model.embed_tokens``.
        out: a new folder; it appears complete or not at all, durably.
        adapter: the folder of a LoRA adapter, trained with these rows, to write both to ``out``; None for the rows
            alone, which must be of one table.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError, TableFormatError: a file is missing, damaged, or not a file of rows.
        ValueError: there are several tables without ``adapter``, or it has trainable tokens already.
    """
    file = RowsFile(rows)
    file.verify()
    ids = {name: [int(row) for some, _ in file.pieces(name, []) for row in some] for name in file.about}
    suffix = "" if adapter is None else ".token_adapter"
    kept, config = _alone(ids, file.path) if adapter is None else _beside(ids, Path(adapter))
    shapes = {name: (each.dtype, tuple(each.shape)) for name, each in kept.items()}
    deltas = {name: f"{_PREFIX}{name}{suffix}.trainable_tokens_delta" for name in ids}
    shapes |= {deltas[name]: (file.form(name).dtype, (len(ids[name]), *file.form(name).row_shape)) for name in ids}
    with _filled_folder(out) as new:
        if adapter is not None:
            for path in _visible(Path(adapter)):
                if path.is_file() and path.name not in (_CONFIG, _MODEL):
                    _copy(path, new / path.name)
        (new / _CONFIG).write_text(json.dumps(config, indent=2))
        with open(new / _MODEL, "wb") as opened:
            writer = TensorWriter(OpenFile(os.dup(opened.fileno())), shapes, {"format": "pt"})
            for name, tensor in kept.items():
                writer.write(name, tensor)
            for name in ids:
                first = 0
                for _, values in file.pieces(name, ["weight"]):
                    writer.write(deltas[name], values["weight"], first_row=first)
                    first += len(values["weight"])


def _alone(ids: dict[str, list[int]], path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return no tensors, and the configuration of an adapter of one table's rows."""
    if len(ids) != 1:
        raise ValueError(
            f"rows is {path!r}, with {len(ids)} tables; PEFT takes several only beside LoRA: give adapter="
        )
    ((name, tokens),) = ids.items()
    peft = {"peft_type": "TRAINABLE_TOKENS", "task_type": None, "inference_mode": True}
    return {}, peft | {"target_modules": [name], "token_indices": tokens}


def _beside(ids: dict[str, list[int]], adapter: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of a LoRA adapter, with trainable tokens in the latter."""
    config = json.loads((adapter / _CONFIG).read_text())
    if config.get("trainable_token_indices"):
        raise ValueError(f"adapter is {str(adapter)!r}, which has trainable tokens already; give one without")
    tensors = TensorFiles(adapter / _MODEL)
    return {name: tensors.tensor(name) for name in tensors.names}, config | {"trainable_token_indices": ids}
