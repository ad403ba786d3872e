"""Tables of ranks over a base."""

from __future__ import annotations

import torch
from places import owned

import speedswap
from speedswap import init

NAME = "shard_*"
IDS = [[3, 8, 99], [8, 64, 99], [3, 8, 11]]


def train(group, folder, model):
    """Train a step in memory and on disk, and save a copy; return the rows of each."""
    base = init.of_tensors(model, NAME)
    found = []
    for path in (None, f"{folder}/t"):
        items = speedswap.Embedding(base.num_embeddings, base.embedding_dim, init=base, storage=owned(group, path=path))
        optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
        items(torch.tensor(IDS[group.rank()])).square().sum().backward()
        optimizer.step()
        found.append(items.read())
    items.table.save(f"{folder}/saved")
    items.table.close()
    return found


def resume(group, folder, model):
    """Open the table on disk with the base where it is now; return its rows, and those of its next openings."""
    base, place = init.of_tensors(model, NAME), owned(group, path=f"{folder}/t")
    items = speedswap.Embedding(base.num_embeddings, base.embedding_dim, init=base, storage=place)
    rows = items.read()
    items.table.close()
    with speedswap.Table.open(place) as table:
        again = table.read()
    with speedswap.Table.open(place, base=model) as table:
        return rows, again, table.read()


def refused(group, folder, other):
    """Open the table on disk over another base; return the error."""
    base, place = init.of_tensors(other, NAME), owned(group, path=f"{folder}/t")
    try:
        speedswap.Embedding(base.num_embeddings, base.embedding_dim, init=base, storage=place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
