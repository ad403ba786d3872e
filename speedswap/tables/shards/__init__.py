"""Tables divided among owners: the arithmetic of it, and the shards in files as one process reads them."""

from speedswap.tables.shards.moving import Shard, own_shard, place_rows, take_shards
from speedswap.tables.shards.owners import InOrder, Owners

__all__ = ["InOrder", "Owners", "Shard", "own_shard", "place_rows", "take_shards"]
