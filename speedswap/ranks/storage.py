"""The storage place for rows owned by the ranks of a job, and its tables on disk.

Each rank's rows on disk are in a separate directory, where the same number of ranks finds them again. A different
number of ranks copies the rows into new directories; the old ones are removed unless a checkpoint refers to them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from speedswap.collectives import Kind, RankGroup, Task, digest_of
from speedswap.errors import TableFormatError
from speedswap.ranks.keys import part_of
from speedswap.ranks.sharded import ShardedStore
from speedswap.ranks.step import ShardedStep
from speedswap.tables import Column, Disk, LogStore, Pinned, RowStore, Storage, Table, as_storage
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.files.manifest import MANIFEST, ManifestFile, ShardsManifest, shard_name
from speedswap.tables.files.open_directory import OpenDirectory, says_if_full
from speedswap.tables.files.place import is_shard
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import Bases
from speedswap.tables.many import Shard, remove_former, take_shards
from speedswap.tables.opening import different_steps, open_shard, read_manifest
from speedswap.tables.owners import Owners, owned_column, whole_columns
from speedswap.tables.record import bases_in
from speedswap.tables.store import IDLE_STEPS, innermost

_REDUCTIONS = ("mean", "sum")
_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, repr=False)
class Ranks(Storage):
    """Rows partitioned evenly over the ranks of a torch.distributed job.

    Every rank must create the table, with the same arguments. All ranks then make lookups, backward passes and
    optimizer steps together, in the same order, each with any number of its own ids. The result equals that of one
    process that trains on all batches.

    Args:
        each: where each rank's rows live: another place, or its name. A directory may be shared by all ranks or local
            to each. Rows found there are reused, with the seed and the initial values they were created with, even if
            they were written by another number of ranks.
        group: the ranks, a process group of torch.distributed; all of the job by default.
        reduction: how the ranks' gradients are reduced: ``"mean"``, as DistributedDataParallel does for other layers,
            or ``"sum"``.
        host: the ranks of this rank's host: the number of consecutive ranks per host, or a process group of this host's
            ranks; by default taken from torchrun's ``LOCAL_RANK``. Ranks of a host merge what they send to other hosts,
            except for rows between GPUs over NCCL. 1 turns this off.

    Raises:
        ValueError: the reduction or place is unknown, or host is below 1; or a table is created in a process that is
            not one of the ranks.

    Example:
        >>> import speedswap
        >>> speedswap.Ranks(each=speedswap.Disk("items"), reduction="sum")  # under torchrun: storage=…
        Ranks(each=Disk(path='items'), reduction='sum')
    """

    each: Storage | str = "auto"
    group: dist.ProcessGroup | None = None
    reduction: str = "mean"
    host: int | dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if isinstance(self.host, int) and self.host < 1:
            raise ValueError(f"host is {self.host}; give the number of ranks on each host")
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; choose one of {', '.join(_REDUCTIONS)}")
        if isinstance(each := as_storage(self.each), Ranks):
            raise ValueError(f"each is {each!r}, which is Ranks again; give the place where one rank's rows live")
        if isinstance(each, Pinned) and each.hot_bytes is not None:
            raise ValueError(f"each is {each!r}, but rows of ranks have no cache of hot rows; leave hot_bytes out")
        if self.local_to_rank or each.local_to_rank:
            raise ValueError("local_to_rank is True, but the ranks own the rows together; leave it out")
        object.__setattr__(self, "each", each)

    @property
    def ranks(self) -> RankGroup:
        return RankGroup.of(self.group or dist.group.WORLD, self.host)  # type: ignore[arg-type]

    @property
    def own(self) -> Storage:
        """The place of each rank's rows."""
        assert isinstance(self.each, Storage)
        return self.each

    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        group, own = self.ranks, self.own
        owners = Owners(num_embeddings, len(group))
        seed = group.agree_on_seed(seed)
        folder = None if own.folder is None else own.folder.absolute()
        name = name or (f"table-{group.next_number}" if folder is None else folder.name)
        settings = {
            "num_embeddings": num_embeddings,
            "embedding_dim": weight.width,
            "init": weight.init.to_json(),
            "reduction": self.reduction,
            **{each: getattr(weight, each) for each in ("dtype", "zero_row", "stored_dtype", "rounding")},
        }
        group.require_same_settings(f"table {name!r}", settings)

        with group.main.task(Kind.MAKE) as task:
            if weight.init.is_given:
                group.require_alike([digest_of(rows) for rows in weight.init.given()], f"the rows of table {name!r}")
            held = owned_column(weight, owners, group.rank)
            made: RowStore
            torn, was_found = None, False
            if isinstance(own, Disk) and not own.scratch:
                disk = own.at(own.folder.absolute())
                made, torn, was_found = _on_disk(group, task, owners, disk, (weight, held), seed=seed, name=name)
                weight, name = whole_columns(made.columns)["weight"], made.name
            else:
                shard = own.of_table(shard_name(group.rank, len(group)))
                made = shard.create(owners.rows_of(group.rank), held, seed=seed, name=name)
                try:
                    task.round()
                except BaseException:
                    Table(made).remove()
                    raise
            store = ShardedStore(
                made, owners, group, name=name, weight=weight, reduction=self.reduction, make_step=ShardedStep
            )
            store.torn, store.was_found = torn, was_found
        return store

    def open(self, mode: str, commit: int | None, base: Bases | None = None) -> RowStore:
        manifest = None if self.own.folder is None else read_manifest(self.own.folder, base)
        if manifest is None or mode != "r+" or commit is not None:
            raise ValueError(f"path is {self!r}, where these ranks have no table to open with mode 'r+'")
        return self.create(manifest.num_embeddings, manifest.weight, seed=manifest.seed, name=manifest.name)

    def require_free(self) -> None:
        if not (isinstance(self.own, Disk) and self.own.scratch):
            self.own.require_free()

    def of_table(self, name: str, own: Storage | str | None = None) -> Ranks:
        return replace(self, each=self.own.of_table(name, own))

    def at(self, path: Path) -> Ranks:
        return replace(self, each=self.own.at(path))


