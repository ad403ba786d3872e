"""Heads of commits of tables in a log: what changes with every commit, beside the rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.manifest import MAX_BYTES, is_keys_name

__all__ = ["HEAD_BYTES", "KeyFiles", "LogHead", "names_of", "read_head"]

HEAD_BYTES = 65_000  # of a commit's head, at most; more goes to a file that it names

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
