"""The description of a table in files, and MANIFEST, never trusted, which holds it: for a log, or for shards of ranks.

A log's table has a record layout, and earlier ones: adding one rewrites no row. A record of an earlier layout is
converted to the newest when it is read: columns whose values are still valid are copied to their new offsets, and the
others get their initial values.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from speedswap.errors import TableFormatError, TableTooLargeError
from speedswap.tables.files.damage import ints, is_int, ranges_of, require, require_version, says_damaged
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, OpenFile, identity, write_all
from speedswap.tables.init import Bases, CopyOf, InRanges, Unknown, found_in, from_json, saved_in
from speedswap.tables.record import ROUNDINGS, STORED_DTYPES, Column, Origin, RecordLayout, is_column_name

FORMAT, VERSION = "speedswap-table", 1
MANIFEST = "MANIFEST"
MAX_BYTES = (1 << 20) - 9  # without the checksum
_MAX_ROWS, _MAX_STRIDE, _MAX_ITEMS, _MAX_FILE_BYTES = 2**62, 2**40, 2**32, 2**63 - 1
_KEYS_NAME = re.compile(r"keys-[0-9]{1,9}\.bin")
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_STORED: dict[str | None, torch.dtype] = {str(each).removeprefix("torch."): each for each in STORED_DTYPES}
_ANY_64_BITS = 0, 2**64 - 1


def column_json(column: Column) -> dict[str, Any]:
    """Return a column as plain data."""
    stored = {"stored": str(column.stored).removeprefix("torch."), "rounding": column.rounding}
    return {
        "name": column.name,
        "row_shape": list(column.row_shape),
        "dtype": str(column.dtype).removeprefix("torch."),
        "init": column.init.to_json(),
        "zero_row": column.zero_row,
        **(stored if column.compact else {}),
    }


def _parse_table(data: dict[str, Any]) -> tuple[str, int, int]:
    """Check the arguments that a table was created with, and return them: name, rows and seed."""
    num_embeddings, seed = ints(data, num_embeddings=(1, _MAX_ROWS), seed=_ANY_64_BITS)
    require(isinstance(data["name"], str), "name has a wrong type")
    return data["name"], num_embeddings, seed


def is_keys_name(file: object) -> bool:
    """Return whether a name can be that of a file of id maps."""
    return isinstance(file, str) and _KEYS_NAME.fullmatch(file) is not None


def parse_column(item: dict[str, Any], num_embeddings: int) -> Column:
    """Check a column given as plain data, and return it."""
    name, shape, zero_row = item["name"], item["row_shape"], item["zero_row"]
    require(is_column_name(name), f"a column is {name!r}")
    is_shape = isinstance(shape, list) and all(is_int(size, 1, _MAX_ITEMS) for size in shape)
    require(is_shape and math.prod(shape) <= _MAX_STRIDE, f"the rows of column {name!r} have shape {shape!r}")
    dtype, stored, rounding = item["dtype"], item.get("stored"), item.get("rounding", "nearest")
    require(dtype in _DTYPES, f"column {name!r} has dtype {dtype!r}")
    require(stored is None or stored in _STORED, f"column {name!r} is stored as {stored!r}")
    require(rounding in ROUNDINGS, f"column {name!r} has rounding {rounding!r}")
    require(zero_row is None or is_int(zero_row, 0, num_embeddings - 1), f"column {name!r} has zero_row {zero_row!r}")
    initial = from_json(item["init"]) or Unknown(json.dumps(item["init"]))
    fits = not isinstance(initial, InRanges) or initial.num_rows == num_embeddings
    require(fits, f"the ranges of column {name!r} are not its {num_embeddings} rows")
    return Column(name, tuple(shape), _DTYPES[dtype], initial, zero_row, _STORED.get(stored), rounding)


def require_size(num_embeddings: int, columns: Sequence[Column]) -> None:
    """Raise TableTooLargeError if the table's size does not fit in a manifest, or in a file."""
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


