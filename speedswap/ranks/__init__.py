"""Tables whose rows are partitioned over the ranks of a job, which train them together."""

from speedswap.ranks.ahead import LookupsAhead, RowsAhead
from speedswap.ranks.keys import ShardedIdMap
from speedswap.ranks.route import owners_of_keys
from speedswap.ranks.sharded import ShardedStore
from speedswap.ranks.storage import Ranks

__all__ = ["LookupsAhead", "Ranks", "RowsAhead", "ShardedIdMap", "ShardedStore", "owners_of_keys"]
