"""Tables divided among owners: the arithmetic of it, and the shards in files as one process reads them."""

from speedswap.tables.shards.owners import InOrder, Owners
from speedswap.tables.shards.parts import Shard, own_shard, place_rows, take_shards

__all__ = ["InOrder", "Owners", "Shard", "own_shard", "place_rows", "take_shards"]
