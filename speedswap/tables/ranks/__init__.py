"""Rows owned by ranks: a table that several processes hold together, behind the door that every store has."""

from speedswap.tables.ranks.ahead import LookupsAhead, RowsAhead
from speedswap.tables.ranks.alone import joint_store
from speedswap.tables.ranks.creating import create_sharded
from speedswap.tables.ranks.key_route import owners_of_keys
from speedswap.tables.ranks.keys import Added, ShardedIdMap
from speedswap.tables.ranks.moving import Shard, own_shard, place_rows, take_shards
from speedswap.tables.ranks.on_disk import remove_former
from speedswap.tables.ranks.owned import OwnedRows
from speedswap.tables.ranks.owners import InOrder, Owners
from speedswap.tables.ranks.route import Route, Routes, Wanted
from speedswap.tables.ranks.saving import require_shared
from speedswap.tables.ranks.sharded import Lent, ShardedStore

__all__ = [
    "Added",
    "InOrder",
    "Lent",
    "LookupsAhead",
    "OwnedRows",
    "Owners",
    "Route",
    "Routes",
    "RowsAhead",
    "Shard",
    "ShardedIdMap",
    "ShardedStore",
    "Wanted",
    "create_sharded",
    "joint_store",
    "own_shard",
    "owners_of_keys",
    "place_rows",
    "remove_former",
    "require_shared",
    "take_shards",
]
