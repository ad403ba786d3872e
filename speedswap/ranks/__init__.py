"""Rows owned by ranks: a table that several processes hold together, behind the door that every store has."""

from speedswap.ranks.ahead import LookupsAhead, RowsAhead
from speedswap.ranks.alone import joint_store
from speedswap.ranks.creating import create_sharded
from speedswap.ranks.key_route import owners_of_keys
from speedswap.ranks.keys import Added, ShardedIdMap
from speedswap.ranks.moving import Shard, own_shard, place_rows, take_shards
from speedswap.ranks.on_disk import remove_former
from speedswap.ranks.owned import OwnedRows
from speedswap.ranks.owners import InOrder, Owners
from speedswap.ranks.route import Route, Routes, Wanted
from speedswap.ranks.saving import require_shared
from speedswap.ranks.sharded import Lent, ShardedStore

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
