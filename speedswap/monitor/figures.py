"""Figures of a model's parameters and tables, and of the GPU's caches of hot rows."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from speedswap._words import pip_install
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


def import_optional(name: str) -> Any:
    """Return a module of the ``monitor`` extra.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (name, package):
            raise
        raise ImportError(f"{package} is not installed: {pip_install(package, extra='monitor')}") from error


@contextmanager
def modes_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put each module of some models back in its mode, training or evaluation, at the end of the block."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def count_parameters(model: nn.Module, *, example: Any = None) -> Any:
    """Count a model's parameters, module by module, with ``torchinfo.summary``.

    Unlike torchinfo's, the totals count a parameter that several modules share once, and parameters outside of
    ``example``'s forward pass too. Each module stays in its training or evaluation mode.

    Args:
        model: the model.
        example: arguments of the model (a tensor, a tuple, or a dictionary of named ones) for one forward pass in
            evaluation mode, which finds shapes, bytes of the outputs and multiply-adds. torchinfo keeps the model alive
            afterwards.

    Returns:
        A ``torchinfo.ModelStatistics``: ``total_params``, ``trainable_params``, ``total_param_bytes``,
        ``total_mult_adds``, ``summary_list``; ``print`` shows a table.

    Raises:
        ImportError: torchinfo is not installed.

    >>> tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    >>> tied[1].weight = tied[0].weight
    >>> count_parameters(tied).total_params
    12
    """
    torchinfo = import_optional("torchinfo")
    columns = ["num_params", "params_percent", "trainable"]
    with modes_kept([model]):
        statistics = torchinfo.summary(
            model,
            input_data=example,
            col_names=columns if example is None else ["output_size", *columns, "mult_adds"],
            depth=1 + max(name.count(".") + 1 for name, _ in model.named_modules()),
            row_settings=["depth", "var_names"],
            verbose=0,
        )
    parameters = list(model.parameters())
    statistics.total_params = sum(parameter.numel() for parameter in parameters)
    statistics.trainable_params = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    statistics.total_param_bytes = sum(parameter.nbytes for parameter in parameters)
    return statistics


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
