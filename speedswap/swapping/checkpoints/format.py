"""The file ``CHECKPOINT`` in a checkpoint's folder: JSON with a checksum, never trusted.

It describes tables and tensors, and holds the rest of a ``state_dict``, without pickle: JSON values are stored
unchanged; any other value is an object with one key that begins with ``$``.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.errors import CheckpointError, TableFormatError
from speedswap.tables.files.damage import Damage, UnknownFile, is_int, require, require_version
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, write_all
from speedswap.tables.files.tensor_files import DTYPES

MANIFEST = "CHECKPOINT"
FORMAT, VERSION = "speedswap-checkpoint", 1
_MAX_BYTES = 8 << 20
_TENSORS = re.compile(r"(tensors|rows)-[0-9]{1,18}(-[0-9]{1,9}){0,2}\.safetensors")
_COPY = re.compile(r"table-[0-9]{1,18}-[0-9]{1,9}(/shard-[0-9]{1,7}-of-[0-9]{1,7})?")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FIELDS: dict[type, tuple[str, ...]] = {
    str: ("name", "copy", "path"),
    int: ("num_embeddings", "seed", "writes", "commit"),
    dict: ("attributes", "columns", "id_maps"),
    bool: ("is_initial",),
}
_MOST_NESTED = 100
_MOST_BITS = 14_000  # of an int that Python reads from JSON
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # errors that prove that a file is not there


@dataclass(frozen=True)
class SavedTensor:
    """The location of a tensor (a file and a key in it) and its hash.

    Raises:
        Damage: a name or the hash is malformed; likewise for the other parts of a manifest.
    """

    file: str
    key: str
    digest: str

    def __post_init__(self) -> None:
        is_named = _matches(_TENSORS, self.file) and isinstance(self.key, str)
        require(is_named and _matches(_DIGEST, self.digest), f"a tensor is {self}")


@dataclass(frozen=True)
class Delta:
    """Rows changed since the copy of a table, or since the previous delta."""

    file: str
    rows: int
    digests: dict[str, str]

    def __post_init__(self) -> None:
        is_hashed = all(_matches(_DIGEST, digest) for digest in self.digests.values())
        require(_matches(_TENSORS, self.file) and _is_count(self.rows) and is_hashed, f"a change is {self}")

    @property
    def tensors(self) -> list[SavedTensor]:
        """The tensors in the delta's file."""
        return [SavedTensor(self.file, name, digest) for name, digest in self.digests.items()]


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint.

    Attributes:
        name: the name, in the model, of the module that trains it.
        columns: row shape, dtype and stored dtype of each column, by name.
        num_embeddings, seed, writes, attributes: those of the table.
        is_initial: True if the optimizer has not stepped and creates the rows' state itself.
        id_maps: the tensors that encode its id maps, by map name.
        copy: the folder of the copy; empty if the table is referenced.
        deltas: changes since the copy, oldest first.
        path, commit: for a referenced table in files, its path and commit; empty if it was copied.
        shards: for a table owned by ranks, the tables of each rank's rows, in rank order; the table itself is neither
            copied nor referenced.
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

    def __post_init__(self) -> None:
        for kind, names in _FIELDS.items():
            for name in names:
                value = getattr(self, name)
                fits = _is_count(value) if kind is int else isinstance(value, kind)
                require(fits, f"{name} of table {self.name!r} is {value!r}")
        require(not any(shard.shards for shard in self.shards), f"table {self.name!r} has shards of shards")
        require(all(isinstance(each, str) for each in self.id_maps.values()), f"the id maps are {self.id_maps}")
        is_there = bool(self.path or self.shards) or _matches(_COPY, self.copy)
        require(is_there, f"the copy of table {self.name!r} is {self.copy!r}")

    @classmethod
    def of(cls, data: dict[str, Any]) -> SavedTable:
        """Return the table described by ``asdict``'s plain data.

        Raises:
            Damage, TypeError, KeyError: the data are not a table.
        """
        deltas = tuple(Delta(**delta) for delta in data["deltas"])
        return cls(**{**data, "deltas": deltas, "shards": tuple(map(cls.of, data["shards"]))})

    @property
    def parts(self) -> tuple[SavedTable, ...]:
        """The tables that hold the rows."""
        return self.shards or (self,)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest.

    Attributes:
        token: unique to this checkpoint.
        step: the training step.
        content: model, optimizers, random generators and extra, as :class:`Encoder` returns them.
        tensors: the tensors by name.
        tables: every table.
    """

    token: str
    step: int
    content: dict[str, Any]
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    tables: tuple[SavedTable, ...] = ()

    @property
    def files(self) -> set[str]:
        """The names of the checkpoint's files and folders."""
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
                f"the plain data of the checkpoint (extra and others) takes {len(body)} bytes as JSON, but the limit "
                f"is {_MAX_BYTES}; give large lists of numbers as tensors"
            )
        file = OpenFile(directory.create(MANIFEST))
        write_all(file.fd, b"%08x\n" % zlib.crc32(body) + body, 0)
        os.fsync(file.fd)
        return len(body) + 9

    @classmethod
    def read(cls, directory: OpenDirectory) -> Manifest:
        """Read the file, and check all names and numbers in it.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        with says_malformed(directory.path, "its description"):
            file = OpenFile(directory.open(MANIFEST))
            file.forget_cached()
            raw = os.pread(file.fd, _MAX_BYTES + 1, 0)
            checksum, _, body = raw.partition(b"\n")
            is_whole = len(raw) <= _MAX_BYTES and checksum == b"%08x" % zlib.crc32(body)
            require(is_whole, "its checksum does not match")
            data = json.loads(body)
            require(data["format"] == FORMAT, "it does not describe a checkpoint")
            require_version(MANIFEST, data["version"], VERSION)
            return cls.of(data)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Manifest:
        """Return the manifest described by ``asdict``'s plain data, with all names and numbers checked.

        Raises:
            Damage, TypeError, KeyError, AttributeError: the data are not a manifest.
        """
        token, step, content = data["token"], data["step"], data["content"]
        require(_matches(_DIGEST, token) and _is_count(step) and isinstance(content, dict), "its step is missing")
        tensors = {name: SavedTensor(**entry) for name, entry in data["tensors"].items()}
        return cls(token, step, content, tensors, tuple(map(SavedTable.of, data["tables"])))

    @classmethod
    def merged(cls, parts: Sequence[Manifest], num_rows: Mapping[str, int]) -> Manifest:
        """Merge the ranks' manifests into that of the whole checkpoint.

        Args:
            parts: each rank's manifest, in rank order.
            num_rows: number of rows, by name, of the tables owned by ranks; each rank has written its part.
        """
        first, tables = parts[0], []
        for table in first.tables:
            if table.name in num_rows:
                shards = tuple(each for part in parts for each in part.tables if each.name == table.name)
                rows = num_rows[table.name]
                table = replace(table, copy="", deltas=(), path="", commit=0, shards=shards, num_embeddings=rows)
            tables.append(table)
        content = {key: value for part in reversed(parts) for key, value in part.content.items()}
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        return cls(first.token, first.step, content, tensors, tuple(tables))


class UnknownCheckpoint(CheckpointError):
    """A checkpoint that cannot be read now, or not by this version, and may be good."""


def damaged(folder: Path, problem: object, file: str = "") -> CheckpointError:
    """Return the error for an unreadable checkpoint: CheckpointError if its bytes prove damage, or
    UnknownCheckpoint."""
    if isinstance(problem, UnknownFile):
        return UnknownCheckpoint(f"checkpoint {folder} cannot be read, but may be good: {problem}")
    cause = problem if isinstance(problem, OSError) else getattr(problem, "__cause__", None)
    if isinstance(cause, OSError) and cause.errno not in MISSING:
        return UnknownCheckpoint(
            f"{folder / file} cannot be read ({cause.strerror or cause}), which does not prove damage; "
            "check the disk, its permissions and the limits of this process, and load it again"
        )
    if file not in str(problem):
        problem = f"{file}: {problem}"
    return CheckpointError(
        f"checkpoint {folder} cannot be read ({problem}); remove it to resume from an earlier one, or train again"
    )


@contextmanager
def says_malformed(folder: Path, what: str, file: str = MANIFEST) -> Iterator[None]:
    """Raise CheckpointError if a checkpoint's contents, which may be anything, are invalid.

    Args:
        folder: the checkpoint's folder.
        what: the part of it, for messages.
        file: the name of the file with this part.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's
            raise MemoryError(str(error)) from error
        says_all = isinstance(error, OSError | TableFormatError | Damage)
        problem = error if says_all else f"{what}: {type(error).__name__}: {error}"
        raise damaged(folder, problem, file) from error


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return is_int(value, 0, 2**64 - 1)


