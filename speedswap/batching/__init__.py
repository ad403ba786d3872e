"""Batches larger than memory: split exactly, accumulated, and retried after running out of memory."""

from speedswap.batching import elastic, retry
from speedswap.batching.accumulating import AccumulatingOptimizer
from speedswap.batching.elastic import plan_accumulation
from speedswap.batching.estimate import MemoryEstimate, estimate_memory
from speedswap.batching.feeding import Feed, feed
from speedswap.batching.memory import LimitedMemory, is_out_of_memory
from speedswap.batching.nested import Batch, Padded, PerSample, Whole
from speedswap.batching.rollback import GradientKeeper
from speedswap.batching.splitter import BatchSplitter, Callback, Event, coupled

__all__ = [
    "AccumulatingOptimizer",
    "Batch",
    "BatchSplitter",
    "Callback",
    "Event",
    "Feed",
    "GradientKeeper",
    "LimitedMemory",
    "MemoryEstimate",
    "Padded",
    "PerSample",
    "Whole",
    "coupled",
    "elastic",
    "estimate_memory",
    "feed",
    "is_out_of_memory",
    "plan_accumulation",
    "retry",
]
