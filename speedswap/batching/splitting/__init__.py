"""Split a batch: find sizes that fit, accumulate exactly, undo what failed."""

from speedswap.batching.splitting.splitter import BatchSplitter, coupled

__all__ = ["BatchSplitter", "coupled"]
