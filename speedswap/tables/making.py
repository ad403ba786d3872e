"""Create the stores of new tables, and keep id maps with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from speedswap.tables import init as initializers
from speedswap.tables.id_map import IdMap
from speedswap.tables.init import Initializer
from speedswap.tables.initial import require_functions_of_row
from speedswap.tables.record import Column, count, require_name, row_of, seed_of
from speedswap.tables.storage import Storage
from speedswap.tables.store import RowStore


def create_store(
    place: Storage,
    num_embeddings: int,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    init: Initializer | Callable[..., Any] | None = None,
    seed: int = 0,
    name: str | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
) -> RowStore:
    """Create the store of a table in a place; the other arguments and errors are those of :meth:`Table.create`."""
    num_embeddings = count("num_embeddings", num_embeddings)
    embedding_dim = count("embedding_dim", embedding_dim)
    seed = seed_of(seed)
    require_name(name)
    zero_row = row_of(zero_row, num_embeddings)
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"dtype is {dtype}, whose scales are not in the rows; use torch.int8 and store scales apart")
    weight = Column("weight", (embedding_dim,), dtype, initializers.resolve(init), zero_row, stored_dtype, rounding)
    weight.init.require_shape(num_embeddings, weight.row_shape)
    for rows in weight.init.given():
        weight.require_storable(rows)
    return place.create(num_embeddings, weight, seed=seed, name=name)


def map_for(store: RowStore, id_map: IdMap) -> IdMap:
    """Return the map to keep with a store's rows for a given map; errors are those of `Table.set_id_map`."""
    facts = store.facts
    if id_map.num_rows != facts.num_embeddings:
        raise ValueError(
            f"id_map has rows 0 to {id_map.capacity}, and table {facts.name!r} rows 0 to {facts.num_embeddings - 1}; "
            "make the table with id_map.num_rows rows"
        )
    require_functions_of_row(store.columns, facts.name)
    id_map = store.notes.map_of(id_map)
    if id_map.evict is not None and id_map.holder() not in (None, store):
        raise ValueError(
            f"id_map evicts and belongs to another table, where evicted rows are reset; give table {facts.name!r} a "
            "separate map, or one with evict=None"
        )
    return id_map


def keep_map(store: RowStore, id_map: IdMap) -> None:
    """Keep a map that :func:`map_for` returned with a store's rows."""
    id_map.holder = weakref.ref(store)
    store.notes.id_maps[store.facts.part_name] = id_map
