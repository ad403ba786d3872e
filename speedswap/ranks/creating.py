"""A new table whose rows the ranks of a process group own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap.collectives import Kind, RankGroup, digest_of
from speedswap.ranks.on_disk import on_disk
from speedswap.ranks.sharded import ShardedStore
from speedswap.tables import init as initializers
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.files.shards_manifest import shard_name
from speedswap.tables.memory.host import resolve_storage
from speedswap.tables.opening import create_store
from speedswap.tables.record import Column, count, require_name, seed_of
from speedswap.tables.shards.owned import OwnedRows, whole_columns
from speedswap.tables.shards.owners import Owners
from speedswap.tables.table import Table

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

    from speedswap.tables.disk.options import DiskArguments

__all__ = ["create_sharded"]


def create_sharded(
    process_group: dist.ProcessGroup,
    num_embeddings: int,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    storage: str = "auto",
    engine: str = "auto",
    path: str | os.PathLike[str] | None = None,
    init: initializers.Initializer | Callable[..., Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    exist_ok: bool = True,
    **disk: Unpack[DiskArguments],
) -> Table:
    """Create a table that the ranks of a process group own together; every rank makes it.

    Args:
        process_group: the ranks.
        path: a directory, in which this rank's rows are a table of their own. Rows that are there already are taken up,
            also those of another number of ranks; then seed and initial values are those that they were made with.
        exist_ok: False to refuse a path on disk where anything is already, as one process does.

    The other arguments and errors are those of :meth:`speedswap.Table.create`; they are the same on every rank, but for
    ``name``, ``storage``, ``engine``, ``path`` and those of the disk. If one rank fails, none has a table.
    """
    group = RankGroup.of(process_group)
    owners = Owners(count("num_embeddings", num_embeddings), len(group))
    resolved = initializers.resolve(init)
    row_shape = (count("embedding_dim", embedding_dim),)
    weight = Column("weight", row_shape, dtype, resolved, zero_row, stored_dtype, rounding)
    require_name(name)
    seed = group.agree_on_seed(seed_of(seed))
    options = DiskOptions(**disk).require()
    name = name or (f"table-{group.next_number}" if path is None else Path(path).absolute().name)
    settings = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "dtype": dtype, "zero_row": zero_row}
    settings |= {"stored_dtype": stored_dtype, "rounding": rounding, "init": resolved.to_json()}
    group.require_same_settings(f"table {name!r}", settings)

    with group.main.task(Kind.MAKE) as task:
        if resolved.is_given:
            group.require_alike([digest_of(rows) for rows in resolved.given()], f"the rows of table {name!r}")
        held = replace(weight, init=OwnedRows(resolved, owners, group.rank, zero_row), zero_row=None)
        if resolve_storage(storage, path) == "disk" and path is not None and not options.scratch:
            place = Path(path).absolute()
            own, torn, was_found = on_disk(
                group, task, owners, place, (weight, held), seed=seed, name=name, disk=options, exist_ok=exist_ok
            )
            task.finish()
            store = ShardedStore(own, owners, group, name=own.name, weight=whole_columns(own.columns)["weight"])
            store.torn, store.was_found = torn, was_found
            return Table(store)
        made = create_store(
            owners.rows_of(group.rank),
            held,
            storage=storage,
            engine=engine,
            path=None if path is None else Path(path) / shard_name(group.rank, len(group)),
            seed=seed,
            name=name,
            disk=options,
        )
        try:
            task.round()
        except BaseException:
            Table(made).remove()
            raise
        task.finish()
    return Table(ShardedStore(made, owners, group, name=name, weight=weight))
