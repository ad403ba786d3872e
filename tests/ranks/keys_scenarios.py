"""Scenarios of id maps: training by keys, eviction, errors. The same code runs in one process, without a group."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from signal import SIGKILL

import torch
from places import owned

import speedswap
from speedswap.collectives import RankGroup
from speedswap.errors import IdMapFullError, PeerError
from speedswap.ranks import owners_of_keys

STEPS, BATCH, WIDTH = 8, 24, 3
CUTS = {1: [0, 24], 2: [0, 17, 24], 3: [0, 5, 5, 24], 4: [0, 9, 10, 20, 24]}  # uneven, and one of three is empty
KINDS = {
    "int64": {},
    "hashed": {"keys": "hashed"},
    "exact": {"keys": "exact"},
    "admit": {"admit_after": 3},
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu", "admit_after": 2},
}


def mine(group, batch):
    """Return this rank's part of a batch."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    return batch[CUTS[size][rank] : CUTS[size][rank + 1]]


def as_given(kind, numbers):
    """Return keys as the map takes them."""
    return [f"key {number}" for number in numbers.tolist()] if kind in ("hashed", "exact") else numbers


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        numbers = (torch.randn(BATCH, generator=generator).abs() * 40).long() * 7919 - 1000
        yield numbers, torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def train_embedding(group, kind, *, begin=0, end=STEPS, folder=None, storage="auto"):
    """Return losses, keys known, their rows and weights, after some steps of Adam from a checkpoint on.

    Args:
        begin, end: the steps.
        folder: of the checkpoints: one is loaded before the steps, unless the first is among them, and one is saved.
    """
    id_map = speedswap.IdMap(200, **KINDS[kind])
    items = speedswap.Embedding(
        id_map.num_rows, WIDTH, id_map=id_map, seed=5, dtype=torch.float64, storage=owned(group, reduction="sum")
    )
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    if begin:
        speedswap.load_checkpoint(folder, items, optimizer)
    losses = []
    every = list(batches())[begin:end]
    ahead = speedswap.lookahead(every, {items: lambda batch: as_given(kind, mine(group, batch[0]))})
    for numbers, wanted in ahead:
        loss = ((items(as_given(kind, mine(group, numbers))) - mine(group, wanted)) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if folder is not None:
        speedswap.save_checkpoint(folder, items, optimizer, step=end)
        items.table.save(f"{folder}/table-{end}")
    keys = as_given(kind, torch.arange(150) * 7919 - 1000)
    rows = items.id_map.lookup(keys)
    return losses, len(items.id_map), rows.tolist(), items.read(rows).tolist()


def train_collection(group):
    """Return the same of tables with keys of three kinds and one with ids, in two stores."""
    maps = {"user": speedswap.IdMap(200), "word": speedswap.IdMap(200, keys="exact"), "page": None}
    configs = [
        speedswap.EmbeddingBagConfig(
            name=name,
            num_embeddings=100 if id_map is None else id_map.num_rows,
            embedding_dim=WIDTH,
            id_map=id_map,
            seed=7,
            dtype=torch.float64,
        )
        for name, id_map in maps.items()
    ]
    ads = speedswap.IdMap(200, evict="lru")
    ad = speedswap.EmbeddingBagConfig(
        name="ad", embedding_dim=2, id_map=ads, seed=8, dtype=torch.float64, feature_names=["seen", "bought"]
    )
    tables = speedswap.EmbeddingBagCollection([*configs, ad], storage=owned(group, reduction="sum"))
    optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
    losses = []
    for (numbers, wanted), (others, _) in zip(batches(1), batches(2), strict=True):
        numbers, others, wanted = (mine(group, each) for each in (numbers, others, wanted))
        words = as_given("exact", others)
        features = {
            "user": numbers,
            "word": (words, torch.arange(len(words))),
            "page": others.abs() % 100,
            "seen": others,
            "bought": numbers,
        }
        loss = (tables(features).values() * wanted.sum(1, keepdim=True)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    numbers = torch.arange(150) * 7919 - 1000
    rows = {name: id_map.lookup(as_given(id_map.keys, numbers)) for name, id_map in tables.id_maps.items()}
    read = {name: tables.tables[name].read()[found].tolist() for name, found in rows.items()}
    return losses, {name: len(id_map) for name, id_map in tables.id_maps.items()}, read, tables.tables["page"].read()


def evict(group, policy, admit_after):
    """Return which keys have a row after batches of more keys than rows, and those of a map for each owner's keys."""
    capacity, size = 40, group.size()
    items = speedswap.Embedding(
        capacity + 1,
        2,
        id_map=speedswap.IdMap(capacity, evict=policy, admit_after=admit_after),
        seed=3,
        storage=owned(group, reduction="sum"),
    )
    shares = [capacity // size + (rank < capacity % size) for rank in range(size)]
    expected = [speedswap.IdMap(share, evict=policy, admit_after=admit_after) for share in shares]
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(2)
    start = items.read()
    every = torch.arange(300)
    for _ in range(12):
        keys = (torch.randn(20, generator=generator).abs() * 60).long()
        owner = owners_of_keys(keys, size)
        for rank, each in enumerate(expected):
            each.add(keys[owner == rank])
        was = items.id_map.lookup(every)
        half = len(keys) // size
        optimizer.zero_grad()
        begin = group.rank() * half
        end = begin + half if group.rank() < size - 1 else len(keys)
        items(keys[begin:end]).sum().backward()
        before = items.read()
        optimizer.step()
        rows = items.id_map.lookup(every)
        new = rows[(rows > 0) & (rows != was)]
        assert torch.equal(before[new], start[new])  # a row starts over with its key
    owner = owners_of_keys(every, size)
    wanted = torch.stack([expected[rank].lookup(every[[key]])[0] > 0 for key, rank in enumerate(owner.tolist())])
    taken = rows[rows > 0]
    return (rows > 0).tolist(), wanted.tolist(), len(taken) == len(taken.unique()), len(items.id_map)


def come_back(group, others):
    """Return the rows of five keys that came twice, with other keys on rank 0 in between."""
    capacity, none, mine = 20, torch.empty(0, dtype=torch.int64), group.rank() == 0
    id_map = speedswap.IdMap(capacity, admit_after=2)
    items = speedswap.Embedding(capacity + 1, 1, id_map=id_map, storage=owned(group, reduction="sum"))
    five = torch.arange(1, 6)
    for keys in [five, *torch.arange(100, 100 + others).split(1), five]:
        items(keys if mine else none)
    return items.id_map.lookup(five).tolist()


def evict_and_resume(group, policy, admit_after, folder, begin=0):
    """Train with more keys than rows, both straight on and from a checkpoint, and return both results.

    Args:
        folder: of the checkpoint: one is saved after two steps.
        begin: the first step; a checkpoint is loaded before it, unless it is 0.
    """

    def training():
        ids = speedswap.IdMap(41, evict=policy, admit_after=admit_after)
        rows = speedswap.Embedding(42, 2, id_map=ids, seed=3, storage=owned(group, reduction="sum"))
        return rows, torch.optim.Adam(rows.parameters(), lr=0.1)

    def train(rows, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + group.rank())
            optimizer.zero_grad()
            rows((torch.randn(8, generator=generator).abs() * 60).long()).square().sum().backward()
            optimizer.step()

    rows, optimizer = training()
    if begin:
        speedswap.load_checkpoint(folder, rows, optimizer)
    train(rows, optimizer, range(begin, begin + 2))
    speedswap.save_checkpoint(folder, rows, optimizer)
    again, its_optimizer = training()
    speedswap.load_checkpoint(folder, again, its_optimizer)
    found = []
    for each, its in ((rows, optimizer), (again, its_optimizer)):
        train(each, its, range(begin + 2, begin + 12))
        known = each.id_map.lookup(torch.arange(300))
        found.append((each.id_map.share, known.tolist(), each.read().tolist(), len(each.id_map)))
    return found


def lose_the_gradient(group):
    """Return the weights of a row that goes to another key between two lookups of a step, and its initial values."""
    size = group.size()
    id_map = speedswap.IdMap(size, evict="lru")
    items = speedswap.Embedding(
        size + 1, 2, id_map=id_map, seed=3, dtype=torch.float64, storage=owned(group, reduction="sum")
    )
    numbers = torch.arange(100)
    first, second = numbers[owners_of_keys(numbers, size) == 1][:2].view(2, 1)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    nothing = numbers[:0]
    is_asking = group.rank() == 0
    old = items(first if is_asking else nothing)
    new = items(second if is_asking else nothing)
    (old.sum() + new.sum()).backward()
    start = items.read(torch.tensor([1]))
    optimizer.step()
    rows = items.id_map.lookup(torch.cat([first, second])).tolist()
    return rows, start.tolist(), items.read(torch.tensor([1])).tolist()


def fill(group):
    """Return the errors of full maps on each rank; nothing has changed then, and training goes on."""
    found = []
    for evict in (None, "lru"):
        id_map = speedswap.IdMap(10, evict=evict)
        items = speedswap.Embedding(11, 2, id_map=id_map, storage=owned(group))
        optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
        rank = group.rank()
        keys = torch.tensor([3 * rank, 3 * rank + 1])
        before = items(keys).detach()
        many = torch.arange(50, 200)
        many = many[owners_of_keys(many, group.size()) == 1][:20]  # too many for that rank's share of rows
        rows = items.id_map.lookup(torch.arange(50))
        assert len(items.id_map) == 2 * group.size()
        try:
            items(many if rank == 0 else keys)
        except (IdMapFullError, PeerError) as error:
            found.append(type(error).__name__)
        try:
            items(torch.tensor([0.5]) if rank == 1 else keys)
        except (TypeError, PeerError) as error:
            found.append(type(error).__name__)
        assert torch.equal(items.id_map.lookup(torch.arange(50)), rows)
        assert len(items.id_map) == 2 * group.size()
        assert torch.equal(items(keys), before)
        items(keys).sum().backward()
        optimizer.step()
        with suppress(speedswap.errors.IdMapError):
            id_map.lookup(keys)
            found.append("looked up in the map that was given away")
    return found


def look_up_at_own_pace(group):
    """Return the rows that keys got in passes of which ranks have made different numbers, and those they have after."""
    ranks, found = RankGroup.of(group), {}
    id_map = speedswap.IdMap(20, keys="exact", evict="lru")
    items = speedswap.Embedding(21, 2, id_map=id_map, storage=owned(group), init=speedswap.init.constant(0.5))
    lookups = [["a", "b"], ["c"], ["a", "d"]][group.rank() :]
    with ranks.own_pace.task(1):
        for keys in lookups:
            weights = items(keys)
            assert weights.requires_grad
            with torch.no_grad():
                found |= dict(zip(keys, items.id_map.lookup(keys).tolist(), strict=True))
        ranks.own_pace.round(0)
    keys = ["a", "b", "c", "d", "e"]
    rows = dict(zip(keys, items.id_map.lookup(keys).tolist(), strict=True))
    return found, rows, len(items.id_map)


def train_on_disk(group, path, begin, end):
    """Return losses, rows of keys and their weights, of a table on disk that is there from the second call on."""
    id_map = speedswap.IdMap(200, keys="exact", admit_after=2)
    place = None if group is None else path
    items = speedswap.Embedding(
        201, WIDTH, id_map=id_map, seed=5, dtype=torch.float64, storage=owned(group, path=place, reduction="sum")
    )
    optimizer = torch.optim.SGD(items.parameters(), lr=0.01)
    losses = []
    for numbers, wanted in list(batches())[begin:end]:
        loss = ((items(as_given("exact", mine(group, numbers))) - mine(group, wanted)) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = items.id_map.lookup(as_given("exact", torch.arange(150) * 7919 - 1000))
    found = rows.tolist(), items.read(rows).tolist()
    items.table.close()
    return losses, *found


def share_evicting_map(group, folder, kind):
    """Give an evicting map to two tables, new, in a collection, or as one has it from files; return errors."""
    id_map, said = speedswap.IdMap(4, evict="lru"), []
    more = {} if group is None else {"storage": owned(group)}
    kept = {"storage": owned(group, path=f"{folder}/kept")}
    if kind == "on disk" and group is not None:
        speedswap.Embedding(5, 2, id_map=speedswap.IdMap(4, evict="lru"), **kept).table.close()
    try:
        if kind == "collection":
            config = speedswap.EmbeddingConfig
            configs = [config(name=name, num_embeddings=5, embedding_dim=2, id_map=id_map) for name in "ab"]
            speedswap.EmbeddingCollection(configs, **more)
        else:
            first = speedswap.Embedding(5, 2, id_map=id_map, **(kept if kind == "on disk" else more))
            speedswap.Embedding(5, 2, id_map=id_map, **more)
            first.table.close()
    except ValueError as error:
        said.append(str(error))
    return said


def evict_on_disk(group, policy, path, close_before):
    """Return shares, the rows of keys, their weights and the number of keys, of a table on disk with too few rows.

    Args:
        close_before: steps before which the table is closed and opened again.
    """

    def opened():
        ids = speedswap.IdMap(41, evict=policy)
        rows = speedswap.Embedding(
            42, 2, id_map=ids, seed=3, dtype=torch.float64, storage=owned(group, path=path, reduction="sum")
        )
        return rows, torch.optim.SGD(rows.parameters(), lr=0.1)

    rows, optimizer = opened()
    for step in range(12):
        if step in close_before:
            rows.table.close()
            rows, optimizer = opened()
        generator = torch.Generator().manual_seed(100 * step + group.rank())
        optimizer.zero_grad()
        rows((torch.randn(8, generator=generator).abs() * 60).long()).square().sum().backward()
        optimizer.step()
    known = rows.id_map.lookup(torch.arange(300))
    found = rows.id_map.share, known.tolist(), rows.read().tolist(), len(rows.id_map)
    rows.table.close()
    return found


def evict_until_killed(group, folder, killed_at=None):
    """Train on disk, looking ahead, with more keys than rows, from the last checkpoint on.

    Args:
        folder: of rows and checkpoints.
        killed_at: the exchange between ranks in which the second rank ends; None for a training that completes.

    Returns:
        Steps before; rows of keys, all weights and all state.
    """
    items = speedswap.Embedding(
        42, 2, id_map=speedswap.IdMap(41, evict="lru"), seed=3, storage=owned(group, path=f"{folder}/rows")
    )
    optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
    begin = 0
    if os.path.exists(f"{folder}/checkpoints"):
        begin = speedswap.load_checkpoint(f"{folder}/checkpoints", items, optimizer).step
    loader = [
        (torch.randn(8, generator=torch.Generator().manual_seed(100 * step + group.rank())).abs() * 60).long()
        for step in range(begin, 12)
    ]
    if killed_at is not None and group.rank() == 1:
        lane = RankGroup.of(group).main
        last, exchange = lane.rounds + killed_at, lane.exchange_lines
        lane.exchange_lines = lambda *some: os.kill(os.getpid(), SIGKILL) if lane.rounds == last else exchange(*some)
    with suppress(PeerError) if killed_at is not None else nullcontext():
        for step, keys in enumerate(speedswap.lookahead(loader, {items: lambda keys: keys}, depth=2), begin + 1):
            optimizer.zero_grad()
            items(keys).square().sum().backward()
            optimizer.step()
            if step % 3 == 0:
                speedswap.save_checkpoint(f"{folder}/checkpoints", items, optimizer, step=step)
        known = items.id_map.lookup(torch.arange(300))
        return begin, (known.tolist(), items.read().tolist(), items.table.read(column="sum").tolist())
