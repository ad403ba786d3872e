"""Which processes train a model together, and how."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from speedswap.batching.alone import Alone

__all__ = ["ranks_of"]


def ranks_of(modules: Sequence[nn.Module]) -> Alone:
    """How the processes that train these modules work together."""
    return Alone()
