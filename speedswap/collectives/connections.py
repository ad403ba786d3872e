"""Connections between processes, apart from those of torch's process groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["connect"]


def connect(process_group: dist.ProcessGroup, name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return gloo connections between processes, each of which has to ask for them.

    A group of torch's would not do: ``dist.new_group`` hangs unless the whole job calls it, or the ranks belong to
    equally many groups.

    Args:
        process_group: whose store the processes find each other through.
        name: of the connections; the same ranks may ask for some of one name again.
        ranks: the processes, as torch.distributed numbers them.
        timeout: of a collective.
    """
    # A store may outlive its group, and then has the addresses of one before it that had the same name.
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    store = distributed_c10d._world.pg_map[process_group][1]
    store = distributed_c10d.PrefixStore(f"speedswap/{name}/{members}", store)
    number = store.add(f"made by {dist.get_rank()}", 1)
    store = distributed_c10d.PrefixStore(str(number), store)
    gloo = distributed_c10d.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    return cast(dist.ProcessGroup, gloo)
