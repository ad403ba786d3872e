"""The manifest of a table's directory: small JSON with a checksum, which is never trusted."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedswap.errors import TableFormatError, TableTooLargeError
from speedswap.tables import init
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, OpenFile, identity
from speedswap.tables.ranges import InRanges
from speedswap.tables.record import MAX_DIMS, ROUNDINGS, STORED_DTYPES, Column, RecordLayout, is_column_name

__all__ = ["MANIFEST", "Manifest", "ManifestFile", "SegmentEntry", "require_size"]

FORMAT = "speedswap-table"
# 2: columns may be stored in another dtype than their own. 3: keys may be mapped to rows. A table is written as the
# least that it needs.
VERSIONS = (1, 2, 3)
MANIFEST = "MANIFEST"
_MAX_BYTES = 1 << 20
_CHECKSUM_BYTES = 9
_MAX_ROWS, _MAX_STRIDE, _MAX_ITEMS, _MAX_FILE_BYTES = 2**62, 2**40, 2**32, 2**63 - 1
_FILE_NAME = re.compile(r"data-[0-9]{1,9}\.bin")
_KEYS_NAME = re.compile(r"keys-[0-9]{1,9}\.bin")
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
    """The description of a table in its directory."""

    name: str
    num_embeddings: int
    seed: int
    written: bool  # whether rows may differ from their initial values
    attributes: dict[str, Any]  # plain data kept with the table
    segments: tuple[SegmentEntry, ...]
    writes: int = 0  # number of scatters so far, which stochastic rounding depends on
    id_maps: dict[str, str] = field(default_factory=dict)  # files of the maps from keys to rows, by name

    @property
    def columns(self) -> dict[str, Column]:
        return {column.name: column for segment in self.segments for column in segment.layout.columns}

    def encode(self) -> bytes:
        """Return the manifest as JSON, as it stands in its file after the checksum.

        Raises:
            TypeError, ValueError: the attributes are not plain data, or too much of it.
        """
        compact = any(column.compact for segment in self.segments for column in segment.layout.columns)
        version = 3 if self.id_maps else 2 if compact else 1
        body = json.dumps(
            {
                "format": FORMAT,
                "version": version,
                "name": self.name,
                "num_embeddings": self.num_embeddings,
                "seed": self.seed,
                "written": self.written,
                **({"writes": self.writes} if version >= 2 else {}),
                **({"id_maps": self.id_maps} if version >= 3 else {}),
                "attributes": self.attributes,
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
                    for segment in self.segments
                ],
            }
        ).encode()
        if len(body) > _MAX_BYTES - _CHECKSUM_BYTES:
            raise ValueError(
                f"the attributes and columns of table {self.name!r} take {len(body)} bytes as JSON, but its {MANIFEST} "
                f"holds {_MAX_BYTES - _CHECKSUM_BYTES}; keep large attributes elsewhere"
            )
        return body


class ManifestFile(NamedTuple):
    """A MANIFEST as it was read or written; it stays open, so that no other file can get its inode number.

    Attributes:
        file: the open file.
        body: its content after the checksum.
        seen: its identity then.
    """

    file: OpenFile
    body: bytes
    seen: tuple[int, ...]

    @classmethod
    def load(cls, directory: OpenDirectory) -> tuple[ManifestFile, Manifest]:
        """Open and parse a directory's MANIFEST; the data files are not looked at.

        Raises:
            TableFormatError: it is missing or damaged.
        """
        try:
            file = OpenFile(directory.open(MANIFEST))
            with open(file.fd, "rb", closefd=False) as reader:
                raw = reader.read(_MAX_BYTES + 1)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            remedy = ""
            if isinstance(error, FileNotFoundError) and "LOCK" in directory.names():
                remedy = "; it was never finished, or lost it: restore the file from a copy, or remove the directory"
            raise TableFormatError(
                f"{directory.path} is not a table: its {MANIFEST} cannot be read ({error.strerror}){remedy}"
            ) from error
        body = raw.partition(b"\n")[2]
        return cls(file, body, identity(os.fstat(file.fd))), _parse(directory.path, raw)

    @classmethod
    def write(cls, directory: OpenDirectory, body: bytes) -> ManifestFile:
        """Replace a directory's MANIFEST: write another beside it, sync, rename it over the old one, sync the names."""
        temporary = f"{MANIFEST}.{secrets.token_hex(8)}.tmp"
        file = OpenFile(directory.create(temporary))
        try:
            rest = memoryview(b"%08x\n" % zlib.crc32(body) + body)
            while rest:
                rest = rest[os.write(file.fd, rest) :]
            os.fsync(file.fd)
            directory.rename(temporary, MANIFEST)
        except BaseException:
            directory.remove(temporary)
            raise
        directory.sync()
        return cls(file, body, identity(os.fstat(file.fd)))


