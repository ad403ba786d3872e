"""Rows owned by the ranks of a job: a table that several processes hold and train together."""

from speedswap.ranks.ahead import LookupsAhead, RowsAhead
from speedswap.ranks.creating import create_sharded
from speedswap.ranks.key_route import owners_of_keys
from speedswap.ranks.keys import ShardedIdMap
from speedswap.ranks.sharded import ShardedStore

__all__ = ["LookupsAhead", "RowsAhead", "ShardedIdMap", "ShardedStore", "create_sharded", "owners_of_keys"]
