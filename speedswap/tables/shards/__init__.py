"""Tables partitioned among owners: the arithmetic, and shards in files as read by one process."""

from speedswap.tables.shards.owners import InOrder, Owners
from speedswap.tables.shards.parts import Shard, own_shard, place_rows, take_shards

__all__ = ["InOrder", "Owners", "Shard", "own_shard", "place_rows", "take_shards"]