# ---- on disk ---------------------------------------------------------------------------------------------------------


def _on_disk(
    group: RankGroup,
    task: Task,
    owners: Owners,
    disk: Disk,
    columns: tuple[Column, Column],
    *,
    seed: int,
    name: str,
) -> tuple[LogStore, str | None, bool]:
    """Open this rank's rows of a table on disk; every rank must call this.

    Args:
        group: the ranks.
        task: the ranks' common task.
        owners: the division of the rows.
        disk: the place of the whole table.
        columns: the weight column, of the whole table and of this rank's rows.
        seed: the seed of a new table.
        name: the name of a new table.

    Returns:
        The rows; why the ranks' rows are at different steps, or None if they are not; and whether any rank found
        existing rows.

    Raises:
        ValueError: a different table exists there.
        FileExistsError: something else is.
    """
    path, (whole, weight) = disk.folder, columns
    before = _found(path)
    task.round()  # before any rank creates something there
    if before is not None:
        _require_same(path, before.num_embeddings, before.weight, owners.num_embeddings, whole)
        seed, name = before.seed, before.name
    place = path / shard_name(group.rank, len(group))
    was_there = before is not None or place.exists()
    store, problem = _opened(disk.at(place), owners.rows_of(group.rank), weight, seed, name), None
    try:
        if before is not None and before.world_size != len(group):
            problem = _take_over(path, before, Shard(Table(IdleStore.in_front_of(store)), owners, group.rank))
        elif before is not None and before.salts[group.rank] != store.manifest.salt:
            raise TableFormatError(f"the table at {path} is damaged: {place.name} belongs to another table; restore it")
        store.flush()
        found = task.share([store.manifest.salt, store.notes.writes, store.facts.seed, [*store.columns], was_there])
        if len({each[2] for each in found}) > 1:
            raise TableFormatError(f"the table at {path} is damaged: its shards have different seeds; remove it")
        after = ShardsManifest(name, owners.num_embeddings, store.facts.seed, whole, tuple(each[0] for each in found))
        if after.encode(path) != (before and before.encode(path)):
            with says_if_full(path):
                ManifestFile.write(OpenDirectory(path), after.encode(path))  # on every rank: its disk may be local
        task.round()
        if group.rank == 0:
            remove_former(path, len(group), lambda former: bool(former.commits and former.commits.held))
    except BaseException:
        store.close()
        raise
    torn = problem or different_steps(path, [each[1] for each in found], [each[3] for each in found])
    return store, torn, any(each[4] for each in found)


