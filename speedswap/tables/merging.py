"""Checkpoints with changed rows in place, and the same rows as PEFT's trainable tokens."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedswap.tables.files.damage import ranges_of
from speedswap.tables.files.open_directory import OpenFile, sync_names, write_all
from speedswap.tables.files.tensor_files import TensorFiles, TensorPlace, TensorWriter
from speedswap.tables.formats import new_folder
from speedswap.tables.init import of_tensors
from speedswap.tables.rows_file import RowsFile

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
