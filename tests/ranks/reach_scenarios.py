"""Every interface to rows that ranks own: collections, given rows, initializers, whole tables, switchers, storages."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from places import owned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import speedswap
from speedswap.errors import DuplicateIdError, DuplicateRowsWarning

ROWS, DIM = 50, 4


def shares(whole, group):
    """Return a rank's part of what one process has; all of it without a group."""
    return whole if group is None else whole.chunk(group.size())[group.rank()]


# ---------------------------------------------------------------------- collections


def collection_of(kind, group):
    torch.manual_seed(0 if group is None else group.rank())  # seeds that are drawn are the first rank's
    bags, embeddings = speedswap.EmbeddingBagConfig, speedswap.EmbeddingConfig
    if kind == "bags":
        configs = [
            bags(name="user", num_embeddings=20, embedding_dim=DIM, padding_idx=2, feature_names=["u", "v"]),
            bags(name="item", num_embeddings=ROWS, embedding_dim=DIM, pooling="mean", init=nn.init.xavier_uniform_),
            bags(name="slow", num_embeddings=7, embedding_dim=2, pooling="max", seed=4),
        ]
        return speedswap.EmbeddingBagCollection(configs, storage=owned(group))
    if kind == "given":
        torch.manual_seed(0)
        old = {"u": nn.Embedding(20, DIM, padding_idx=2), "item": nn.Embedding(ROWS, DIM), "slow": nn.Embedding(7, 2)}
        old["u"].weight.data[2] = 1.5
        return speedswap.EmbeddingCollection.from_modules(old, storage=owned(group))
    configs = [embeddings(name="u", num_embeddings=20, embedding_dim=DIM, padding_idx=2),
               embeddings(name="item", num_embeddings=ROWS, embedding_dim=DIM),
               embeddings(name="slow", num_embeddings=7, embedding_dim=2, group="slow")]  # fmt: skip
    return speedswap.EmbeddingCollection(configs, storage=owned(group))


def train_collection(group, kind):
    """Return each table's rows before and after some steps, and those looked up."""
    tables = collection_of(kind, group)
    before = {name: table.read() for name, table in tables.tables.items()}
    optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        features = {
            "u": torch.randint(20, (12,), generator=generator),
            "item": torch.randint(ROWS, (12, 3), generator=generator),
            "slow": torch.randint(7, (12, 2), generator=generator),
        }
        if kind == "bags":
            features["v"] = torch.randint(20, (12, 2), generator=generator)
        features = {name: shares(ids, group) for name, ids in features.items()}
        optimizer.zero_grad()
        found = tables(features)
        if kind == "bags":
            loss = found.values().square().mean()
        else:
            loss = sum((each.values() ** 3).sum() / (12 * (1 if group is None else 1 / group.size()))
                       for each in found.values())  # fmt: skip
        loss.backward()
        optimizer.step()
    found = {name: each.read(torch.tensor([1, 2])) for name, each in tables._homes().items()}
    return before, {name: table.read() for name, table in tables.tables.items()}, found


# ---------------------------------------------------------------------- rows as a whole


INITS = {
    "normal": None,
    "uniform": speedswap.init.uniform(-0.5, 0.25),
    "constant": speedswap.init.constant(0.1),
    "zeros": speedswap.init.zeros(),
    "xavier": nn.init.xavier_normal_,
    "truncated": speedswap.init.from_torch(nn.init.trunc_normal_, std=0.02),
}


def initial_rows(group, name, dtype, stored_dtype=None, rows=ROWS):
    settings = {} if stored_dtype is None else {"stored_dtype": stored_dtype}
    items = speedswap.Embedding(rows, DIM, init=INITS[name], seed=9, padding_idx=0, dtype=dtype,
                                storage=owned(group), **settings)  # fmt: skip
    return items.read()


def initial_rows_of_all(group, cases):
    return [initial_rows(group, *case) for case in cases]


