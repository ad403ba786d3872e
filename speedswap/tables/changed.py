"""Rows that differ from their initial values, or from an earlier commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speedswap.tables.disk.store import LogStore
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import CHUNK_ROWS, chunks_of
from speedswap.tables.initial import initial_values, is_lazy, with_sources
from speedswap.tables.record import Column
from speedswap.tables.store import Commits, JointRows, RowStore, WrappedStore, innermost

_CPU = torch.device("cpu")


def commits_of(store: RowStore) -> Commits:
    """Return the held commits of a table's store.

    Raises:
        TypeError: it keeps none.
    """
    commits = None if store.files is None else store.files.commits
    if commits is None:
        raise TypeError(
            f"table {store.facts.name!r} keeps no commits to compare with (storage {store.facts.storage!r}); put "
            "it on disk with storage=speedswap.Disk(path), without scratch and without ranks"
        )
    return commits


def changed_rows(store: RowStore, columns: Sequence[str], since: int | None = None) -> Tensor:
    """Return the rows that were changed since a held commit, or that may differ from their initial values.

    Args:
        store: the table's; of ranks that own the rows together, every one must call this.
        columns: the columns to compare with initial values, where no log knows the rows that were written.
        since: the number of the commit; None for initial values.

    Returns:
        Ids, int64, ascending. Every row, if initial values cannot be computed again.

    Raises:
        TypeError, ValueError: the table keeps no commits, or not this one.
    """
    facts, log, idle = store.facts, innermost(store), _idle(store)
    if isinstance(log, JointRows) and since is None:
        return log.changed_rows(columns)
    rows = range(facts.first_row, facts.first_row + facts.num_embeddings)
    missed = idle is not None and idle.steps is not None and idle.steps.count > 0
    if since is not None:
        commits_of(store)
        assert isinstance(log, LogStore)
        take_missed_steps(store)
        return log.changed_since(since, rows) - rows.start
    if not all(is_lazy(store.columns[name]) for name in columns):
        return torch.arange(facts.num_embeddings)
    if isinstance(log, LogStore) and not missed:
        ids = log.log.written(rows.start, rows.stop) - rows.start
        if log.manifest.group_rows == 1:
            return ids
        pieces: Iterator[Tensor] = iter(torch.split(ids, CHUNK_ROWS))
    else:
        pieces = (torch.arange(some.start, some.stop) for some in chunks_of(facts.num_embeddings))
    compared = {name: store.columns[name] for name in columns}
    return torch.cat([ids[_differ(store, compared, ids)] for ids in pieces if len(ids)] or [torch.arange(0)])


def take_missed_steps(store: RowStore) -> None:
    """Write every row of a table with the steps that it has missed, so that its log has them."""
    if (idle := _idle(store)) is not None:
        idle.bring_up_to_date()


def _idle(store: RowStore) -> IdleStore | None:
    while isinstance(store, WrappedStore):
        if isinstance(store, IdleStore):
            return store
        store = store.inner
    return None


def _differ(store: RowStore, columns: dict[str, Column], ids: Tensor) -> Tensor:
    """Return a mask of the rows whose bits differ from their initial values."""
    found, facts = store.gather(ids, [*columns], _CPU), store.facts
    initial = initial_values(with_sources(store.columns, columns), ids, facts.seed, facts.num_embeddings)
    differ = torch.zeros(len(ids), dtype=torch.bool)
    for name, column in columns.items():
        ours, theirs = (_bytes_of(each) for each in (found[name], column.as_read(initial[name])))
        differ |= (ours != theirs).any(1)
    return differ


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), rows[:1].numel()).view(torch.uint8)
