"""A table that ranks own, saved by all of them: a directory for each rank's rows, and a manifest that counts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.log_manifest import LogManifest
from speedswap.tables.files.manifest_file import ManifestFile
from speedswap.tables.files.open_directory import OpenDirectory
from speedswap.tables.files.place import Place
from speedswap.tables.files.shards_manifest import ShardsManifest, require_shared, shard_name

if TYPE_CHECKING:
    from speedswap.collectives import Task
    from speedswap.ranks.sharded import ShardedStore

__all__ = ["manifest_of", "salt_of", "save_shards"]


def save_shards(store: ShardedStore, task: Task, path: Path, *, overwrite: bool) -> None:
    """Write the rows of every rank to a directory, which appears complete or not at all.

    Args:
        store: this rank's view of the table.
        task: the ranks' common one.
        path, overwrite: as for :meth:`Table.save`.
    """
    rank, directory = store.group.rank, None
    with ExitStack() as held:
        try:
            if rank == 0:
                directory = held.enter_context(TableDirectory.replacing(path, overwrite=overwrite))
            task.round()
            hidden = require_shared(Place(path).hidden, path)
            place = hidden / shard_name(rank, len(store.group))
            store.own.save(place)
            salts = task.share(salt_of(place))
            if directory is not None:
                directory.write_manifest(manifest_of(store, salts))
        except BaseException:
            task.give_up()  # the others write no more when the directory goes
            raise
    task.round()


def manifest_of(store: ShardedStore, salts: list[int]) -> ShardsManifest:
    """Return the description of a table in files, given the salts of its ranks' own tables."""
    return ShardsManifest(store.name, store.num_embeddings, store.seed, store.columns["weight"], tuple(salts))


def salt_of(place: Path) -> int:
    """Return the salt by which a rank's own table in files is known."""
    manifest = ManifestFile.load(OpenDirectory(place))[1]
    assert isinstance(manifest, LogManifest)
    return manifest.salt
