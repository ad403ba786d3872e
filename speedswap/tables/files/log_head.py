"""Heads of commits of tables in a log: what changes with every commit, beside the rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.manifest import MAX_BYTES, is_keys_name, require_id_maps

__all__ = ["HEAD_BYTES", "KeyFiles", "LogHead", "names_of"]

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
    def elsewhere(file: str) -> bytes:
        """Return what stands for a head that is in a file."""
        return json.dumps({"file": file}).encode()

    @staticmethod
    def file_of(body: bytes, table: str) -> str | None:
        """Return the file that a head is in; None if it is here."""
        if not body.startswith(b'{"file": '):
            return None
        with says_damaged(f"the HEAD of table {table!r}"):
            files = json.loads(body)
            require_id_maps(files)
        return str(files["file"])

    @classmethod
    def parse(cls, body: bytes, table: str) -> LogHead:
        """Check a head, as the log has it.

        Raises:
            TableFormatError: it is damaged.
        """
        with says_damaged(f"the HEAD of table {table!r}"):
            data = json.loads(body)
            require(isinstance(data, dict) and isinstance(data["attributes"], dict), "it has no attributes")
            require(is_int(data["layout"], 0, 2**31), f"its layout is {data['layout']!r}")
            require(is_int(data["writes"], 0, 2**62), f"its writes are {data['writes']!r}")
            head = cls(data["layout"], data["writes"], data["attributes"], _id_maps(data["id_maps"]))
        return head
