"""Hits and misses of the GPU's caches of hot rows."""

from __future__ import annotations

from torch import nn

from speedswap.kernels import HotCounts
from speedswap.tables import Table

__all__ = ["HotCounts", "hot_rows"]


def hot_rows(model: nn.Module | Table) -> dict[Table, HotCounts]:
    """Return what the caches of hot rows have done so far, without waiting for the GPU.

    The numbers are those of the last admission of rows that the GPU has completed: of some steps ago.

    Args:
        model: a model with embeddings, or a table.

    Returns:
        Rows found in the cache or not, bytes that crossed the bus, and admissions, by table. Tables without a cache are
        left out: ``Pinned(hot_bytes=…)`` asks for one, and the first step on a GPU makes it.

    >>> import speedswap
    >>> hot_rows(speedswap.Embedding(1000, 8, storage="pageable"))
    {}
    """
    tables = [model] if isinstance(model, Table) else [getattr(module, "table", None) for module in model.modules()]
    caches = {table: table.store.notes.hot for table in tables if isinstance(table, Table)}
    return {table: cache.counts() for table, cache in caches.items() if cache is not None}
