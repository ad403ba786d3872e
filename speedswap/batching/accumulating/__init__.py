"""An optimizer that steps once for several micro-batches."""

from speedswap.batching.accumulating.optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer"]