# ---------------------------------------------------------------------- plain data


def word(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {word(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DECODED: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": dict,
    "$counter": Counter,
    "$float": float,
    "$array": Tensor.numpy,
    "$bytes": lambda raw: raw.numpy().tobytes(),
    "$dtype": _DTYPES.__getitem__,
    "$device": torch.device,
}


class Encoder:
    """An encoder of nested data as JSON, which collects its tensors.

    Args:
        drops: True to collect no tensors.
        gathers: False to refuse tensors that are split over ranks, for when the other ranks do not encode them too.

    Attributes:
        tensors: detached tensors by name, of dtypes that a file of tensors can hold.

    Example:
        >>> encoder = Encoder()
        >>> encoder.encode({"lr": 0.1, "betas": (0.9, 0.99), "sum": torch.ones(2)}, "optimizer")
        {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'sum': {'$tensor': 'optimizer.sum'}}
        >>> list(encoder.tensors)
        ['optimizer.sum']
    """

    def __init__(self, *, drops: bool = False, gathers: bool = True) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._drops, self._gathers = drops, gathers

    def encode(self, value: Any, name: str, depth: int = 0) -> Any:
        """Encode a value as plain data for JSON.

        Args:
            value: numbers, text, None, dicts, lists, tuples, tensors and arrays, and objects that have a
                ``state_dict``, or are generators of random numbers. A tensor split over ranks is gathered: every rank
                must encode it.
            name: the value's name, for messages and its tensors.
            depth: its nesting depth.

        Raises:
            TypeError: it holds something else; the message says where.
            ValueError: it contains itself, or is nested too deeply or too long to be read again.
        """
        if depth > _MOST_NESTED:
            raise ValueError(
                f"{name[:40]}… contains itself, or is nested more than {_MOST_NESTED} deep; give flatter data"
            )
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            if value.bit_length() > _MOST_BITS:
                raise ValueError(f"{name} is an int of {value.bit_length()} bits, of at most {_MOST_BITS}; give bytes")
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.ndarray | np.generic):
            return {"$array": self._tensor(_tensor_of(value, name), name)}
        if isinstance(value, bytes | bytearray):
            return {"$bytes": self._tensor(torch.tensor(list(value), dtype=torch.uint8), name)}
        if isinstance(value, list):
            return [self.encode(each, f"{name}.{place}", depth + 1) for place, each in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": self.encode([*value], name, depth)}
        if isinstance(value, Counter):
            return {"$counter": self.encode({**value}, name, depth)}
        if isinstance(value, torch.dtype | torch.device):
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        if isinstance(value, Mapping):
            pairs = [(key, self.encode(each, f"{name}.{key}", depth + 1)) for key, each in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(pairs)
            return {"$dict": [[self.encode(key, name), each] for key, each in pairs]}
        if isinstance(value, torch.Generator):
            return self.encode(value.get_state(), name)
        if callable(getattr(value, "state_dict", None)):
            return self.encode(value.state_dict(), name, depth + 1)
        raise TypeError(
            f"{name} is {a_kind(value)}, which a checkpoint cannot hold without pickle; give plain data, tensors, or "
            "an object with state_dict() and load_state_dict()"
        )

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        if hasattr(value, "full_tensor"):  # split by fully_shard
            if not self._gathers:
                raise TypeError(f"{name} is a tensor split over ranks; give its full_tensor(), called on every rank")
            value = value.full_tensor().cpu()
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}, on {value.device}"
            raise TypeError(f"{name} is {kind}; give a dense one")
        while name in self.tensors:
            name += "'"
        value = value.detach().resolve_conj().resolve_neg()
        encoded = {"$tensor": name}
        if value.dtype not in DTYPES:  # as bytes, with one more dimension
            encoded["dtype"] = word(value.dtype)
            value = value.contiguous().unsqueeze(-1).view(torch.uint8)
        if not self._drops:
            self.tensors[name] = value
        return encoded


def _tensor_of(value: np.ndarray[Any, Any] | np.generic, name: str) -> Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a read-only array is only read
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is an array of {value.dtype}, which no tensor holds; give numbers in this machine's byte order"
        ) from None


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Decode data encoded by :class:`Encoder`.

    Args:
        value: the plain data.
        tensor: returns the tensor of a name.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it was not written by an encoder.
    """
    again = functools.partial(decode, tensor=tensor)
    if isinstance(value, list):
        return [*map(again, value)]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: again(each) for name, each in value.items()}
    if key == "$tensor":
        found = tensor(value[key])
        return found if "dtype" not in value else found.view(_DTYPES[value["dtype"]]).squeeze(-1)
    if key not in _DECODED:
        raise ValueError(f"{key[:40]!r} is not a value that checkpoints hold")
    return _DECODED[key](again(value[key]))
