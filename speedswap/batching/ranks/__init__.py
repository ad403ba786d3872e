"""Which processes train a model together, and how."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from speedswap.batching.ranks.alone import Alone
from speedswap.errors import BatchError

__all__ = ["ranks_of"]


def ranks_of(modules: Sequence[nn.Module]) -> Alone:
    """How the processes that train these modules work together; every rank has to ask, in the same order.

    Raises:
        BatchError: a module is replicated or sharded in a way that cannot be split.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    # Only here, since they need a torch that was built with distributed.
    from speedswap.batching.ranks.replicated import Replicated, replicas
    from speedswap.batching.ranks.sharded import Sharded, shard_roots

    wrapped, roots = replicas(modules), shard_roots(modules)
    if wrapped and roots:
        raise BatchError("the modules are partly replicated and partly sharded; give each kind its own splitter")
    return Replicated(wrapped) if wrapped else Sharded(roots) if roots else Alone()
