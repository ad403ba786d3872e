"""Storage places: where a table's rows live. A place creates, opens and copies stores."""

from __future__ import annotations

import copy
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.collectives import RankGroup
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.tables.disk.cache import DiskOptions, FreshRows
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.manifest import LogLayout, LogManifest
from speedswap.tables.idle import LAST_STEP
from speedswap.tables.init import Bases, Initializer, resolve
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import HotBytes, MemoryKind, WantedShares, default_kind, require_hot_bytes
from speedswap.tables.opening import open_store
from speedswap.tables.record import Column, count, is_lazy, require_bases, require_name, row_of, seed_of
from speedswap.tables.store import RowStore, StoreFacts, origins_in


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Storage(ABC):
    """A place where a table's rows live; it creates the table's store.

    To add a kind of place, derive from this class, and pass it as ``storage=``.

    Args:
        local_to_rank: True lets each process of a torch.distributed job train a separate table. Without it and without
            :class:`speedswap.Ranks`, a training forward pass in a job is refused, since nothing would keep the ranks'
            tables in sync. The model's wrapper must also ignore ``weight`` (:func:`speedswap.ignore_in_ddp`,
            :func:`speedswap.parameters_to_ignore`).

    Attributes:
        folder: the directory that this process fills; None in memory, and if ranks fill theirs together.
    """

    folder: ClassVar[Path | None] = None

    local_to_rank: bool = False

    @abstractmethod
    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        """Return a new store filled with initial values; errors are those of :meth:`Table.create`.

        Args:
            num_embeddings: number of rows, at least 1.
            weight: the first column.
            seed: of the initial values.
            name: for messages.
        """

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a single process."""
        return None

    def open(self, mode: str, commit: int | None, base: Bases | None = None) -> RowStore:
        """Open the store of the table in this place; arguments and errors are those of :meth:`Table.open`.

        ``base`` has absolute paths, or the bases that are known; it is left out where none are given.
        """
        raise ValueError(f"path is {self!r}; give a directory, or a place on disk: only tables there are opened")

    def copy(self, source: RowStore) -> RowStore:
        """Return a copy, in this place, of another store's rows, attributes and id maps."""
        raise ValueError(f"storage is {self!r}, but a copy lies in memory; copy files with Table.save(path)")

    def require_free(self) -> None:
        """Raise FileExistsError if the place is taken, so that no table can be created there."""
        return None

    def discard(self) -> None:
        """Remove what :meth:`create` made here, once a later error has left it unused; there is nothing in memory."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def of_table(self, name: str, own: Storage | str | None = None) -> Storage:
        """Return the place of one of several tables.

        Args:
            name: name of its subdirectory.
            own: the place requested for that table in particular.

        Raises:
            ValueError: that place is not compatible with this one.
        """
        if own is None:
            return self
        place = as_storage(own)
        if not isinstance(place, _InMemory):
            raise ValueError(f"storage of table {name!r} is {own!r}; give a directory, or ranks, to the collection")
        return replace(place, local_to_rank=self.local_to_rank or place.local_to_rank)

    def at(self, path: Path) -> Storage:
        """Return this place with the directory of an existing table.

        Raises:
            ValueError: this place has no directory.
        """
        raise ValueError(f"path is {str(path)!r}, a directory, but storage is {self!r}; give a place on disk")

    def __repr__(self) -> str:
        settings = sorted(fields(self), key=lambda each: bool(each.kw_only))
        shown = [f"{each.name}={value!r}" for each in settings if (value := getattr(self, each.name)) != each.default]
        return f"{type(self).__name__}({', '.join(shown)})"


_ENGINES = {"auto": None, "zero_copy": 1.0, "staged": 0.0}  # and the share of rows that kernels move


class _InMemory(Storage):
    """Memory of this machine."""

    kind: ClassVar[MemoryKind]
    hot_bytes: HotBytes | None = None
    may_be_near: ClassVar[bool] = False

    @property
    def shares(self) -> WantedShares:
        """The shares of rows that kernels move to a GPU, and back; None for what is fastest."""
        return None, None

    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        facts = StoreFacts(num_embeddings, self.kind, self.shares, seed, name or "table", hot_bytes=self.hot_bytes)
        return LocalStore.create(facts, weight, may_be_near=self.may_be_near)

    def copy(self, source: RowStore) -> RowStore:
        return copy_rows(source, self.kind, self.shares, self.hot_bytes)


@dataclass(frozen=True, repr=False)
class Device(_InMemory):
    """GPU memory; ordinary memory on a machine without a GPU.

    Example:
        >>> import speedswap
        >>> speedswap.Table.create(1000, 16, storage=speedswap.Device()).storage
        'device'
    """

    kind = "device"


@dataclass(frozen=True, repr=False)
class Pinned(_InMemory):
    """Host memory that the GPU reads directly. Without a GPU it works like :class:`Pageable` and warns once.

    Args:
        engine: how rows move to a GPU and back: ``zero_copy`` (kernels read and write the table over the bus),
            ``staged`` (CPU threads gather, the copy engine transfers), or ``auto``: both at once, in the shares that
            are fastest, which takes less than a second to measure, once for tables of about one size and width.
        gather_share, scatter_share: the shares, 0 to 1, of the rows that kernels move to the GPU, and back, if they
            are to be others.
        hot_bytes: GPU memory for a cache of the rows that training writes most often: bytes, a fraction of the table's
            rows as a float between 0 and 1, or ``auto`` for a quarter of the memory free at the first step; None for no
            cache. The cache also takes 4 bytes per row of the table and 8 per cached row. Results are bitwise the same.
            Kernels move all rows to the GPU then. Only with one GPU. See docs/storage.md for when it helps.

    Raises:
        ValueError: the engine is unknown, a share or ``hot_bytes`` out of range, or ``hot_bytes`` given for rows that
            are staged to the GPU.
        TypeError: ``hot_bytes`` has the wrong type.
    """

    engine: str = "auto"
    hot_bytes: HotBytes | None = None
    gather_share: float | None = None
    scatter_share: float | None = None

    kind = "pinned"

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise ValueError(f"engine is {self.engine!r}; choose one of {', '.join(_ENGINES)}")
        for name in ("gather_share", "scatter_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} is {share!r}; give a share of the rows, 0 to 1, or None for the engine's")
        require_hot_bytes(self.hot_bytes, self.shares[0])

    @property
    def shares(self) -> WantedShares:
        own = _ENGINES[self.engine]
        gather = own if self.gather_share is None else self.gather_share
        return gather, own if self.scatter_share is None else self.scatter_share


@dataclass(frozen=True, repr=False)
class _PinnedOrNear(Pinned):
    """Pinned memory; or that of a GPU with ample room, once the first step says which GPU and which columns."""

    may_be_near = True


@dataclass(frozen=True, repr=False)
class Pageable(_InMemory):
    """Ordinary memory; rows are staged on their way to a GPU."""

    kind = "pageable"


@dataclass(frozen=True, repr=False)
class Disk(Storage, DiskOptions):
    """A directory with the rows in a log, and a row cache in memory: tables larger than memory that survive kills.

    Args:
        path: the directory. For a new table it must not exist; it appears once the table is complete and durable.
        cache_bytes: memory for rows; by default a quarter of the memory that is free and not reserved for other tables'
            caches. A cache is never larger than the table.
        commit_every: optimizer steps between commits; by default only time decides. A step waits until the previous
            commit is durable, so a killed process loses fewer than ``2 * commit_every`` steps.
        commit_seconds: seconds between commits; None to count only steps. Direct calls of :meth:`Table.scatter` count
            as steps. A killed process leaves the table at its last commit.
        synchronous_commit: make a step that commits wait until its commit is durable; with ``commit_every=1``, no
            completed step is ever lost.
        scratch: make a table that vanishes with its process: nothing is committed or synced. If the process is killed,
            the next table created there removes the leftovers.

    Raises:
        ValueError, TypeError: a setting has the wrong type, or is out of range.

    Example:
        >>> import tempfile, speedswap
        >>> place = speedswap.Disk(tempfile.mkdtemp() + "/items", cache_bytes=2**20, commit_every=100)
        >>> items = speedswap.Embedding(10**9, 16, storage=place)
        >>> items.table.close()
        >>> speedswap.Table.open(place).num_embeddings
        1000000000
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise TypeError(f"path is {self.path!r}; give the directory that holds the table")
        object.__setattr__(self, "path", os.fspath(self.path))

    @property
    def folder(self) -> Path:  # type: ignore[override]
        return Path(self.path)

    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        directory = TableDirectory.create(self.folder)
        store = None
        try:
            name, layout = name or directory.path.name, LogLayout.of([weight])
            manifest = LogManifest.of(name, num_embeddings, seed, layout, scratch=self.scratch)
            store = LogStore.create(directory, manifest, self)
            directory.publish()
        except BaseException:
            if store is not None:
                store.close_log()
            directory.remove()
            raise
        return store

    def open(self, mode: str, commit: int | None, base: Bases | None = None) -> RowStore:
        if self.scratch:
            raise ValueError(
                "scratch is True, but an existing table outlives its process; use scratch with Table.create"
            )
        store = open_store(self.folder, mode, self, commit, base)
        try:
            if not require_bases(origins_in(store).values()) and not isinstance(base, Mapping | None):
                raise ValueError(f"base is {base}, but the table at {self.path!r} has no base; leave it out")
        except BaseException:
            store.close()
            raise
        return store

    def require_free(self) -> None:
        TableDirectory.discard_scratch(self.folder)
        if self.folder.exists():
            raise FileExistsError(f"path is {self.path!r}, which exists; open what is there, or give another path")

    def of_table(self, name: str, own: Storage | str | None = None) -> Disk:
        as_storage("disk" if own is None else own, self.path)
        return replace(self, path=self.folder / name)

    def at(self, path: Path) -> Disk:
        return replace(self, path=path, scratch=False)


