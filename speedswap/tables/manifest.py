"""The manifest of a table's directory: small JSON with a checksum, read with suspicion."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speedswap.errors import TableFormatError
from speedswap.tables import init
from speedswap.tables.record import Column, RecordLayout

__all__ = ["Manifest", "SegmentEntry", "encode", "fsync_directory", "read_manifest", "write_manifest"]

FORMAT = "speedswap-table"
VERSION = 1
_NAME = "MANIFEST"
_MAX_BYTES = 1 << 20
_FILE_NAME = re.compile(r"data-\d{1,9}\.bin")
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}")
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True)
class SegmentEntry:
    """One data file and the layout of its records."""

    file: str
    layout: RecordLayout


@dataclass(frozen=True)
class Manifest:
    """All that a table's directory says about itself."""

    name: str
    num_embeddings: int
    seed: int
    written: bool  # whether rows may differ from their initial values
    attributes: dict[str, Any]  # plain data that others keep with the table
    segments: tuple[SegmentEntry, ...]


def write_manifest(directory: Path, body: bytes) -> None:
    """Replace the directory's manifest: written beside it, made durable, renamed over it, directory made durable."""
    temporary = directory / f"{_NAME}.tmp"
    with open(temporary, "wb") as file:
        file.write(b"%08x\n" % zlib.crc32(body) + body)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, directory / _NAME)
    fsync_directory(directory)


def encode(manifest: Manifest) -> bytes:
    """The manifest as it stands in its file, after the checksum."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "name": manifest.name,
            "num_embeddings": manifest.num_embeddings,
            "seed": manifest.seed,
            "written": manifest.written,
            "attributes": manifest.attributes,
            "segments": [
                {
                    "file": segment.file,
                    "stride": segment.layout.stride,
                    "columns": [
                        {
                            "name": column.name,
                            "row_shape": list(column.row_shape),
                            "dtype": str(column.dtype).removeprefix("torch."),
                            "offset": offset,
                            "init": column.init.to_json(),
                            "zero_row": column.zero_row,
                        }
                        for column, offset in zip(segment.layout.columns, segment.layout.offsets, strict=True)
                    ],
                }
                for segment in manifest.segments
            ],
        }
    ).encode()


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_manifest(directory: Path) -> Manifest:
    """Read and check a directory's manifest, and that its data files have the sizes it speaks of.

    Raises:
        FileNotFoundError: there is no such directory.
        TableFormatError: it is not a table, or it is damaged.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"path is {str(directory)!r}, where there is no table; create one with Table.create")
    try:
        with open(directory / _NAME, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise TableFormatError(f"{directory} is not a table: its {_NAME} cannot be read ({error.strerror})") from error
    try:
        return _parse(directory, raw)
    except TableFormatError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise TableFormatError(f"the {_NAME} of {directory} is damaged: {type(error).__name__}: {error}") from error


def _parse(directory: Path, raw: bytes) -> Manifest:
    _require(len(raw) <= _MAX_BYTES, directory, f"it is longer than {_MAX_BYTES} bytes")
    checksum, newline, body = raw.partition(b"\n")
    _require(newline == b"\n" and checksum == b"%08x" % zlib.crc32(body), directory, "its checksum does not match")
    data = json.loads(body)
    _require(isinstance(data, dict) and data.get("format") == FORMAT, directory, "it does not describe a table")
    _require(
        data["version"] == VERSION, directory, f"its version is {data['version']!r}; this speedswap reads {VERSION}"
    )
    num_embeddings, seed, name = data["num_embeddings"], data["seed"], data["name"]
    _require(_is_int(num_embeddings, 1, 2**62), directory, f"num_embeddings is {num_embeddings!r}")
    _require(_is_int(seed, 0, 2**64 - 1), directory, f"seed is {seed!r}")
    _require(isinstance(name, str) and isinstance(data["written"], bool), directory, "name or written has a wrong type")
    attributes = data["attributes"]
    _require(isinstance(attributes, dict), directory, "its attributes are not an object")
    segments = tuple(_parse_segment(directory, entry, num_embeddings) for entry in data["segments"])
    names = [column.name for segment in segments for column in segment.layout.columns]
    _require("weight" in names and len(names) == len(set(names)), directory, f"its columns are {names}")
    return Manifest(name, num_embeddings, seed, data["written"], attributes, segments)


def _parse_segment(directory: Path, entry: dict[str, Any], num_embeddings: int) -> SegmentEntry:
    file, stride = entry["file"], entry["stride"]
    _require(isinstance(file, str) and _FILE_NAME.fullmatch(file) is not None, directory, f"a data file is {file!r}")
    _require(_is_int(stride, 1, 2**40), directory, f"a record's stride is {stride!r}")
    columns, offsets, end = [], [], 0
    for item in entry["columns"]:
        column, offset = _parse_column(directory, item)
        _require(_is_int(offset, end, stride), directory, f"column {column.name!r} overlaps another")
        end = offset + column.row_bytes
        _require(end <= stride, directory, f"column {column.name!r} does not fit its record")
        _require(
            offset % column.dtype.itemsize == 0 and stride % column.dtype.itemsize == 0,
            directory,
            f"column {column.name!r} is not aligned to its items",
        )
        columns.append(column)
        offsets.append(offset)
    _require(bool(columns), directory, f"{file} has no columns")
    path = directory / file
    _require(path.is_file() and not path.is_symlink(), directory, f"{file} is missing")
    size = path.stat().st_size
    _require(size == num_embeddings * stride, directory, f"{file} has {size} bytes, not {num_embeddings} × {stride}")
    return SegmentEntry(file, RecordLayout(tuple(columns), tuple(offsets), stride))


def _parse_column(directory: Path, item: dict[str, Any]) -> tuple[Column, int]:
    name, shape, dtype, zero_row = item["name"], item["row_shape"], item["dtype"], item["zero_row"]
    _require(isinstance(name, str) and _COLUMN_NAME.fullmatch(name) is not None, directory, f"a column is {name!r}")
    _require(
        isinstance(shape, list)
        and len(shape) <= 4
        and all(_is_int(size, 1, 2**32) for size in shape)
        and math.prod(shape) <= 2**36,
        directory,
        f"the rows of column {name!r} have shape {shape!r}",
    )
    _require(dtype in _DTYPES, directory, f"column {name!r} has dtype {dtype!r}")
    _require(zero_row is None or _is_int(zero_row, 0, 2**62), directory, f"column {name!r} has zero_row {zero_row!r}")
    # Values that cannot be recomputed (a function of torch.nn.init) are in the file already.
    initial = init.from_json(item["init"]) or init.zeros()
    return Column(name, tuple(shape), _DTYPES[dtype], initial, zero_row), item["offset"]


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require(condition: bool, directory: Path, problem: str) -> None:
    if not condition:
        raise TableFormatError(f"the MANIFEST of {directory} is damaged: {problem}")
