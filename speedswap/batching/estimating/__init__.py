"""What a training step takes of memory, before it is taken."""

from speedswap.batching.estimating.estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
