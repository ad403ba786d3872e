"""The file MANIFEST of a table's directory, never trusted; and manifests of tables that ranks own (format 5)."""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from speedswap.errors import TableFormatError
from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.log_manifest import LogManifest, parse_log_manifest
from speedswap.tables.files.manifest import FORMAT, MANIFEST, MAX_BYTES, column_json, parse_column, require_table
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, OpenFile, identity
from speedswap.tables.record import Column

__all__ = [
    "SHARD",
    "AnyManifest",
    "ManifestFile",
    "ShardsManifest",
    "parse",
    "parse_shards_manifest",
    "part_of_ranks",
    "remedy_for_part",
    "require_shared",
    "shard_name",
]

SHARD = re.compile(r"shard-[0-9]{1,7}-of-[0-9]{1,7}")
_MOST_SHARDS = 2**14
_CHECKSUM_BYTES = 9


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the directory with a rank's rows, in the table's."""
    return f"shard-{rank}-of-{world_size}"


def part_of_ranks(weight: Column) -> str | None:
    """Return whose rows a table has that is one of several ranks' part of another; None for a whole table.

    Args:
        weight: the table's.
    """
    found = weight.init.to_json()
    if found["kind"] != "owned":
        return None
    return f"rank {found['rank']}'s part of {found['num_embeddings']:,} rows that {found['world_size']} ranks own"


def remedy_for_part(path: Path | None) -> str:
    """Return what to open in place of a rank's part of a table, in whose rows ids are not in order.

    Args:
        path: of the part.
    """
    whole = "" if path is None else f", {path.parent},"
    return f"open the directory{whole} in which all ranks' parts lie; or load the checkpoint, if they are one's"


@dataclass(frozen=True)
class ShardsManifest:
    """The description of a table in its directory.

    Attributes:
        name: the table's.
        num_embeddings: rows of all ranks.
        seed: of the initial values.
        weight: the first column, with the initial values of the whole table.
        salts: of the ranks' own tables, in their order, by which these are known.
    """

    name: str
    num_embeddings: int
    seed: int
    weight: Column
    salts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The ranks."""
        return len(self.salts)

    @property
    def columns(self) -> dict[str, Column]:
        """The column that the table was made with, by name; the others are known to the ranks' own tables."""
        return {"weight": self.weight}

    def encode(self) -> bytes:
        """Return the manifest as JSON, as it stands in its file after the checksum."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": 5,
                "name": self.name,
                "num_embeddings": self.num_embeddings,
                "seed": self.seed,
                "weight": column_json(self.weight),
                "shards": self.salts,
            }
        ).encode()


def parse_shards_manifest(data: dict[str, Any]) -> ShardsManifest:
    """Check a manifest of version 5.

    Raises:
        Damage, ValueError, TypeError, KeyError: it is damaged.
    """
    num_embeddings, seed, name, salts = data["num_embeddings"], data["seed"], data["name"], data["shards"]
    require_table(num_embeddings, seed, name)
    require(isinstance(salts, list) and 1 <= len(salts) <= _MOST_SHARDS, "it has no shards")
    require(all(is_int(salt, 0, 2**64 - 1) for salt in salts), f"its shards are {salts!r}")
    weight = parse_column(data["weight"], num_embeddings)
    require(weight.name == "weight", f"its first column is {weight.name!r}")
    return ShardsManifest(name, num_embeddings, seed, weight, tuple(salts))


def require_shared(directory: Path, path: Path) -> Path:
    """Return a directory that the first rank has made.

    Raises:
        FileNotFoundError: it is not there for this rank.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"path is {str(path)!r}, where this rank does not find what the first rank has made; give all ranks a path "
            "on a file system that they share"
        )
    return directory


AnyManifest = LogManifest | ShardsManifest
_PARSERS: dict[int, Callable[[dict[str, Any]], AnyManifest]] = {4: parse_log_manifest, 5: parse_shards_manifest}


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
    def load(cls, directory: OpenDirectory) -> tuple[ManifestFile, AnyManifest]:
        """Open and parse a directory's MANIFEST; the data files are not looked at.

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
        return cls(file, body, identity(os.fstat(file.fd))), parse(directory.path, raw)

    @classmethod
    def write(cls, directory: OpenDirectory, body: bytes) -> ManifestFile:
        """Replace a directory's MANIFEST: write another beside it, sync, rename it over the old one, sync the names."""
        temporary = f"{MANIFEST}.{secrets.token_hex(8)}.tmp"
        written = OpenFile(directory.create(temporary))
        try:
            rest = memoryview(b"%08x\n" % zlib.crc32(body) + body)
            while rest:
                rest = rest[os.write(written.fd, rest) :]
            os.fsync(written.fd)
            file = OpenFile(directory.open(temporary))  # to be read: the file system may be made read-only meanwhile
            written.close()
            directory.rename(temporary, MANIFEST)
        except BaseException:
            directory.remove(temporary)
            raise
        directory.sync()
        return cls(file, body, identity(os.fstat(file.fd)))


def parse(directory: Path, raw: bytes) -> AnyManifest:
    """Check a manifest as it stands in its file.

    Raises:
        TableFormatError: it is damaged.
    """
    with says_damaged(f"the {MANIFEST} of {directory}"):
        manifest = _checked(raw)
    return manifest


def _checked(raw: bytes) -> AnyManifest:
    require(len(raw) <= MAX_BYTES + _CHECKSUM_BYTES, f"it is longer than {MAX_BYTES + _CHECKSUM_BYTES} bytes")
    checksum, newline, body = raw.partition(b"\n")
    require(newline == b"\n" and checksum == b"%08x" % zlib.crc32(body), "its checksum does not match")
    data = json.loads(body)
    require(isinstance(data, dict) and data.get("format") == FORMAT, "it does not describe a table")
    version = data["version"]
    require(
        is_int(version, min(_PARSERS), max(_PARSERS)),
        f"its version is {version!r}; this speedswap reads {' and '.join(map(str, _PARSERS))}",
    )
    return _PARSERS[version](data)