def given_rows(group, freeze):
    rows = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    items = speedswap.Embedding.from_pretrained(rows, freeze, padding_idx=3, storage=owned(group))
    bags = speedswap.EmbeddingBag.from_pretrained(rows, freeze, mode="sum", storage=owned(group, reduction="sum"))
    ids = shares(torch.arange(12), group)
    return items.read(), bags.read(), items(ids), bags(ids.view(-1, 1))


def filled_rows(group):
    """Fill, read and write whole tables and single rows, with different rows per rank."""
    items = speedswap.Embedding(ROWS, DIM, seed=3, dtype=torch.float64, storage=owned(group))
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    seen = []
    torch.manual_seed(4)
    nn.init.normal_(items.weight)
    seen.append(items.read())
    with torch.no_grad():
        items.weight.mul_(2).add_(1)
    seen.append(items.read())
    items.weight.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM))
    items.weight.data[3].fill_(-1)
    seen.append(items.read(torch.tensor([[3, 4], [3, 49]])))
    table = items.table
    mine = torch.arange(rank, 20, size)
    block = table.gather(mine)
    table.scatter(mine, block.weight * 10)
    mine = torch.arange(0, 20, 3) if rank == 0 else mine[:0]  # none on other ranks
    table.scatter(mine, table.gather(mine).weight + 0.5)
    seen.append(items.read())
    assert torch.equal(table.read(5, 9), seen[-1][5:9])
    items.eval()
    with torch.no_grad():
        looked_up = items(torch.arange(rank * 3))  # none on the first rank
    assert torch.equal(looked_up, seen[-1][: rank * 3])
    assert torch.equal(items.read(49), seen[-1][49])
    items.reset_parameters()
    seen.append(items.read())
    items.reset_parameters(speedswap.init.uniform(2.0, 3.0))
    seen.append(items.read())
    if group is not None and group.size() > 1:
        with pytest.raises(DuplicateIdError, match="by several ranks"):
            table.scatter(torch.tensor([7]), torch.ones(1, DIM, dtype=torch.float64))
    return seen


