"""Manifests of tables that ranks own together (format 5): each rank's rows are a table in a directory of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedswap.tables.files.damage import is_int, require
from speedswap.tables.files.manifest import FORMAT, column_json, parse_column, require_table
from speedswap.tables.record import Column

__all__ = [
    "SHARD",
    "ShardsManifest",
    "parse_shards_manifest",
    "part_of_ranks",
    "remedy_for_part",
    "require_shared",
    "shard_name",
]

SHARD = re.compile(r"shard-[0-9]{1,7}-of-[0-9]{1,7}")
_MOST_SHARDS = 2**14


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