_NAMES: dict[str, type[_InMemory]] = {"device": Device, "pinned": Pinned, "pageable": Pageable}


def as_storage(storage: Storage | str, path: str | os.PathLike[str] | None = None) -> Storage:
    """Return the place that a call's arguments describe.

    Args:
        storage: a place; or ``device``, ``pinned``, ``pageable``, ``disk``, or ``auto``: a disk where a path is given;
            where there is a GPU pinned memory, or its own for a table that takes little of it; else pageable memory.
        path: the directory of a table on disk.

    Raises:
        ValueError: the storage is unknown, a path is given for a table that is not on disk, or missing for one that is.
        TypeError: ``storage`` has the wrong type.
    """
    if isinstance(storage, Storage):
        if path is not None:
            raise ValueError(f"path is {os.fspath(path)!r} but storage is {storage!r}; leave one of them out")
        return storage
    if not isinstance(storage, str):
        raise TypeError(f"storage is {a_kind(storage)}; give a place, such as speedswap.Disk(path), or its name")
    kind = "disk" if storage == "memmap" else storage  # its older name
    if kind not in ("auto", *_NAMES, "disk"):
        raise ValueError(f"storage is {storage!r}; choose one of auto, {', '.join(_NAMES)}, disk")
    if kind == "auto":
        if path is None and default_kind() == "pinned":
            return _PinnedOrNear()
        kind = "disk" if path is not None else "pageable"
    if kind == "disk":
        if path is None:
            raise ValueError(f"storage is {storage!r} but path is None; give the directory that will hold the table")
        return Disk(path)
    if path is not None:
        raise ValueError(f"path is {os.fspath(path)!r} but storage is {storage!r}; only tables on disk have a path")
    return _NAMES[kind]()


