"""Descriptions of a table in a log: its manifest (format 4), and the head of each commit, which changes with it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from speedswap.errors import TableFormatError, TableTooLargeError
from speedswap.tables.disk.layout import GROUP_BYTES, HeldColumn, LogLayout, collapsed, least_group
from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.manifest import (
    FORMAT,
    MANIFEST,
    MAX_BYTES,
    column_json,
    is_keys_name,
    parse_column,
    require_record,
    require_size,
    require_table,
)
from speedswap.tables.init import CopyOf
from speedswap.tables.record import Column

__all__ = ["HEAD_BYTES", "KeyFiles", "LogHead", "LogManifest", "names_of", "parse_log_manifest", "read_head"]

HEAD_BYTES = 65_000  # of a commit's head, at most; more goes to a file that it names
_MAX_GROUP_ROWS, _MAX_SEGMENT_BYTES = 2**32, 2**30
_SEGMENT_BYTES = 2**16, 2**22  # the least, and the most for rows that are not wide
_MAX_LAYOUTS, _MAX_LOGS = 255, 10**9
_SEGMENTS, _GROUPS_PER_SEGMENT, _LEAST_GROUPS, _MAX_GROUPS = 64, 64, 8, 2**32 - 1


@dataclass(frozen=True)
class LogManifest:
    """The description of a table in its directory.

    Attributes:
        name: the table's.
        num_embeddings: rows.
        seed: of the initial values.
        group_rows: neighbouring rows that are stored as one.
        segment_bytes: of the log.
        salt: random bits by which the table's own chunks and heads are known.
        layouts: of records, the oldest first.
        scratch: whether the rows are gone with the process that made the table.
        log: the number of its log's files, which goes up when all rows are written anew.
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
    def of(
        cls, name: str, num_embeddings: int, seed: int, layout: LogLayout, salt: int, *, scratch: bool = False
    ) -> LogManifest:
        """Return the manifest of a new table.

        Raises:
            TableTooLargeError: it has too many rows, or too long ones.
        """
        return cls(name, num_embeddings, seed, 1, 0, salt, (), scratch).with_layout(layout)

    def with_layout(self, layout: LogLayout) -> LogManifest:
        """Return the table with one more layout, the newest; number 0 is for a table without rows on disk.

        Raises:
            TableTooLargeError: the log cannot hold such rows, or so many.
        """
        require_size(self.num_embeddings, list(layout.columns.values()))
        if layout.number:
            manifest = replace(self, layouts=(*self.layouts, layout))
        else:
            rows = least_group(self.num_embeddings, layout.stride)
            # A log keeps a few segments free, and moves the groups of one at a time.
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

    def succeeded_by(self, layout: LogLayout) -> LogManifest | None:
        """Return the table with one more layout; None if its rows have to be written anew for that."""
        if self.scratch or len(self.layouts) == _MAX_LAYOUTS:
            return None
        try:
            manifest = self.with_layout(layout)
            manifest.encode()
        except (TableTooLargeError, ValueError):
            return None
        return manifest

    def renewed(self, layout: LogLayout, salt: int) -> LogManifest:
        """Return the table in a log of its own, of rows in this layout alone.

        Raises:
            TableTooLargeError: no log can hold such rows, or so many.
        """
        made = LogManifest.of(self.name, self.num_embeddings, self.seed, collapsed(layout), salt, scratch=self.scratch)
        return replace(made, log=self.log + 1)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of the newest layout, by name."""
        return self.layouts[-1].columns

    @property
    def num_groups(self) -> int:
        """The groups of all rows."""
        return -(-self.num_embeddings // self.group_rows)

    def as_of(self, layout: int) -> LogManifest:
        """Return the table as of a commit in a layout of this number.

        Raises:
            TableFormatError: there is none.
        """
        until = [each.number for each in self.layouts]
        if layout not in until:
            raise TableFormatError(f"the HEAD of table {self.name!r} is damaged: it names layout {layout} of {until}")
        return replace(self, layouts=self.layouts[: until.index(layout) + 1])

    def encode(self) -> bytes:
        """Return the manifest as JSON, as it stands in its file after the checksum.

        Raises:
            ValueError: it is too long.
        """
        columns: dict[str, int] = {}

        def index(column: Column) -> int:
            return columns.setdefault(json.dumps(column_json(column)), len(columns))

        layouts = [
            {
                "number": layout.number,
                "stride": layout.stride,
                "held": [
                    [index(h.column), h.offset, h.birth, index(h.start), h.source, [index(each) for each in h.through]]
                    for h in layout.held
                ],
            }
            for layout in self.layouts
        ]
        data = {
            "format": FORMAT,
            "version": 4,
            "name": self.name,
            "num_embeddings": self.num_embeddings,
            "seed": self.seed,
            "group_rows": self.group_rows,
            "segment_bytes": self.segment_bytes,
            "salt": self.salt,
            "scratch": self.scratch,
            **({"log": self.log} if self.log else {}),
            "columns": [json.loads(column) for column in columns],
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
    """Check a manifest of version 4.

    Raises:
        Damage, ValueError, TypeError, KeyError: it is damaged.
    """
    num_embeddings, seed, name = data["num_embeddings"], data["seed"], data["name"]
    require_table(num_embeddings, seed, name)
    rows, segment, salt, scratch = data["group_rows"], data["segment_bytes"], data["salt"], data["scratch"]
    for what, number, least, most in (
        ("group_rows", rows, 1, _MAX_GROUP_ROWS),
        ("segment_bytes", segment, 2**16, _MAX_SEGMENT_BYTES),
    ):
        is_power = is_int(number, least, most) and number & (number - 1) == 0
        require(is_power, f"{what} is {number!r}")
    require(-(-num_embeddings // rows) <= _MAX_GROUPS, f"{num_embeddings} rows in groups of {rows} are too many")
    require(is_int(salt, 0, 2**64 - 1) and isinstance(scratch, bool), f"salt is {salt!r}, scratch is {scratch!r}")
    require(isinstance(data["columns"], list) and isinstance(data["layouts"], list), "its columns are not a list")
    columns = [parse_column(item, num_embeddings) for item in data["columns"]]
    layouts = tuple(_parse_layout(item, columns) for item in data["layouts"])
    require(bool(layouts), "it has no layout")
    # Else a small file could name a row for each page of the index.
    require(rows * layouts[0].stride >= GROUP_BYTES, f"{rows} rows are stored as one")
    for number, layout in enumerate(layouts):
        require(layout.number == number, f"its layouts have the numbers {[each.number for each in layouts]}")
        require(rows * layout.stride * _LEAST_GROUPS <= segment, f"a record's stride is {layout.stride}")
        if number:
            before = layouts[number - 1].columns
            require(before.keys() <= layout.columns.keys(), f"layout {number} lacks columns of the one before")
    require("weight" in layouts[0].columns, "its first layout has no weight")
    log = data.get("log", 0)
    require(is_int(log, 0, _MAX_LOGS), f"its log has number {log!r}")
    return LogManifest(name, num_embeddings, seed, rows, segment, salt, layouts, scratch, log)


def _parse_layout(item: dict[str, Any], columns: list[Column]) -> LogLayout:
    number, stride, held = item["number"], item["stride"], []
    require(is_int(number, 0, 2**31), f"a layout has number {number!r}")
    for own, offset, birth, start, source, *rest in item["held"]:
        passed = rest[0] if rest else []
        require(isinstance(passed, list), f"a column is copied through {passed!r}")
        for index in (own, start, *passed):
            require(is_int(index, 0, len(columns) - 1), f"a column is {index!r}")
        require(is_int(birth, 0, number), f"a column of layout {number} is of {birth!r}")
        column, first, through = columns[own], columns[start], tuple(columns[index] for index in passed)
        require(
            all(each.row_shape == column.row_shape for each in (first, *through)),
            f"column {column.name!r} starts as {first.name!r}",
        )
        if not rest and first.name != column.name:
            through = (column,)  # as before copies of copies were kept apart
        last, is_copy = (first, *through)[-1], bool(through)
        require(
            last.name == column.name and is_copy >= (source is not None), f"column {column.name!r} is a copy of none"
        )
        held.append(HeldColumn(column, offset, birth, first, source, through))
    require_record([each.column for each in held], [each.offset for each in held], stride)
    names = {each.column.name for each in held}
    for each in held:
        require(each.source is None or each.source in names - {each.column.name}, f"a column is of {each.source!r}")
        require(not isinstance(each.start.init, CopyOf), f"column {each.column.name!r} starts as a copy of a copy")
    inits = {each.column.name: each.column.init for each in held}
    for name, init in inits.items():
        seen = {name}
        while isinstance(init, CopyOf):
            require(init.column in names - seen, f"column {name!r} starts as a copy of {init.column!r}")
            seen.add(init.column)
            init = inits[init.column]
    return LogLayout(number, stride, tuple(held))


KeyFiles = tuple[tuple[str, int | None], ...]
"""The files of an id map, and the bytes of each that count; None for all of it, as earlier versions wrote them."""


def names_of(id_maps: dict[str, KeyFiles]) -> set[str]:
    """Return the names of the files of some id maps."""
    return {file for files in id_maps.values() for file, _ in files}


def _id_maps(found: object) -> dict[str, KeyFiles]:
    """Check the files of id maps."""
    problem = f"its id maps are {found!r}"
    require(isinstance(found, dict), problem)
    assert isinstance(found, dict)
    id_maps = {
        name: ((files, None),) if isinstance(files, str) else _key_files(files, problem)
        for name, files in found.items()
    }
    names = [file for files in id_maps.values() for file, _ in files]
    require(all(map(is_keys_name, names)) and len(names) == len(set(names)), problem)
    return id_maps


def _key_files(found: object, problem: str) -> KeyFiles:
    is_list = isinstance(found, list) and found and all(isinstance(each, list) and len(each) == 2 for each in found)
    require(bool(is_list), problem)
    assert isinstance(found, list)
    require(all(nbytes is None or is_int(nbytes, 1, 2**62) for _, nbytes in found), problem)
    return tuple((file, nbytes) for file, nbytes in found)


@dataclass(frozen=True)
class LogHead:
    """The part of a table that changes with every commit, beside its rows.

    Attributes:
        layout: the number of the newest layout.
        writes: the number of scatters so far.
        attributes: plain data kept with the rows.
        id_maps: files of the maps from keys to rows, by name.
    """

    layout: int
    writes: int
    attributes: dict[str, Any]
    id_maps: dict[str, KeyFiles]

    def encode(self, table: str) -> bytes:
        """Return the head as JSON.

        Raises:
            TypeError, ValueError: the attributes are not plain data, or too much of it.
        """
        body = json.dumps(vars(self)).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(
                f"the attributes and id maps of table {table!r} take {len(body)} bytes as JSON, but a commit holds "
                f"{MAX_BYTES}; keep large attributes elsewhere"
            )
        return body

    @staticmethod
    def elsewhere(file: str, body: bytes) -> bytes:
        """Return what stands for a head that is in a file."""
        return json.dumps({"file": file, "crc32": zlib.crc32(body)}).encode()

    @classmethod
    def parse(cls, body: bytes, table: str) -> LogHead:
        """Check a head, as the log has it.

        Raises:
            TableFormatError: it is damaged.
        """
        with says_damaged(f"the HEAD of table {table!r}"):
            require(len(body) <= MAX_BYTES, f"it has {len(body)} bytes")
            data = json.loads(body)
            require(isinstance(data, dict) and isinstance(data["attributes"], dict), "it has no attributes")
            require(is_int(data["layout"], 0, 2**31), f"its layout is {data['layout']!r}")
            require(is_int(data["writes"], 0, 2**62), f"its writes are {data['writes']!r}")
            head = cls(data["layout"], data["writes"], data["attributes"], _id_maps(data["id_maps"]))
        return head


def read_head(body: bytes, table: str, read: Callable[[str], bytes]) -> tuple[LogHead, set[str]]:
    """Return a commit's head, and the names of all files that the commit needs beside the log.

    Args:
        body: the head, as the log has it.
        table: its name, for messages.
        read: returns the content of a file of the table.

    Raises:
        TableFormatError: it is damaged.
    """
    names = set[str]()
    if body.startswith(b'{"file": '):
        with says_damaged(f"the HEAD of table {table!r}"):
            entry = json.loads(body)
            require(is_keys_name(entry["file"]), f"it is in {entry['file']!r}")
        body = read(entry["file"])
        with says_damaged(f"the HEAD of table {table!r}, {entry['file']},", "; restore it from a copy"):
            # Earlier versions wrote no checksum.
            require(entry.get("crc32", zlib.crc32(body)) == zlib.crc32(body), "its checksum is wrong")
        names.add(entry["file"])
    head = LogHead.parse(body, table)
    return head, names | names_of(head.id_maps)
