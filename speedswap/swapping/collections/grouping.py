"""Groups of tables that share a store: new ones, those found on disk, and those being created on disk.

While groups are being created in a directory, a file there names them, so that a kill leaves all or none: the next
process that creates a collection there removes the groups it names.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from speedswap.errors import TableBusyError
from speedswap.swapping.collections.configs import EmbeddingConfig
from speedswap.tables import Storage, Table, as_storage
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, says_if_full
from speedswap.tables.files.place import Place, refuse_within_table
from speedswap.tables.store import PARTS

_UNFINISHED = ".speedswap-groups"
_log = logging.getLogger("speedswap")


class GroupKey(NamedTuple):
    """The properties shared by tables in one store."""

    embedding_dim: int
    dtype: torch.dtype
    stored_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    rounding: str | None
    storage: Storage
    group: str
    trainable: bool

    @classmethod
    def of(cls, config: EmbeddingConfig, storage: Storage) -> GroupKey:
        """Return the key of a table's group, with the collection's storage unless its config names one."""
        return cls(
            config.embedding_dim,
            config.dtype or torch.get_default_dtype(),
            config.stored_dtype,
            config.state_dtype,
            config.rounding,
            storage if config.storage is None else storage.of_table(config.name, config.storage),
            config.group,
            config.trainable,
        )

    @property
    def name(self) -> str:
        """A name for messages and files, without a dot, from all properties but storage."""
        words = [str(self.embedding_dim), _word(self.dtype)]
        words += ["as", _word(self.stored_dtype)] if self.stored_dtype else []
        words += ["state", _word(self.state_dtype)] if self.state_dtype else []
        words += [self.rounding] if self.rounding else []
        words += [self.group] if self.group else []
        words += [] if self.trainable else ["frozen"]
        return "-".join(words)


class Group(NamedTuple):
    """Tables that share a store.

    Attributes:
        key: their common properties.
        name: for messages and files.
        configs: the tables, in their order.
        table: an existing table that holds their rows.
    """

    key: GroupKey
    name: str
    configs: list[EmbeddingConfig]
    table: Table | None = None


def grouped(configs: Sequence[EmbeddingConfig], storage: Storage) -> list[Group]:
    """Return the groups of new tables, in a collection with this storage."""
    found: dict[GroupKey, list[EmbeddingConfig]] = {}
    for config in configs:
        found.setdefault(GroupKey.of(config, storage), []).append(config)
    groups: list[Group] = []
    for key, some in found.items():
        number = 1 + sum(group.key.name == key.name for group in groups)
        groups.append(Group(key, _numbered(key.name, number), some))
    return groups


def opened(configs: Sequence[EmbeddingConfig], table_of: Callable[[str], Table]) -> list[Group]:
    """Return the groups of tables on disk, of a collection that may have had any storage and engine.

    Args:
        configs: the tables.
        table_of: opens a group's table, by the group's name.

    Raises:
        ValueError: a file holds different tables.
    """
    groups: list[Group] = []
    try:
        # The tables determine maps and storage.
        plain = [replace(config, id_map=None, storage=None) for config in configs]
        for key, _, some, _ in grouped(plain, as_storage("auto")):
            number = 0
            while some:
                number += 1
                table = table_of(_numbered(key.name, number))
                names = {each[0] for each in table.attributes.get(PARTS, contents_of(some))}
                here = [config for config in some if config.name in names]
                groups.append(Group(key, _numbered(key.name, number), here, table))
                if not here:
                    raise ValueError(
                        f"table {table.name!r} holds {', '.join(sorted(names))}, but not {some[0].name!r}; give the "
                        "configs that it was made with"
                    )
                some = [config for config in some if config.name not in names]
    except BaseException:
        close_all(groups)
        raise
    return groups


def close_all(groups: Sequence[Group]) -> None:
    """Close the tables of groups that were opened but are not used."""
    for group in groups:
        if group.table is not None:
            group.table.close()


def contents_of(configs: Sequence[EmbeddingConfig]) -> list[list[object]]:
    """Return the tables' names and sizes, as plain data."""
    return [[config.name, config.num_embeddings] for config in configs]


@contextmanager
def unfinished(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Create a directory for the block to create groups in; remove it if the block raises and leaves it empty.

    Args:
        path: the collection's directory, which may exist.
        names: the groups' names.

    Raises:
        FileExistsError: a group exists, or the directory is a table's or inside one.
        TableBusyError: another process is creating groups there.
    """
    refuse_within_table(path / "groups")
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with says_if_full(path / "groups"):
        path.mkdir(parents=True, exist_ok=True)
    directory = OpenDirectory(path)
    busy = f"path is {str(path)!r}, where another process is making a collection; wait for it"
    try:
        with locked(directory, TableBusyError(errno.EBUSY, busy)):
            _discard_leftovers(directory)
            for name in names:
                TableDirectory.discard_scratch(path / name)
                Place(path / name).refuse_existing()
            try:
                with says_if_full(path / "groups"):
                    file = OpenFile(directory.create(_UNFINISHED))
                    os.pwrite(file.fd, json.dumps(names).encode(), 0)
                    os.fsync(file.fd)
                    directory.sync()
                yield
            except BaseException:
                if not any(os.path.lexists(path / name) for name in names):
                    directory.remove(_UNFINISHED)
                raise
            directory.remove(_UNFINISHED)
            directory.sync()  # it must not reappear once the groups were trained
    except BaseException:
        with suppress(OSError):  # it has other files
            for each in missing:
                each.rmdir()
        raise
    finally:
        directory.close()


def require_finished(place: Storage) -> None:
    """Raise FileNotFoundError unless all groups in a directory were completed."""
    path = place.folder or Path()
    file = path / _UNFINISHED
    if file.exists() and file.stat().st_size:
        raise FileNotFoundError(
            f"path is {str(path)!r}, where a collection was not finished by the process that made it; make it again"
        )


def _discard_leftovers(directory: OpenDirectory) -> None:
    """Remove the groups that a killed process left, and the file that names them."""
    if directory.status(_UNFINISHED) is None:
        return
    file = OpenFile(directory.open(_UNFINISHED))
    with suppress(ValueError):  # it was killed before it began the first one
        for name in json.loads(os.pread(file.fd, 1 << 20, 0)):
            if Path(name).name == name and (directory.path / name).exists():
                Table.open(directory.path / name).remove()
                _log.warning("removed %s, left behind by a process that was killed", directory.path / name)
    directory.remove(_UNFINISHED)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