def opened_place(path: Storage | str | os.PathLike[str]) -> Storage:
    """Return the place of a table to be opened; errors are those of :func:`as_storage`."""
    return path if isinstance(path, Storage) else as_storage("disk", path)


def create_store(
    place: Storage,
    num_embeddings: int,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    init: Initializer | Callable[..., Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
) -> RowStore:
    """Create the store of a table in a place; the other arguments and errors are those of :meth:`Table.create`."""
    num_embeddings = count("num_embeddings", num_embeddings)
    embedding_dim = count("embedding_dim", embedding_dim)
    seed = seed_of(seed)
    require_name(name)
    zero_row = row_of(zero_row, num_embeddings)
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}, whose scales are not in the rows; use torch.int8 and store scales apart")
    weight = Column("weight", (embedding_dim,), dtype, resolve(init), zero_row, stored_dtype, rounding)
    weight.init.require_shape(num_embeddings, weight.row_shape)
    for rows in weight.init.given():
        weight.require_storable(rows)
    return place.create(num_embeddings, weight, seed=seed, name=name)


def lives_there(path: str | os.PathLike[str]) -> FileExistsError:
    """Return the error for saving a table over its own files."""
    return FileExistsError(f"path is {os.fspath(path)!r}, where this table already is; use flush()")


def require_unheld(path: Path) -> None:
    """Raise FileExistsError if checkpoints may need a commit of the table at a path."""
    for place in (path, *path.glob("shard-*")):
        held = list[int]()
        with suppress(OSError, TableFormatError):  # anything else there holds no commits
            store = open_store(place, "r")
            held = store.files.commits.held if store.files is not None and store.files.commits is not None else held
            store.close()
        if held:
            raise FileExistsError(
                f"path is {str(path)!r}, a table whose commits {held} checkpoints may need; give another path, or "
                f"remove the checkpoints and then call Table.open({str(place)!r}).commits.let_go({held[0]})"
            )