def _stored_as(column: Column) -> dict[str, str]:
    return {"stored": str(column.stored).removeprefix("torch."), "rounding": column.rounding}


def _parse(directory: Path, raw: bytes) -> Manifest:
    """Check a manifest as it stands in its file.

    Raises:
        TableFormatError: it is damaged.
    """
    try:
        return _checked(raw)
    except _Damage as error:
        problem = str(error)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise TableFormatError(f"the {MANIFEST} of {directory} is damaged: {problem}")


def _checked(raw: bytes) -> Manifest:
    _require(len(raw) <= _MAX_BYTES, f"it is longer than {_MAX_BYTES} bytes")
    checksum, newline, body = raw.partition(b"\n")
    _require(newline == b"\n" and checksum == b"%08x" % zlib.crc32(body), "its checksum does not match")
    data = json.loads(body)
    _require(isinstance(data, dict) and data.get("format") == FORMAT, "it does not describe a table")
    version = data["version"]
    _require(
        _is_int(version, min(VERSIONS), max(VERSIONS)),
        f"its version is {version!r}; this speedswap reads {', '.join(map(str, VERSIONS))}",
    )
    num_embeddings, seed, name = data["num_embeddings"], data["seed"], data["name"]
    _require(_is_int(num_embeddings, 1, _MAX_ROWS), f"num_embeddings is {num_embeddings!r}")
    _require(_is_int(seed, 0, 2**64 - 1), f"seed is {seed!r}")
    _require(isinstance(name, str) and isinstance(data["written"], bool), "name or written has a wrong type")
    writes = data["writes"] if version >= 2 else 0
    _require(_is_int(writes, 0, 2**62), f"writes is {writes!r}")
    attributes = data["attributes"]
    _require(isinstance(attributes, dict), "its attributes are not an object")
    _require(isinstance(data["segments"], list), "its segments are not a list")
    segments = tuple(_parse_segment(entry, num_embeddings) for entry in data["segments"])
    files = [segment.file for segment in segments]
    _require(len(files) == len(set(files)), f"its data files are {files}")
    columns = [column for segment in segments for column in segment.layout.columns]
    names = [column.name for column in columns]
    _require("weight" in names and len(names) == len(set(names)), f"its columns are {names}")
    for column in columns:
        source = column.init.column if isinstance(column.init, init.CopyOf) else None
        _require(
            source is None or any(c.name == source != column.name and c.row_shape == column.row_shape for c in columns),
            f"column {column.name!r} starts as a copy of {source!r}",
        )
    # Initial values that cannot be computed again must stay in the file.
    initial = [column["init"] for segment in data["segments"] for column in segment["columns"]]
    written = data["written"] or any(init.from_json(item) is None for item in initial)
    id_maps = data["id_maps"] if version >= 3 else {}
    _require(isinstance(id_maps, dict) and all(map(_is_keys_name, id_maps.values())), f"its id maps are {id_maps!r}")
    _require(len(id_maps) == len(set(id_maps.values())), f"its id maps are {id_maps!r}")
    return Manifest(name, num_embeddings, seed, written, attributes, segments, writes, id_maps)


