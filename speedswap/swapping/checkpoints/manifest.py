"""The file ``CHECKPOINT`` in a checkpoint's folder: JSON with a checksum, which is never trusted."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speedswap.errors import CheckpointError
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, OpenFile

__all__ = ["MANIFEST", "Delta", "Manifest", "SavedTable", "SavedTensor", "damaged", "saved_table", "says_malformed"]

MANIFEST = "CHECKPOINT"
FORMAT, VERSION = "speedswap-checkpoint", 1
_MAX_BYTES = 8 << 20
_TENSORS = re.compile(r"(tensors|rows)-[0-9]{1,18}(-[0-9]{1,9}){0,2}\.safetensors")
_COPY = re.compile(r"table-[0-9]{1,18}-[0-9]{1,9}(/shard-[0-9]{1,7}-of-[0-9]{1,7})?")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class SavedTensor:
    """The place of a tensor, under a key of a file, and its hash."""

    file: str
    key: str
    digest: str


@dataclass(frozen=True)
class Delta:
    """Rows that have changed since the copy of a table, or since the delta before."""

    file: str
    rows: int
    digests: dict[str, str]


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint.

    Attributes:
        name: of the module that trains it, in the model.
        columns: row shape, dtype and stored dtype of each column, by name.
        num_embeddings, seed, writes, attributes: of the table.
        is_initial: True if the optimizer has not stepped: it makes the rows' state itself.
        id_maps: the tensors that describe its id maps, by the maps' names.
        copy: the folder of the copy; empty where the table is referred to.
        deltas: changes since the copy, oldest first.
        path, commit: of a table in files that is referred to as of a commit; empty where it was copied.
        shards: of a table that ranks own, which is neither copied nor referred to itself: the tables of each rank's
            rows, in their order.
    """

    name: str
    columns: dict[str, list[Any]]
    num_embeddings: int
    seed: int
    writes: int
    attributes: dict[str, Any]
    is_initial: bool
    id_maps: dict[str, str]
    copy: str = ""
    deltas: tuple[Delta, ...] = ()
    path: str = ""
    commit: int = 0
    shards: tuple[SavedTable, ...] = ()

    @property
    def parts(self) -> tuple[SavedTable, ...]:
        """The tables that the rows are in."""
        return self.shards or (self,)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description.

    Attributes:
        token: of this checkpoint alone.
        step: of the training.
        content: model, optimizers, random generators and extra, as :class:`Encoder` returns them.
        tensors: by name.
        tables: every table.
    """

    token: str
    step: int
    content: dict[str, Any]
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    tables: tuple[SavedTable, ...] = ()

    @property
    def files(self) -> set[str]:
        """The names of its files and folders."""
        parts = [part for table in self.tables for part in table.parts]
        rows = {delta.file for part in parts for delta in part.deltas}
        return {tensor.file for tensor in self.tensors.values()} | {part.copy for part in parts if part.copy} | rows

    def write(self, directory: OpenDirectory) -> int:
        """Write the file, durably; return its size.

        Raises:
            ValueError: it holds too much plain data.
        """
        body = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()
        if len(body) > _MAX_BYTES - 9:
            raise ValueError(
                f"the plain data of the checkpoint, such as extra, takes {len(body)} bytes as JSON, and {_MAX_BYTES} "
                "are the most; give large lists of numbers as tensors"
            )
        file = OpenFile(directory.create(MANIFEST))
        rest = memoryview(b"%08x\n" % zlib.crc32(body) + body)
        while rest:
            rest = rest[os.write(file.fd, rest) :]
        os.fsync(file.fd)
        return len(body) + 9

    @classmethod
    def read(cls, directory: OpenDirectory) -> Manifest:
        """Read the file, and check all names and numbers in it.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            file = OpenFile(directory.open(MANIFEST))
            return _checked(os.pread(file.fd, _MAX_BYTES + 1, 0))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise damaged(directory.path, error, MANIFEST) from error


def damaged(folder: Path, problem: object, file: str = "") -> CheckpointError:
    """Return the error for a checkpoint that cannot be read."""
    if isinstance(problem, OSError) and problem.errno in TRANSIENT:
        return CheckpointError(
            f"{folder / file} cannot be read ({os.strerror(problem.errno)}), which says nothing about what it holds; "
            "check the disk and the limits of this process, and load it again"
        )
    if file not in str(problem):
        problem = f"{file}: {problem}"
    return CheckpointError(
        f"checkpoint {folder} cannot be read ({problem}); remove it to go on from an earlier one, or train again"
    )


@contextmanager
def says_malformed(folder: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError where something in a checkpoint, of which anything may be in it, is not as it must be."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise damaged(folder, f"{what}: {type(error).__name__}: {error}", MANIFEST) from error


def _checked(raw: bytes) -> Manifest:
    checksum, _, body = raw.partition(b"\n")
    _require(len(raw) <= _MAX_BYTES and checksum == b"%08x" % zlib.crc32(body), "its checksum does not match")
    data = json.loads(body)
    _require(data["format"] == FORMAT, "it does not describe a checkpoint")
    _require(data["version"] == VERSION, f"its version is {data['version']!r}; this speedswap reads {VERSION}")
    token, step, content = data["token"], data["step"], data["content"]
    _require(isinstance(token, str) and _is_count(step) and isinstance(content, dict), "its step is missing")
    tensors = {name: SavedTensor(**entry) for name, entry in data["tensors"].items()}
    for tensor in tensors.values():
        named = _matches(_TENSORS, tensor.file) and isinstance(tensor.key, str)
        _require(named and _matches(_DIGEST, tensor.digest), f"a tensor is {tensor}")
    return Manifest(token, step, content, tensors, tuple(saved_table(entry) for entry in data["tables"]))


def saved_table(entry: dict[str, Any]) -> SavedTable:
    """Return a table as it stands in the file, with all names and numbers checked.

    Raises:
        ValueError, TypeError, KeyError: there is no table.
    """
    deltas = tuple(Delta(**delta) for delta in entry.pop("deltas"))
    shards = tuple(saved_table(shard) for shard in entry.pop("shards", ()))
    table = SavedTable(**entry, deltas=deltas, shards=shards)
    _require(not any(shard.shards for shard in shards), f"table {table.name!r} has shards of shards")
    texts = [table.name, table.copy, table.path]
    counts = [table.num_embeddings, table.seed, table.writes, table.commit]
    dicts = [table.attributes, table.columns, table.id_maps]
    _require(all(isinstance(text, str) for text in texts), "the names of a table are missing")
    _require(all(map(_is_count, counts)), f"the numbers of table {table.name!r} are {counts}")
    _require(all(isinstance(each, dict) for each in dicts), f"table {table.name!r} lacks columns or attributes")
    _require(isinstance(table.is_initial, bool), f"table {table.name!r} is_initial: {table.is_initial!r}")
    _require(all(isinstance(each, str) for each in table.id_maps.values()), f"the id maps are {table.id_maps}")
    is_there = bool(table.path or table.shards) or _matches(_COPY, table.copy)
    _require(is_there, f"the copy of table {table.name!r} is {table.copy!r}")
    for delta in deltas:
        _require(_matches(_TENSORS, delta.file) and _is_count(delta.rows), f"a change is in {delta.file!r}")
        _require(all(_matches(_DIGEST, digest) for digest in delta.digests.values()), "a change has no hash")
    return table


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
