"""Copies of a store's rows in memory."""

from __future__ import annotations

import copy
from typing import get_args

import torch

from speedswap import kernels
from speedswap.tables.disk.layout import LogLayout
from speedswap.tables.fresh import FreshRows
from speedswap.tables.initial import is_lazy
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import host as storages
from speedswap.tables.record_groups import RecordGroups
from speedswap.tables.store import RowStore

__all__ = ["copy_rows", "layout_of"]


def layout_of(store: RowStore) -> LogLayout:
    """Return a layout of records on disk with the columns of a store, whose untouched rows are as in it."""
    return LogLayout.of([*store.columns.values()], store.origins)


def copy_rows(source: RowStore, kind: storages.MemoryKind | None = None, engine: str | None = None) -> LocalStore:
    """Return a store in memory with the same rows, attributes and id maps.

    Args:
        source: the rows.
        kind, engine: of the memory; by default those of the source, where it is in memory.
    """
    own = next((each for each in get_args(storages.MemoryKind) if each == source.storage), storages.default_kind())
    groups = RecordGroups(source.num_embeddings, kind or own, source.seed, source.name, engine=engine or source.engine)
    groups.add_unfilled(list(source.columns.values()))
    (group,) = groups
    fresh = FreshRows(layout_of(source), 1, source.num_embeddings, source.seed)
    if all(is_lazy(each.start) for each in fresh.layout.held):  # else every row was written
        for some in group.chunks(0, source.num_embeddings):
            rows = torch.arange(some.start, some.stop)
            fresh.fill(group.records(), torch.stack([rows, rows, torch.full_like(rows, -1)], dim=1))
    for rows, held in source.written_rows():
        parts = [kernels.Part(group.layout.offset(name), block) for name, block in held.items()]
        kernels.scatter_records(group.records(), rows, parts)
    copied = LocalStore(groups)
    copied.notes.take_over(source.notes, source.part_name)
    copied.notes.id_maps = copy.deepcopy(copied.notes.id_maps)
    return copied