def save_copy(source: RowStore, path: Path, *, overwrite: bool) -> None:
    """Write a copy of a store to a new table directory, which appears complete or not at all."""
    with saved_copy(source, path, overwrite=overwrite):
        pass


@contextmanager
def saved_copy(source: RowStore, path: Path, *, overwrite: bool) -> Iterator[None]:
    """Write a copy of a store to a new table directory, which appears once the block ends without an error."""
    if source.files is not None and source.files.lives_at(path):
        raise lives_there(path)
    if overwrite:
        require_unheld(path)
    with TableDirectory.replacing(path, overwrite=overwrite) as copied:
        with source.facts.locked.lock:
            if source.notes.closed:
                raise TableClosedError(f"table {source.facts.name!r} was closed meanwhile; save it before closing")
            save_store(source, copied)
        yield


def save_store(source: RowStore, directory: TableDirectory) -> None:
    """Write a copy of a store's rows, attributes and id maps to a new directory, as one commit."""
    facts = source.facts
    manifest = LogManifest.of(facts.name, facts.num_embeddings, facts.seed, layout_of(source))
    with LogStore.filled(directory, manifest) as target:
        for rows, held in source.written_rows():
            target.put(rows, held)
        target.notes.take_over(source.notes, facts.part_name, lacks_steps=LAST_STEP in source.columns)


def layout_of(store: RowStore) -> LogLayout:
    """Return a record layout on disk with a store's columns and the same values in untouched rows."""
    return LogLayout.of([*store.columns.values()], origins_in(store))


def copy_rows(
    source: RowStore,
    kind: MemoryKind | None = None,
    shares: WantedShares | None = None,
    hot_bytes: HotBytes | None = None,
) -> LocalStore:
    """Return a store in memory with the same rows, attributes and id maps.

    Args:
        source: the rows.
        kind, shares, hot_bytes: the copy's memory; by default the source's, if the source is in memory.
    """
    facts = source.facts
    own = next((each for each in get_args(MemoryKind) if each == facts.storage), default_kind())
    place = kind or own, shares or facts.shares
    hot_bytes = facts.hot_bytes if kind is None else hot_bytes
    copied = LocalStore(StoreFacts(facts.num_embeddings, *place, facts.seed, facts.name, hot_bytes=hot_bytes))
    group = copied.add_unfilled(list(source.columns.values()))
    fresh = FreshRows(layout_of(source), 1, facts.num_embeddings, facts.seed)
    if all(is_lazy(each.origin.start) for each in fresh.layout.held):  # otherwise every row was written
        for some in group.chunks(0, facts.num_embeddings):
            rows = torch.arange(some.start, some.stop)
            fresh.fill(group.records, torch.stack([rows, rows, torch.full_like(rows, -1)], dim=1))
    for rows, held in source.written_rows():
        parts = [kernels.Part(group.layout.offset(name), block) for name, block in held.items()]
        kernels.scatter_records(group.records, rows, parts)
    copied.notes.take_over(source.notes, facts.part_name)
    copied.notes.id_maps = copy.deepcopy(copied.notes.id_maps)
    return copied
