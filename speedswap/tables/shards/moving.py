"""Rows moved from one division over ranks to another, a piece at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.tables.block import Block
from speedswap.tables.disk.options import DiskOptions
from speedswap.tables.files.manifest_file import SHARD
from speedswap.tables.initial import starts_of
from speedswap.tables.opening import open_store
from speedswap.tables.shards.owned import whole_column
from speedswap.tables.shards.owners import InOrder, Owners
from speedswap.tables.table import Table

__all__ = ["Shard", "own_shard", "place_rows", "remove_former", "take_shards"]

_PIECE_BYTES = 8 << 20
_CACHE_BYTES = 64 << 20
_log = logging.getLogger("speedswap")


class Shard(NamedTuple):
    """The rows of a table that one of its owners has.

    Attributes:
        table: of these rows, numbered by their places.
        owners: the division that gives them these places.
        rank: the owner.
    """

    table: Table
    owners: Owners | InOrder
    rank: int


def own_shard(table: Table) -> Shard:
    """Return the rows of a table that are in this process: all rows, or those that this rank owns."""
    joint = table.store.joint
    if joint is None:
        return Shard(table, InOrder(table.num_embeddings), 0)
    return Shard(joint.own, joint.owners, joint.group.rank)


def place_rows(places: Tensor, source: Shard, target: Shard) -> tuple[Tensor, Tensor]:
    """Return which rows of a shard are another one's too, as a mask over their places, and where they are there."""
    ids = source.owners.ids(places, source.rank)
    owned = (ids < source.owners.num_embeddings) & (target.owners.of(ids) == target.rank)
    return owned, target.owners.places(ids[owned], target.rank)


def take_shards(target: Shard, sources: Sequence[Shard], columns: Sequence[str]) -> None:
    """Overwrite columns of a shard by those of the shards that its rows are in, all columns of a piece at once.

    Args:
        target: every row of which is in one of the sources.
        sources: the shards of another division of the same table, or some of them.
        columns: names of columns that all have, of one dtype and row shape.
    """
    for source in sources:
        for there, values in _pieces(source, target, columns):
            target.table.give_back(Block(there, {}), values)


def _pieces(source: Shard, target: Shard, columns: Sequence[str]) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Yield rows of the source that are the target's: their places there, and their values."""
    table = source.table
    if _begins_as(target, source, columns):  # the others have the same initial values in both
        for places, _ in table.store.written_rows():
            owned, there = place_rows(places, source, target)
            places = places[owned]
            if len(places):
                yield there, table.lease(places, columns=columns).columns
        return
    shared = source.owners.places_shared(source.rank, target.owners, target.rank)
    step = max(1, _PIECE_BYTES // max(1, sum(column.row_bytes for column in table.columns.values())))
    for start in range(shared.start, shared.stop, step):
        places = torch.arange(start, min(start + step, shared.stop))
        owned, there = place_rows(places, source, target)
        places = places[owned]
        if len(places):
            yield there, table.lease(places, columns=columns, device=torch.device("cpu")).columns


def _begins_as(target: Shard, source: Shard, columns: Sequence[str]) -> bool:
    """Return whether rows that were never written are equal in two shards, and none was written in the target."""
    stores, files = [shard.table.store for shard in (target, source)], target.table.store.files
    ours, theirs = (starts_of(store.columns, store.origins, whole_column) for store in stores)
    return (
        files is not None
        and files.is_untouched
        and target.table.seed == source.table.seed
        and {*columns} == {*ours}
        and all(ours[name] == theirs[name] for name in columns)
    )


def remove_former(path: Path, world_size: int, is_needed: Callable[[Table], bool]) -> None:
    """Remove the rows of other numbers of ranks.

    Args:
        path: of the table of all ranks.
        world_size: their present number.
        is_needed: whether a checkpoint may refer to such rows, given as a table.
    """
    for place in sorted(path.iterdir()):
        if SHARD.fullmatch(place.name) and not place.name.endswith(f"-of-{world_size}") and not place.is_symlink():
            with suppress(OSError, TableFormatError):  # another process has it
                table = Table(open_store(place, disk=DiskOptions(cache_bytes=_CACHE_BYTES)))
                if is_needed(table):
                    table.close()
                else:
                    table.remove()
                    _log.info("removed %s, whose rows other ranks have now", place)
