"""The shards of a table owned by ranks, and moves of rows between divisions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.tables.disk.cache import DiskOptions
from speedswap.tables.files.manifest import SHARD
from speedswap.tables.opening import open_store
from speedswap.tables.owners import InOrder, Owners, whole_column
from speedswap.tables.record import Block
from speedswap.tables.store import begin_alike
from speedswap.tables.table import Table

_log = logging.getLogger("speedswap")


_PIECE_BYTES = 8 << 20
_CACHE_BYTES = 64 << 20


class Shard(NamedTuple):
    """The rows of a table that one owner holds.

    Attributes:
        table: a table of these rows, numbered by place.
        owners: the division that defines the places.
        rank: the owner.
    """

    table: Table
    owners: Owners | InOrder
    rank: int


def own_shard(table: Table) -> Shard:
    """Return the rows of a table held by this process: all rows, or those that this rank owns."""
    joint = table.joint
    if joint is None:
        return Shard(table, InOrder(table.num_embeddings), 0)
    return Shard(joint.own, joint.owners, joint.group.rank)


def place_rows(places: Tensor, source: Shard, target: Shard) -> tuple[Tensor, Tensor]:
    """Return a mask over the places of one shard of the rows that both have, and their places in the other."""
    ids = source.owners.ids(places, source.rank)
    owned = (ids < source.owners.num_embeddings) & (target.owners.of(ids) == target.rank)
    return owned, target.owners.places(ids[owned], target.rank)


def take_shards(target: Shard, sources: Sequence[Shard], columns: Sequence[str]) -> None:
    """Overwrite columns of a shard from the shards of another division, all columns of a piece at once.

    Args:
        target: the shard to overwrite; each of its rows is in one of the sources.
        sources: the shards of another division of the same table, or some of them.
        columns: names of columns that all shards have, with the same dtype and row shape.
    """
    for source in sources:
        for places in _pieces(source, target, columns):
            owned, there = place_rows(places, source, target)
            if len(there):
                block = source.table.lease(places[owned], columns=columns, device=torch.device("cpu"))
                target.table.give_back(Block(there, {}), block.columns)


def _pieces(source: Shard, target: Shard, columns: Sequence[str]) -> Iterator[Tensor]:
    """Yield places in the source, which include every row that may differ in the target."""
    if _begins_as(target, source, columns):  # all other rows have the same initial values in both
        yield from (places for places, _ in source.table.store.written_rows())
        return
    shared = source.owners.places_shared(source.rank, target.owners, target.rank)
    step = max(1, _PIECE_BYTES // max(1, sum(column.row_bytes for column in source.table.columns.values())))
    for start in range(shared.start, shared.stop, step):
        yield torch.arange(start, min(start + step, shared.stop))


def _begins_as(target: Shard, source: Shard, columns: Sequence[str]) -> bool:
    """Return whether unwritten rows are equal in two shards and no row of the target was written."""
    ours, theirs, files = target.table.store, source.table.store, target.table.store.files
    is_untouched = files is not None and files.is_untouched
    return is_untouched and {*columns} == {*ours.columns} and begin_alike(ours, theirs, columns, whole_column)


def remove_former(path: Path, world_size: int, is_needed: Callable[[Table], bool]) -> None:
    """Remove shards left from other numbers of ranks.

    Args:
        path: of the table of all ranks.
        world_size: the current number of ranks.
        is_needed: returns whether a checkpoint may reference a table's rows.
    """
    for place in sorted(path.iterdir()):
        if SHARD.fullmatch(place.name) and not place.name.endswith(f"-of-{world_size}") and not place.is_symlink():
            with suppress(OSError, TableFormatError):  # in use by another process
                table = Table(open_store(place, disk=DiskOptions(cache_bytes=_CACHE_BYTES)))
                if is_needed(table):
                    table.close()
                else:
                    table.remove()
                    _log.info("removed %s; the current ranks have its rows", place)
