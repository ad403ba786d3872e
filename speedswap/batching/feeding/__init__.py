"""Samples read lazily, within a budget of host memory."""

from speedswap.batching.feeding.feed import Feed, feed

__all__ = ["Feed", "feed"]
