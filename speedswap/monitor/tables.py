"""Figures of a model's tables, for whatever records a training."""

from __future__ import annotations

from torch import nn

from speedswap.monitor.hot_rows import hot_rows
from speedswap.tables import Table

_OF_FILES = ("touched_rows", "log_bytes", "reusable_bytes")


def table_metrics(model: nn.Module | Table) -> dict[str, float]:
    """Return figures of each table, as MLflow, TensorBoard and other trackers take them.

    For every table: ``bytes``, the size of all rows with their state, and ``writes``, the number of batches written to
    it. For one on disk: ``touched_rows`` (rows ever written), ``log_bytes`` (the size of its log) and
    ``reusable_bytes`` (the free room in it). With an id map: ``keys``. With hot rows on a GPU: ``hot_share``, the share
    of gathered rows that were found there.

    Args:
        model: a model with embeddings, or a table.

    Returns:
        Numbers, by ``tables/<name of the module>/<figure>``; a table alone has its own name.

    Example:
        >>> import speedswap
        >>> speedswap.monitor.table_metrics(speedswap.Embedding(1000, 8, name="items", storage="pageable"))
        {'tables/items/bytes': 32000, 'tables/items/writes': 0}
    """
    named = {"": model} if isinstance(model, Table) else dict(model.named_modules())
    names: dict[Table, str] = {}
    for name, each in named.items():
        table = each if isinstance(each, Table) else getattr(each, "table", None)
        if isinstance(table, Table):
            names.setdefault(table, name or table.name)
    hot = hot_rows(model)
    found: dict[str, float] = {}
    for table, name in names.items():
        figures: dict[str, float] = {"bytes": table.nbytes, "writes": table.writes}
        details = {} if table.store.files is None else table.store.files.details()
        figures |= {each: details[each] for each in _OF_FILES if each in details}
        if maps := table.store.notes.id_maps:
            figures["keys"] = sum(map(len, maps.values()))
        if counts := hot.get(table):
            figures["hot_share"] = counts.gathered_hits / max(1, counts.gathered_hits + counts.gathered_misses)
        found |= {f"tables/{name}/{each}": value for each, value in figures.items()}
    return found