_GROUP_BYTES = 256

Move = tuple[int, int, int]
"""Bytes of a group that stay: where they were, where they are to be, and their number."""


@dataclass(frozen=True)
class HeldColumn:
    """A column within a layout.

    Attributes:
        column: the column as it was created.
        offset: its offset in a record, in bytes.
        birth: the number of the layout since which its values are valid; those of earlier records are not.
        origin: the origin of untouched rows' values, as of the layout's creation, even if ``init`` changed since.
        source: the column that it started as a copy of, if it did.
    """

    column: Column
    offset: int
    birth: int
    origin: Origin
    source: str | None = None


@dataclass(frozen=True)
class LogLayout:
    """The records of one layout.

    Attributes:
        number: its number, which chunks of the log name.
        stride: bytes from a record to the next.
        held: the columns, in record order.
    """

    number: int
    stride: int
    held: tuple[HeldColumn, ...]

    @classmethod
    def of(cls, columns: Sequence[Column], origins: Mapping[str, Origin] | None = None) -> LogLayout:
        """Return the first layout of a table that has no rows on disk.

        Args:
            columns: the table's columns.
            origins: the origins of their values; by default no column was reset after it was copied.
        """
        layout = added(None, columns)
        if origins is None:
            return layout
        held = [replace(each, source=None, origin=origins[each.column.name]) for each in layout.held]
        return replace(layout, held=tuple(held))

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name."""
        return {each.column.name: each.column for each in self.held}

    @cached_property
    def by_name(self) -> dict[str, HeldColumn]:
        """The columns as held in this layout, by name."""
        return {each.column.name: each for each in self.held}


def least_group(num_embeddings: int, stride: int) -> int:
    """Return the number of neighbouring rows that are stored as a group.

    It is 1 for records of 256 bytes and more, unless the table has more rows than the log can count.
    """
    rows = 1
    while rows * stride < _GROUP_BYTES or -(-num_embeddings // rows) > _MAX_GROUPS:
        rows *= 2
    return rows


def added(layout: LogLayout | None, columns: Sequence[Column], *, has_rows: bool = True) -> LogLayout:
    """Return the next layout, with more columns; the first one if there is none, or no row was written."""
    held = () if layout is None else layout.held if has_rows else collapsed(layout).held
    number = layout.number + 1 if layout is not None and has_rows else 0
    known = {each.column.name: each for each in held}
    for column in columns:
        known[column.name] = _born(HeldColumn(column, 0, number, Origin(column)), column, known)
    records = RecordLayout.of([each.column for each in known.values()])
    placed = tuple(replace(each, offset=offset) for each, offset in zip(known.values(), records.offsets, strict=True))
    return LogLayout(number, records.stride, placed)


def reset(layout: LogLayout, columns: Sequence[Column]) -> LogLayout:
    """Return a layout's successor, in which some columns have initial values in every row.

    Args:
        layout: the newest.
        columns: names and initial values; everything else is taken from the layout's columns.
    """
    known, number = dict(layout.by_name), layout.number + 1
    for column in columns:
        own = known[column.name]
        start = replace(own.column, init=column.init, zero_row=column.zero_row)
        known[column.name] = _born(replace(own, birth=number), start, known)
    return LogLayout(number, layout.stride, tuple(known.values()))


def collapsed(layout: LogLayout) -> LogLayout:
    """Return the layout of a copy, which has no records in earlier layouts."""
    held = tuple(replace(each, birth=0, source=None) for each in layout.held)
    return LogLayout(0, layout.stride, held)


def _born(held: HeldColumn, start: Column, known: Mapping[str, HeldColumn]) -> HeldColumn:
    """Return a column that starts with these initial values in every row."""
    source = start.init.column if isinstance(start.init, CopyOf) else None
    return replace(held, source=source, origin=Origin.of(start, {name: each.origin for name, each in known.items()}))


def moves(old: LogLayout, newest: LogLayout, group_rows: int) -> list[Move]:
    """Return which bytes of a group in an earlier layout are valid in the newest one."""
    before = old.by_name
    return [
        (row * old.stride + before[name].offset, row * newest.stride + each.offset, each.column.row_bytes)
        for row in range(group_rows)
        for name, each in newest.by_name.items()
        if each.birth <= old.number
    ]


_MAX_GROUP_ROWS, _MAX_SEGMENT_BYTES = 2**32, 2**30
_SEGMENT_BYTES = 2**16, 2**22  # the minimum, and the maximum unless rows are wide
_MAX_LAYOUTS, _MAX_LOGS = 255, 10**9
_SEGMENTS, _GROUPS_PER_SEGMENT, _LEAST_GROUPS, _MAX_GROUPS = 64, 64, 8, 2**32 - 1


@dataclass(frozen=True)
class LogManifest:
    """The description of a table in its directory.

    Attributes:
        name: the table's.
        num_embeddings: rows.
        seed: of the initial values.
        group_rows: neighbouring rows stored as a group.
        segment_bytes: bytes per segment of the log.
        salt: random bits that identify the table's chunks and heads.
        layouts: record layouts, oldest first.
        scratch: True if the table vanishes with the process that created it.
        log: the number of its log's files, which increases when all rows are rewritten.
    """

    name: str
    num_embeddings: int
    seed: int
    group_rows: int
    segment_bytes: int
    salt: int
    layouts: tuple[LogLayout, ...]
    scratch: bool = False
    log: int = 0

    @classmethod
    def of(cls, name: str, num_embeddings: int, seed: int, layout: LogLayout, *, scratch: bool = False) -> LogManifest:
        """Return the manifest of a new table.

        Raises:
            TableTooLargeError: it has too many rows, or rows are too long.
        """
        return cls(name, num_embeddings, seed, 1, 0, secrets.randbits(64), (), scratch).with_layout(layout)

    def with_layout(self, layout: LogLayout) -> LogManifest:
        """Return the manifest with a new layout; number 0 is for a table without rows on disk.

        Raises:
            TableTooLargeError: the log cannot hold rows this long, or this many.
        """
        require_size(self.num_embeddings, list(layout.columns.values()))
        if layout.number:
            manifest = replace(self, layouts=(*self.layouts, layout))
        else:
            rows = least_group(self.num_embeddings, layout.stride)
            # A log keeps a few segments free, and moves the groups of one segment at a time.
            least = max(_SEGMENT_BYTES[0], rows * layout.stride * _GROUPS_PER_SEGMENT)
            wanted = max(least, min(self.num_embeddings * layout.stride // _SEGMENTS, _SEGMENT_BYTES[1]))
            segment_bytes = 1 << (wanted - 1).bit_length()
            manifest = replace(self, layouts=(layout,), group_rows=rows, segment_bytes=segment_bytes)
        most = manifest.segment_bytes // _LEAST_GROUPS
        if manifest.group_rows * layout.stride > most or manifest.segment_bytes > _MAX_SEGMENT_BYTES:
            raise TableTooLargeError(
                f"table {self.name!r} has {self.num_embeddings} rows, which would be of {layout.stride} bytes; its log "
                f"holds {manifest.group_rows} as one, of at most {most} bytes: use fewer or narrower rows"
            )
        return manifest

    def succeeded_by(self, layout: LogLayout, directory: Path) -> LogManifest | None:
        """Return the manifest with a new layout in a directory; None if that requires rewriting the rows."""
        if self.scratch or len(self.layouts) == _MAX_LAYOUTS:
            return None
        try:
            manifest = self.with_layout(layout)
            manifest.encode(directory)
        except (TableTooLargeError, ValueError):
            return None
        return manifest

    def renewed(self, layout: LogLayout) -> LogManifest:
        """Return the manifest of a new log whose rows are all in this layout.

        Raises:
            TableTooLargeError: no log can hold rows this long, or this many.
        """
        made = LogManifest.of(self.name, self.num_embeddings, self.seed, collapsed(layout), scratch=self.scratch)
        return replace(made, log=self.log + 1)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of the newest layout, by name."""
        return self.layouts[-1].columns

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return -(-self.num_embeddings // self.group_rows)

    def rows_of(self, groups: NDArray[Any]) -> list[range]:
        """Return the rows of ascending groups."""
        size, most = self.group_rows, self.num_embeddings
        return [range(run.start * size, min(run.stop * size, most)) for run in ranges_of(groups)]

    def as_of(self, layout: int) -> LogManifest:
        """Return the manifest as of a commit in the layout of this number.

        Raises:
            TableFormatError: no layout has this number.
        """
        until = [each.number for each in self.layouts]
        if layout not in until:
            raise TableFormatError(f"the HEAD of table {self.name!r} is damaged: it names layout {layout} of {until}")
        return replace(self, layouts=self.layouts[: until.index(layout) + 1])

    def encode(self, directory: Path) -> bytes:
        """Return the manifest as JSON, as it stands in its file in a directory, after the checksum.

        Raises:
            ValueError: it is too long.
        """
        columns: dict[str, int] = {}

        def index(column: Column) -> int:
            return columns.setdefault(json.dumps(column_json(column)), len(columns))

        def held(each: HeldColumn) -> list[Any]:
            start, through = each.origin
            own = [index(each.column), each.offset, each.birth, index(start), each.source]
            return [*own, [index(column) for column in through]]

        layouts = [
            {"number": each.number, "stride": each.stride, "held": [held(column) for column in each.held]}
            for each in self.layouts
        ]
        named = ("name", "num_embeddings", "seed", "group_rows", "segment_bytes", "salt", "scratch")
        data = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in named},
            **({"log": self.log} if self.log else {}),
            "columns": [json.loads(column, object_hook=partial(saved_in, directory)) for column in columns],
            "layouts": layouts,
        }
        body = json.dumps(data).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(
                f"the columns of table {self.name!r} take {len(body)} bytes as JSON, but its {MANIFEST} holds "
                f"{MAX_BYTES}; copy the table with Table.save, which forgets earlier layouts"
            )
        return body


