"""A table on disk that ranks own: made, opened again, or taken over by another number of ranks."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from speedswap.collectives import RankGroup, Task
from speedswap.errors import TableFormatError
from speedswap.ranks.owned_keys import part_of
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.manifest import MANIFEST, ManifestFile, ShardsManifest, shard_name
from speedswap.tables.files.open_directory import OpenDirectory, says_if_full
from speedswap.tables.files.place import is_shard
from speedswap.tables.record import Column
from speedswap.tables.shards.owners import Owners, owned_column, whole_columns
from speedswap.tables.shards.parts import Shard, different_steps, open_shard, read_manifest, remove_former, take_shards
from speedswap.tables.storage import Disk
from speedswap.tables.table import Table

__all__ = ["OnDisk", "on_disk", "remove_former"]

_CACHE_BYTES = 64 << 20
_log = logging.getLogger("speedswap")


class OnDisk(NamedTuple):
    """A rank's rows of a table on disk.

    Attributes:
        store: the rows.
        torn: why the ranks' rows are not those of one step; None if they are.
        was_found: True if any rank had rows there already.
    """

    store: LogStore
    torn: str | None
    was_found: bool


def on_disk(
    group: RankGroup,
    task: Task,
    owners: Owners,
    disk: Disk,
    columns: tuple[Column, Column],
    *,
    seed: int,
    name: str,
) -> OnDisk:
    """Return the rows that this rank owns of a table on disk; every rank calls this.

    They are in a directory of their own, and stay there: the same number of ranks goes on with them. Another number
    copies the rows into new directories, and the former ones are removed unless a checkpoint refers to them.

    Args:
        group: the ranks.
        task: their common one.
        owners: the division of the rows.
        disk: where the table of all ranks is.
        columns: the first one, of the whole table and of this rank's rows.
        seed: of the initial values of a new table.
        name: of it.

    Raises:
        ValueError: another table is there.
        FileExistsError: something else is.
    """
    path, (whole, weight) = disk.folder, columns
    before = _found(path)
    task.round()  # before anything is made there
    if before is not None:
        _require_same(path, before.num_embeddings, before.weight, owners.num_embeddings, whole)
        seed, name = before.seed, before.name
    place = path / shard_name(group.rank, len(group))
    was_there = before is not None or place.exists()
    store, problem = _opened(disk.at(place), owners.rows_of(group.rank), weight, seed, name), None
    try:
        if before is not None and before.world_size != len(group):
            problem = _take_over(path, before, Shard(Table(store), owners, group.rank))
        elif before is not None and before.salts[group.rank] != store.manifest.salt:
            raise TableFormatError(f"the table at {path} is damaged: {place.name} is another one's; restore it")
        store.flush()
        found = task.share([store.manifest.salt, store.notes.writes, store.seed, [*store.columns], was_there])
        if len({each[2] for each in found}) > 1:
            raise TableFormatError(f"the table at {path} is damaged: its shards have different seeds; remove it")
        after = ShardsManifest(name, owners.num_embeddings, store.seed, whole, tuple(each[0] for each in found))
        if after.encode() != (before and before.encode()):
            with says_if_full(path / "MANIFEST"):
                ManifestFile.write(OpenDirectory(path), after.encode())  # by each rank: its disk may be its own
        task.round()
        if group.rank == 0:
            remove_former(path, len(group), _is_needed)
    except BaseException:
        store.close()
        raise
    torn = problem or different_steps(path, [each[1] for each in found], [each[3] for each in found])
    return OnDisk(store, torn, any(each[4] for each in found))


def _is_needed(former: Table) -> bool:
    """Return whether a checkpoint may refer to the rows of a former rank."""
    return former.store.commits is not None and bool(former.store.commits.held)


def _found(path: Path) -> ShardsManifest | None:
    """Return the description of a table at a path; None if it was never finished, or nothing is there.

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
        f"path is {str(path)!r}, where there is something else than a table of ranks; give another path"
    )


def _opened(disk: Disk, rows: int, weight: Column, seed: int, name: str) -> LogStore:
    """Return the table in a rank's directory, a new one if none is there."""
    try:
        store = disk.open("r+", None)
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
            "asked for; give another path, or the same settings"
        )


def _take_over(path: Path, before: ShardsManifest, target: Shard) -> str | None:
    """Copy rows, columns, attributes and the number of writes from the shards of another number of ranks.

    Returns:
        Why they are not those of one step, if so: nothing was copied.
    """
    assert isinstance(target.owners, Owners)
    owners, disk = Owners(before.num_embeddings, before.world_size), DiskOptions(cache_bytes=_CACHE_BYTES)
    with ExitStack() as opened:
        sources = []
        for rank in range(before.world_size):
            store = open_shard(path, before, rank, "r", disk)
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
            mine.store.notes.writes = stores[0].writes
            for each in stores[0].store.notes.id_maps:
                parts = [store.store.notes.id_maps[each] for store in stores]
                mine.store.notes.id_maps[each] = part_of(parts, target.owners.world_size, target.rank)
    return problem