def refused(group):
    """Return the errors of invalid arguments."""
    said = []
    items = speedswap.Embedding(ROWS, DIM, storage=owned(group))
    for call in (
        lambda: speedswap.Embedding(ROWS, DIM, storage=owned(group, reduction="max")),
        lambda: speedswap.Embedding(ROWS, DIM, storage=replace(owned(group), local_to_rank=True)),
        lambda: speedswap.Embedding(ROWS, DIM, table=items.table, storage=owned(group)),
        lambda: speedswap.Embedding(ROWS + group.rank(), DIM, storage=owned(group)),
        lambda: copy.deepcopy(items),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    assert speedswap.Embedding(ROWS, DIM, table=items.table).table is items.table
    return said


# ---------------------------------------------------------------------- rows in fewer bytes, and in files


def train_compact(group, folder, storage, settings):
    """Train with gradients whose sums are exact in any order; return the rows' bits, and the state's."""
    if storage == "disk":
        path = Path(folder, "one" if group is None else f"of-{group.size()}", storage)
        storage = speedswap.Disk(path, cache_bytes=1 << 16)
    items = speedswap.Embedding(ROWS, DIM, seed=6, storage=owned(group, each=storage, reduction="sum"), **settings)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        ids = torch.randint(ROWS, (12,), generator=generator)
        signs = torch.randint(-3, 4, (12, DIM), generator=generator).float()
        if step == 3:
            ids, signs = ids[:2], signs[:2]
        if step == 4:
            ids, signs = ids[:0], signs[:0]
        ids, signs = (ids, signs) if group is None else (ids[group.rank() :: group.size()],
                                                         signs[group.rank() :: group.size()])  # fmt: skip
        optimizer.zero_grad()
        (items(ids) * signs).sum().backward()
        optimizer.step()
    columns = {name: items.table.columns[name] for name in items.table.columns}
    if group is None:
        return {name: items.table.read(column=name) for name in columns}, None
    store = items.table.store
    ids = store.owners.ids(torch.arange(len(store.own)), group.rank())
    used = ids < ROWS
    found = {name: store.own.read(column=name)[used] for name in columns}
    items.table.close()
    return found, ids[used]


# ---------------------------------------------------------------------- switchers


def train_switched(group, folder):
    """Train with SpeedTorch's switchers, each rank with a part of the batch; return rows and state."""
    torch.manual_seed(1)
    words = nn.Embedding(4, DIM)
    optimizer = torch.optim.Adam(words.parameters(), lr=0.1)
    more = {} if group is None else {"storage": owned(group)}
    weights = speedswap.ModelFactory(words, ROWS, DIM, **more)
    state = speedswap.OptimizerFactory(optimizer, ROWS, DIM, nn.ModuleDict({"words": words}), "words", **more)
    weights.customInit(nn.init.xavier_uniform_)
    weights.uniformDistributionInit(-1, 1)
    state.optInit()
    generator = torch.Generator().manual_seed(8)
    said = 0
    for step in range(4):
        ids = torch.randperm(ROWS, generator=generator)[:12]
        if step == 2:
            ids[[5, 11]] = ids[0].clone()  # of several ranks, or one: the last one stays
        positions = torch.arange(len(shares(ids, group)))
        ids = shares(ids, group)
        weights.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        words(positions).pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DuplicateRowsWarning)
            weights.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)
        said += len(caught)
    weights.saveCupy(Path(folder, "weights"))
    state.saveCupy(Path(folder, "state"))
    whole = weights.getNumpyVersion()
    assert np.array_equal(np.load(Path(folder, "weights.npy")), whole)
    weights.zerosInit()
    weights.loadCupy(Path(folder, "weights.npy"))
    state.optInit()
    state.loadCupy(Path(folder, "state.npz"))
    assert np.array_equal(weights.getNumpyVersion(), whole)
    return whole, state.getNumpyVersion(), said


# ---------------------------------------------------------------------- FSDP2, convert, two models


def train_under_fully_shard(group, clips):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    speedswap.convert(model, min_rows=ROWS, storage=owned(group))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (model[1], model[3], model):
            fully_shard(layer, mesh=mesh, ignored_params=speedswap.parameters_to_ignore(layer))
        assert isinstance(model[1].weight, DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(8)
    norms = []
    for _ in range(4):
        ids = shares(torch.randint(ROWS, (12,), generator=generator), group)
        optimizer.zero_grad()
        (model(ids) - 1).square().mean().backward()
        if clips:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, **clips)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    dense = [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in model[1:].parameters()]
    return model[0].read(), [each.detach() for each in dense], norms


def train_two_models(group):
    """Train two models in turn, one of which is freed on one rank only after lookups that went nowhere."""
    kept = []

    def make(seed):
        torch.manual_seed(seed)
        items = speedswap.Embedding(ROWS, DIM, dtype=torch.float64, storage=owned(group))
        return items, torch.optim.Adagrad(items.parameters(), lr=0.1)

    stale, _ = make(0)
    out = stale(torch.arange(3))
    if group is not None and group.rank() == 0:
        kept.append((stale, out))
    del stale, out
    first, second = make(1), make(2)
    generator = torch.Generator().manual_seed(8)
    for step in range(4):
        ids = shares(torch.randint(ROWS, (12,), generator=generator), group)
        rows = [items(ids) for items, _ in (first, second)]
        scale = 1 if group is None else group.size()
        for number in (0, 1) if step % 2 else (1, 0):  # two backward passes after both lookups
            (rows[number].pow(3).sum() * scale).backward()
        for _, optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        one, two = first[0](ids), first[0]((ids + 1) % ROWS)
        (one.pow(2).sum() * scale).backward()
        (two.pow(3).sum() * scale).backward()
        first[1].step()
        first[1].zero_grad()
    return first[0].read(), second[0].read()