def parse_log_manifest(data: dict[str, Any]) -> LogManifest:
    """Parse and check the manifest of a table in a log.

    Raises:
        Damage, ValueError, TypeError, KeyError: it is damaged.
    """
    name, num_embeddings, seed = _parse_table(data)
    rows, segment, salt, log = ints(
        {"log": 0} | data,
        group_rows=(1, _MAX_GROUP_ROWS),
        segment_bytes=(_SEGMENT_BYTES[0], _MAX_SEGMENT_BYTES),
        salt=_ANY_64_BITS,
        log=(0, _MAX_LOGS),
    )
    for what, size in (("group_rows", rows), ("segment_bytes", segment)):
        require(size & (size - 1) == 0, f"{what} is {size}")
    require(-(-num_embeddings // rows) <= _MAX_GROUPS, f"{num_embeddings} rows in groups of {rows} are too many")
    scratch = data["scratch"]
    require(isinstance(scratch, bool), f"scratch is {scratch!r}")
    require(isinstance(data["columns"], list) and isinstance(data["layouts"], list), "its columns are not a list")
    columns = [parse_column(item, num_embeddings) for item in data["columns"]]
    layouts = tuple(_parse_layout(item, columns) for item in data["layouts"])
    require(bool(layouts), "it has no layout")
    # Otherwise a small file could name a row in each page of the index.
    require(rows * layouts[0].stride >= _GROUP_BYTES, f"{rows} rows are stored as one")
    for number, layout in enumerate(layouts):
        require(layout.number == number, f"its layouts have the numbers {[each.number for each in layouts]}")
        require(rows * layout.stride * _LEAST_GROUPS <= segment, f"a record's stride is {layout.stride}")
        if number:
            before = layouts[number - 1].columns
            require(before.keys() <= layout.columns.keys(), f"layout {number} lacks columns of the one before")
    require("weight" in layouts[0].columns, "its first layout has no weight")
    return LogManifest(name, num_embeddings, seed, rows, segment, salt, layouts, scratch, log)


def _parse_layout(item: dict[str, Any], columns: list[Column]) -> LogLayout:
    number, stride = ints(item, number=(0, 2**31), stride=(1, _MAX_STRIDE))
    held, end = list[HeldColumn](), 0
    for own, offset, birth, start, source, passed in item["held"]:
        for index in (own, start, *passed):
            require(is_int(index, 0, len(columns) - 1), f"a column is {index!r}")
        require(is_int(birth, 0, number), f"a column of layout {number} is of {birth!r}")
        column, first, through = columns[own], columns[start], tuple(columns[index] for index in passed)
        what = f"column {column.name!r}"
        is_alike = all(each.row_shape == column.row_shape for each in (first, *through))
        require(is_alike, f"{what} starts as {first.name!r}")
        is_own = (first, *through)[-1].name == column.name and bool(through) >= (source is not None)
        require(is_own, f"{what} is a copy of none")
        require(not isinstance(first.init, CopyOf), f"{what} starts as a copy of a copy")
        require(is_int(offset, end, stride - column.row_bytes), f"{what} overlaps another, or does not fit its record")
        is_aligned = offset % column.item_bytes == 0 and stride % column.item_bytes == 0
        require(is_aligned, f"{what} is not aligned to its items")
        end = offset + column.row_bytes
        held.append(HeldColumn(column, offset, birth, Origin(first, through), source))
    inits = {each.column.name: each.column.init for each in held}
    require(0 < len(inits) == len(held), f"the columns of a record are {[each.column.name for each in held]}")
    for each in held:
        name, init, seen = each.column.name, each.column.init, {each.column.name}
        require(each.source is None or each.source in inits.keys() - seen, f"a column is of {each.source!r}")
        while isinstance(init, CopyOf):
            require(init.column in inits.keys() - seen, f"column {name!r} starts as a copy of {init.column!r}")
            seen.add(init.column)
            init = inits[init.column]
    return LogLayout(number, stride, tuple(held))


SHARD = re.compile(r"shard-[0-9]{1,7}-of-[0-9]{1,7}")
_MOST_SHARDS = 2**14
_CHECKSUM_BYTES = 9


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's subdirectory in the table's directory."""
    return f"shard-{rank}-of-{world_size}"


def part_of_ranks(weight: Column) -> str | None:
    """Return whose rows a table holds if it is one rank's part of another; None for a whole table.

    Args:
        weight: the table's weight column.
    """
    found = weight.init.to_json()
    if found["kind"] != "owned":
        return None
    return f"rank {found['rank']}'s part of {found['num_embeddings']:,} rows that {found['world_size']} ranks own"


def remedy_for_part(path: Path | None) -> str:
    """Return the advice to open the whole table instead of a rank's part, whose rows are not in id order.

    Args:
        path: the part's path.
    """
    whole = "" if path is None else f", {path.parent},"
    return f"open the directory{whole} in which all ranks' parts lie; or load the checkpoint, if they are one's"


@dataclass(frozen=True)
class ShardsManifest:
    """The description of a table in its directory.

    Attributes:
        name: the table's.
        num_embeddings: number of rows over all ranks.
        seed: of the initial values.
        weight: the weight column, with the whole table's initial values.
        salts: salts of the ranks' tables, in rank order, which identify them.
    """

    name: str
    num_embeddings: int
    seed: int
    weight: Column
    salts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.salts)

    def encode(self, directory: Path) -> bytes:
        """Return the manifest as JSON, as it stands in its file in a directory, after the checksum."""
        weight = json.dumps(column_json(self.weight))
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "name": self.name,
                "num_embeddings": self.num_embeddings,
                "seed": self.seed,
                "weight": json.loads(weight, object_hook=partial(saved_in, directory)),
                "shards": self.salts,
            }
        ).encode()


def parse_shards_manifest(data: dict[str, Any]) -> ShardsManifest:
    """Parse and check the manifest of a table owned by ranks.

    Raises:
        Damage, ValueError, TypeError, KeyError: it is damaged.
    """
    name, num_embeddings, seed = _parse_table(data)
    salts = data["shards"]
    require(isinstance(salts, list) and 1 <= len(salts) <= _MOST_SHARDS, "it has no shards")
    require(all(is_int(salt, *_ANY_64_BITS) for salt in salts), f"its shards are {salts!r}")
    weight = parse_column(data["weight"], num_embeddings)
    require(weight.name == "weight", f"its first column is {weight.name!r}")
    return ShardsManifest(name, num_embeddings, seed, weight, tuple(salts))


def require_shared(directory: Path, path: Path) -> Path:
    """Open a directory that the first rank has created.

    Raises:
        FileNotFoundError: this rank does not see it.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"path is {str(path)!r}, where this rank does not find what the first rank has made; give all ranks a path "
            "on a file system that they share"
        )
    return directory


AnyManifest = LogManifest | ShardsManifest


class ManifestFile(NamedTuple):
    """A MANIFEST that was read or written; it stays open, so that no other file can get its inode number.

    Attributes:
        file: the open file.
        body: its content after the checksum.
        seen: its identity at that time.
    """

    file: OpenFile
    body: bytes
    seen: tuple[int, ...]

    @classmethod
    def load(cls, directory: OpenDirectory, base: Bases | None = None) -> tuple[ManifestFile, AnyManifest]:
        """Open and parse a directory's MANIFEST, without looking at the data files.

        Args:
            directory: the table's.
            base: where its bases are now, if they were moved.

        Raises:
            TableFormatError: it is missing or damaged.
        """
        try:
            file = OpenFile(directory.open(MANIFEST))
            with open(file.fd, "rb", closefd=False) as reader:
                raw = reader.read(MAX_BYTES + _CHECKSUM_BYTES + 1)
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
        return cls(file, body, identity(os.fstat(file.fd))), parse(directory.path, raw, base)

    @classmethod
    def write(cls, directory: OpenDirectory, body: bytes) -> ManifestFile:
        """Replace a directory's MANIFEST: write and sync a new file, rename it over the old one, sync the directory."""
        temporary = f"{MANIFEST}.{secrets.token_hex(8)}.tmp"
        written = OpenFile(directory.create(temporary))
        try:
            write_all(written.fd, b"%08x\n" % zlib.crc32(body) + body, 0)
            os.fsync(written.fd)
            file = OpenFile(directory.open(temporary))  # read-only: the file system may be remounted so in the meantime
            written.close()
            directory.rename(temporary, MANIFEST)
        except BaseException:
            directory.remove(temporary)
            raise
        directory.sync()
        return cls(file, body, identity(os.fstat(file.fd)))


def parse(directory: Path, raw: bytes, base: Bases | None = None) -> AnyManifest:
    """Parse and check a manifest as stored in its file; arguments as for :meth:`ManifestFile.load`.

    Raises:
        TableFormatError: it is damaged, or of a newer format.
    """
    with says_damaged(f"the {MANIFEST} of {directory}"):
        require(len(raw) <= MAX_BYTES + _CHECKSUM_BYTES, f"it is longer than {MAX_BYTES + _CHECKSUM_BYTES} bytes")
        checksum, newline, body = raw.partition(b"\n")
        require(newline == b"\n" and checksum == b"%08x" % zlib.crc32(body), "its checksum does not match")
        data = json.loads(body, object_hook=partial(found_in, directory.absolute(), base))
        require(isinstance(data, dict) and data.get("format") == FORMAT, "it does not describe a table")
        require_version(f"the {MANIFEST} of {directory}", data["version"], VERSION)
        manifest: AnyManifest = parse_shards_manifest(data) if "shards" in data else parse_log_manifest(data)
    return manifest
