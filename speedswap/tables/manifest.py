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
from speedswap.tables.record import ROUNDINGS, STORED_DTYPES, Column, RecordLayout

__all__ = ["Manifest", "SegmentEntry", "encode", "fsync_directory", "read_manifest", "write_manifest"]

FORMAT = "speedswap-table"
# 2: columns may be stored otherwise than their dtype. A table without such columns is written as 1.
VERSIONS = (1, 2)
_NAME = "MANIFEST"
_MAX_BYTES = 1 << 20
_FILE_NAME = re.compile(r"data-\d{1,9}\.bin")
_COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}")
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_STORED = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


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
    writes: int = 0  # how many scatters there have been, which stochastic rounding depends on


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
    compact = any(column.compact for segment in manifest.segments for column in segment.layout.columns)
    return json.dumps(
        {
            "format": FORMAT,
            "version": 2 if compact else 1,
            "name": manifest.name,
            "num_embeddings": manifest.num_embeddings,
            "seed": manifest.seed,
            "written": manifest.written,
            **({"writes": manifest.writes} if compact else {}),
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
                            **(_stored_as(column) if column.compact else {}),
                        }
                        for column, offset in zip(segment.layout.columns, segment.layout.offsets, strict=True)
                    ],
                }
                for segment in manifest.segments
            ],
        }
    ).encode()


def _stored_as(column: Column) -> dict[str, str]:
    return {"stored": str(column.stored).removeprefix("torch."), "rounding": column.rounding}


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
    version = data["version"]
    _require(
        _is_int(version, min(VERSIONS), max(VERSIONS)),
        directory,
        f"its version is {version!r}; this speedswap reads {' and '.join(map(str, VERSIONS))}",
    )
    num_embeddings, seed, name = data["num_embeddings"], data["seed"], data["name"]
    _require(_is_int(num_embeddings, 1, 2**62), directory, f"num_embeddings is {num_embeddings!r}")
    _require(_is_int(seed, 0, 2**64 - 1), directory, f"seed is {seed!r}")
    _require(isinstance(name, str) and isinstance(data["written"], bool), directory, "name or written has a wrong type")
    writes = data["writes"] if version >= 2 else 0
    _require(_is_int(writes, 0, 2**62), directory, f"writes is {writes!r}")
    attributes = data["attributes"]
    _require(isinstance(attributes, dict), directory, "its attributes are not an object")
    segments = tuple(_parse_segment(directory, entry, num_embeddings) for entry in data["segments"])
    names = [column.name for segment in segments for column in segment.layout.columns]
    _require("weight" in names and len(names) == len(set(names)), directory, f"its columns are {names}")
    return Manifest(name, num_embeddings, seed, data["written"], attributes, segments, writes)


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
            offset % column.item_bytes == 0 and stride % column.item_bytes == 0,
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
    stored, rounding = item.get("stored"), item.get("rounding", "nearest")
    _require(stored is None or stored in _STORED, directory, f"column {name!r} is stored as {stored!r}")
    _require(rounding in ROUNDINGS, directory, f"column {name!r} has rounding {rounding!r}")
    held = None if stored is None else _STORED[stored]
    return Column(name, tuple(shape), _DTYPES[dtype], initial, zero_row, held, rounding), item["offset"]


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require(condition: bool, directory: Path, problem: str) -> None:
    if not condition:
        raise TableFormatError(f"the MANIFEST of {directory} is damaged: {problem}")