def _is_keys_name(file: object) -> bool:
    return isinstance(file, str) and _KEYS_NAME.fullmatch(file) is not None


def _parse_segment(entry: dict[str, Any], num_embeddings: int) -> SegmentEntry:
    file, stride = entry["file"], entry["stride"]
    _require(isinstance(file, str) and _FILE_NAME.fullmatch(file) is not None, f"a data file is {file!r}")
    _require(_is_int(stride, 1, _MAX_STRIDE), f"a record's stride is {stride!r}")
    _require(num_embeddings * stride <= _MAX_FILE_BYTES, f"{num_embeddings} × {stride} bytes are no file")
    _require(isinstance(entry["columns"], list), f"the columns of {file} are not a list")
    columns, offsets, end = [], [], 0
    for item in entry["columns"]:
        column, offset = _parse_column(item, num_embeddings)
        _require(_is_int(offset, end, stride), f"column {column.name!r} overlaps another")
        end = offset + column.row_bytes
        _require(end <= stride, f"column {column.name!r} does not fit its record")
        _require(
            offset % column.item_bytes == 0 and stride % column.item_bytes == 0,
            f"column {column.name!r} is not aligned to its items",
        )
        columns.append(column)
        offsets.append(offset)
    _require(bool(columns), f"{file} has no columns")
    return SegmentEntry(file, RecordLayout(tuple(columns), tuple(offsets), stride))


def _parse_column(item: dict[str, Any], num_embeddings: int) -> tuple[Column, int]:
    name, shape, dtype, zero_row = item["name"], item["row_shape"], item["dtype"], item["zero_row"]
    _require(is_column_name(name), f"a column is {name!r}")
    _require(
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(_is_int(size, 1, _MAX_ITEMS) for size in shape)
        and math.prod(shape) <= _MAX_STRIDE,
        f"the rows of column {name!r} have shape {shape!r}",
    )
    _require(dtype in _DTYPES, f"column {name!r} has dtype {dtype!r}")
    _require(zero_row is None or _is_int(zero_row, 0, num_embeddings - 1), f"column {name!r} has zero_row {zero_row!r}")
    initial = init.from_json(item["init"]) or init.Unknown(json.dumps(item["init"]))
    _require(
        not isinstance(initial, InRanges) or initial.num_rows == num_embeddings,
        f"the ranges of column {name!r} are not its {num_embeddings} rows",
    )
    stored, rounding = item.get("stored"), item.get("rounding", "nearest")
    _require(stored is None or stored in _STORED, f"column {name!r} is stored as {stored!r}")
    _require(rounding in ROUNDINGS, f"column {name!r} has rounding {rounding!r}")
    held = None if stored is None else _STORED[stored]
    return Column(name, tuple(shape), _DTYPES[dtype], initial, zero_row, held, rounding), item["offset"]


def require_size(num_embeddings: int, columns: Sequence[Column]) -> None:
    """Raise TableTooLargeError if a manifest could not describe so many rows of these columns, or no file hold them."""
    stride = RecordLayout.of(columns).stride
    if (
        num_embeddings > _MAX_ROWS
        or stride > _MAX_STRIDE
        or num_embeddings * stride > _MAX_FILE_BYTES
        or any(size > _MAX_ITEMS for column in columns for size in column.row_shape)
    ):
        names = ", ".join(column.name for column in columns)
        raise TableTooLargeError(
            f"num_embeddings is {num_embeddings}, and a row of {names} takes {stride} bytes; "
            f"a table has at most {_MAX_ROWS} rows, of {_MAX_STRIDE} bytes with {_MAX_ITEMS} items in a dimension, and "
            f"{_MAX_FILE_BYTES} bytes in all: use fewer or narrower rows"
        )


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


class _Damage(Exception):
    """A problem of a manifest."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _Damage(problem)
