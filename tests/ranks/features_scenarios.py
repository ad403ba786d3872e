"""Collections and id maps over ranks, with a lookahead and under a splitter; one process does the same."""

from __future__ import annotations

import torch
from places import owned
from torch import nn

import speedswap

ROWS, DIM, STEPS = 60, 3, 4
CUTS = {1: [0, 24], 3: [0, 9, 9, 24]}  # uneven, and one of three ranks is empty
KINDS = {
    "int64": {},
    "hashed": {"keys": "hashed"},
    "exact": {"keys": "exact"},
    "admit": {"admit_after": 2},
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu", "admit_after": 2},
}


def mine(group, batch):
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    begin, end = CUTS[size][rank : rank + 2]
    return {name: each[begin:end] for name, each in batch.items()}


def batches():
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        yield {
            "user": torch.randint(ROWS, (24,), generator=generator),
            "item": torch.randint(ROWS, (24, 2), generator=generator),
            "key": (torch.randn(24, generator=generator).abs() * 30).long() * 7919 - 500,
            "other": (torch.randn(24, generator=generator).abs() * 30).long() * 7919 - 500,
            "wanted": torch.randn(24, 2 * DIM, generator=generator, dtype=torch.float64),
        }


def as_keys(kind, numbers):
    texts = kind in ("hashed", "exact")
    return [f"key {number}" for number in numbers.tolist()] if texts else numbers


class Net(nn.Module):
    """A collection of tables with ids, and with keys, and a layer.

    Args:
        group: the ranks; None for one process.
        kind: of the id map; "ids" for none.
        bags: whether to pool.
    """

    def __init__(self, group, kind, bags, init=None):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.bags = kind, bags
        config = speedswap.EmbeddingBagConfig if bags else speedswap.EmbeddingConfig
        more = {"embedding_dim": DIM, "dtype": torch.float64, "init": init}
        configs = [
            config(name="user", num_embeddings=ROWS, seed=1, padding_idx=3, **more),
            config(name="item", num_embeddings=ROWS, seed=2, **more),
        ]
        if kind != "ids":
            id_map = speedswap.IdMap(100, **KINDS[kind])
            configs.append(config(name="keyed", id_map=id_map, seed=3, feature_names=["key", "other"], **more))
        make = speedswap.EmbeddingBagCollection if bags else speedswap.EmbeddingCollection
        self.tables = make(configs, **({} if group is None else {"storage": owned(group)}))
        self.layer = nn.Linear(DIM, 2 * DIM, dtype=torch.float64)

    def features(self, batch):
        found = {"user": batch["user"], "item": batch["item"]}
        if self.kind != "ids":
            for name in ("key", "other"):
                keys = as_keys(self.kind, batch[name])
                found[name] = keys if isinstance(keys, torch.Tensor) else (keys, torch.arange(len(keys)))
        return found

    def forward(self, batch):
        found = self.tables(self.features(batch))
        samples = len(batch["user"])
        each = [found] if self.bags else found.values()
        pooled = sum(
            some.values().view(samples, some.values().numel() // (DIM * samples or 1), DIM).sum(1) for some in each
        )
        return self.layer(torch.tanh(pooled))

    def state(self):
        state = [
            self.tables.tables["user"].read(),
            self.tables.tables["item"].read(),
            self.layer.weight.detach().clone(),
        ]
        if self.kind != "ids":
            keys = as_keys(self.kind, torch.arange(130) * 7919 - 500)
            rows = self.tables.id_maps["keyed"].lookup(keys)
            state += [self.tables.tables["keyed"].read()[rows], (rows > 0).double()]
        return state


def train(group, kind, bags, depth):
    net = Net(group, kind, bags)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    every = [mine(group, batch) for batch in batches()]
    for batch in speedswap.lookahead(every, {net.tables: net.features}, depth=depth):
        (net(batch) - batch["wanted"]).square().sum().div(48 if group is None else 48 / group.size()).backward()
        if group is not None:
            for parameter in net.layer.parameters():
                torch.distributed.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
        optimizer.step()
        optimizer.zero_grad()
    return net.state()


def split(group, kind, bags, size):
    """Train with a splitter; rows begin alike, since keys of separate passes get other rows."""
    net = Net(group, kind, bags, speedswap.init.constant(0.5))
    splitter = speedswap.BatchSplitter(net, micro_batch_size=size, check=False)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    losses = []
    for batch in batches():
        batch = mine(group, batch)
        losses.append(splitter.backward(lambda some: (net(some) - some["wanted"]).square().mean(), batch))
        optimizer.step()
        optimizer.zero_grad()
    return [*net.state(), torch.stack(losses).double()]


def cases(kinds):
    return [
        (kind, bags) for number, kind in enumerate(kinds) for bags in (False, True) if number < 2 or number % 2 == bags
    ]


def train_all(group, depth):
    """Return the state after training with each kind of keys, pooled or not."""
    return {case: train(group, *case, depth) for case in cases(("ids", *KINDS))}


def split_all(group, size):
    """Return the state after training with a splitter, which counts sightings of keys by micro-batch: not these."""
    kinds = [kind for kind, settings in KINDS.items() if "admit_after" not in settings]
    return {case: split(group, *case, size) for case in cases(("ids", *kinds))}
