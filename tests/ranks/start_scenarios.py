"""Tables on disk that ranks open or recreate, where a start fails or has other settings."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from outcomes import error_of
from places import owned

import speedswap
from speedswap.swapping.collections import group as groups

ROWS = 8


def files_in(folder):
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.name in ("MANIFEST", "HEAD")
    )


def collection(group, folder, names="ab", rows=ROWS, width=4):
    """Return a collection of tables on disk, the second in a separate group unless its width is 2."""
    configs = [
        speedswap.EmbeddingConfig(
            name=name,
            num_embeddings=ROWS if place == 0 else rows,
            embedding_dim=2 if place == 0 else width,
            feature_names=[name],
            init=speedswap.init.zeros(),
        )
        for place, name in enumerate(names)
    ]
    return speedswap.EmbeddingCollection(configs, storage=owned(group, path=folder))


def first_of(group, folder, **settings):
    """Return a column of the first table, of a collection that is closed again."""
    tables = collection(group, folder, **settings)
    found = next(iter(tables.tables.values())).read(0, ROWS)[:, 0]
    tables.close()
    return found


def train_on_disk(group, folder, **settings):
    tables = collection(group, folder, **settings)
    for number, table in enumerate(tables.tables.values()):
        table.write(0, torch.full((ROWS, table.embedding_dim), 7.0 + number))
    tables.close()


def start_again(group, folder):
    """Train, start with another number of rows, then with the right one; return what the first start has raised."""
    train_on_disk(group, folder)
    said = error_of(lambda: collection(group, folder, rows=ROWS + 1))
    return said, first_of(group, folder)


def fail_to_begin(group, folder):
    """Let a new collection fail at its second group; return the error and what is there, then a column of a new one."""
    make = groups._range

    def fails(config, values):
        if config.name == "b":
            raise MemoryError("no room")
        return make(config, values)

    groups._range = fails
    said = error_of(lambda: collection(group, folder))
    groups._range = make
    torch.distributed.barrier(group)
    left = files_in(folder)
    torch.distributed.barrier(group)
    return said, left, first_of(group, folder)


def remove(group, folder):
    """Remove a table; return what is left, and a column of a new one in its place."""
    made = {"storage": owned(group, path=f"{folder}/items")}
    items = speedswap.Embedding(ROWS, 2, init=speedswap.init.constant(1.0), **made)
    items.table.remove()
    torch.distributed.barrier(group)
    left = os.listdir(folder)
    torch.distributed.barrier(group)
    again = speedswap.Embedding(ROWS, 2, init=speedswap.init.constant(2.0), **made)
    return left, again.read()[:, 0]


def save_over_itself(group, folder):
    """Train, save a table in its own place, train on; return the error and a column, from memory and from files."""
    items = speedswap.Embedding(ROWS, 2, init=speedswap.init.zeros(), storage=owned(group, path=f"{folder}/items"))
    optimizer = torch.optim.SGD(items.parameters(), 1.0)

    def step():
        optimizer.zero_grad()
        items(torch.arange(ROWS)).sum().backward()
        optimizer.step()

    step()
    said = error_of(lambda: items.table.save(f"{folder}/items", overwrite=True))
    step()
    found = items.read()[:, 0]
    items.table.close()
    again = speedswap.Embedding(ROWS, 2, storage=owned(group, path=f"{folder}/items"))
    return said, found, again.read()[:, 0]


def begin_with_others(group, folder, settings):
    """Train, start with other tables of the same size; return what that has raised, and a column of the first one."""
    train_on_disk(group, folder, width=2)
    said = error_of(lambda: collection(group, folder, width=2, **settings))
    return said, first_of(group, folder, width=2)


def switch_again(group, folder):
    """Make a switcher's collection, fill it, and make and load it again; return errors, and a column of the rows."""

    def factory():
        place = owned(group, path=f"{folder}/words")
        return speedswap.ModelFactory(torch.nn.Embedding(4, 2), ROWS, 2, storage=place)

    weights = factory()
    weights.zerosInit()
    weights.table.write(0, torch.full((ROWS, 2), 7.0))
    weights.table.close()
    said = [error_of(factory().zerosInit), error_of(lambda: factory().loadCupy(__file__))]
    weights = factory()
    weights.loadCupy(f"{folder}/words")
    found = weights.getNumpyVersion()[:, 0]
    weights.table.close()
    return said, found


def load_on_meta(group):
    """Build on meta, then load whole rows, and each rank's part of them; return what each of the two has then."""
    rows = torch.arange(2.0 * ROWS).view(ROWS, 2)
    found = []
    for load in ({"weight": rows}, None):
        with torch.device("meta"):
            items = speedswap.Embedding(ROWS, 2, storage=owned(group))
            tables = collection(group, None)
        items.load_state_dict(load or found[0].state_dict())
        tables.load_state_dict({"embeddings.a.weight": rows, "embeddings.b.weight": rows.repeat(1, 2)})
        optimizer = torch.optim.SGD([*items.parameters(), *tables.parameters()], lr=1.0)
        ids = torch.arange(ROWS)
        pair = tables({"a": ids, "b": ids})
        (items(ids).sum() + pair["a"].values().sum() + pair["b"].values().sum()).backward()
        optimizer.step()
        found.append(items)
        found.append(tables)
    return [items.read(), tables.tables["a"].read(), tables.tables["b"].read()]