def _found(path: Path) -> ShardsManifest | None:
    """Return the manifest of a table at a path; None if it was never finished, or the path does not exist.

    Raises:
        FileExistsError: something else is.
    """
    if not path.exists():
        return None
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        if manifest is not None:
            return manifest
    elif all(is_shard(name) for name in os.listdir(path)):
        return None
    raise FileExistsError(
        f"path is {str(path)!r}, which holds something other than a table of ranks; give another path"
    )


def _opened(disk: Disk, rows: int, weight: Column, seed: int, name: str) -> LogStore:
    """Open the table in a rank's directory, or create it."""
    try:
        places = {base.files for base in weight.init.bases}  # it may have been moved
        store = innermost(disk.open("r+", None, places.pop() if len(places) == 1 else None))
    except FileNotFoundError:
        store = disk.create(rows, weight, seed=seed, name=name)
    assert isinstance(store, LogStore)
    try:
        _require_same(disk.folder, store.num_embeddings, store.columns["weight"], rows, weight)
    except ValueError:
        store.close()
        raise
    return store


def _require_same(path: Path, rows: int, weight: Column, wanted_rows: int, wanted: Column) -> None:
    there, here = (
        (count, each.row_shape, each.dtype, each.stored_dtype)
        for count, each in ((rows, weight), (wanted_rows, wanted))
    )
    if there != here:
        raise ValueError(
            f"path is {str(path)!r}, where a table has (rows, shape, dtype, stored dtype) {there}, but {here} were "
            "given; give another path, or the same settings"
        )


def _take_over(path: Path, before: ShardsManifest, target: Shard) -> str | None:
    """Copy rows, columns, attributes and the number of writes from the shards of another number of ranks.

    Returns:
        Why the shards are at different steps, if they are; then nothing was copied.
    """
    assert isinstance(target.owners, Owners)
    owners, disk = Owners(before.num_embeddings, before.world_size), DiskOptions(cache_bytes=_CACHE_BYTES)
    with ExitStack() as opened:
        sources = []
        for rank in range(before.world_size):
            store = open_shard(path, before, rank, disk, bases_in(target.table.columns.values()))
            opened.callback(store.close)
            sources.append(Shard(Table(store), owners, rank))
        stores = [source.table for source in sources]
        problem = different_steps(path, [store.writes for store in stores], [[*store.columns] for store in stores])
        if problem is None:
            mine = target.table
            theirs = whole_columns(stores[0].columns)
            new = [column for each, column in theirs.items() if each not in mine.columns]
            mine.add_columns([owned_column(column, target.owners, target.rank) for column in new])
            take_shards(target, sources, [each for each in mine.columns if each in theirs])
            mine.attributes.clear()
            mine.attributes.update(stores[0].attributes)
            mine.attributes.pop(IDLE_STEPS, None)  # already applied to the copied rows
            mine.store.notes.writes = stores[0].writes
            for each in stores[0].store.notes.id_maps:
                parts = [store.store.notes.id_maps[each] for store in stores]
                mine.store.notes.id_maps[each] = part_of(parts, target.owners.world_size, target.rank)
    return problem
