"""Scenarios of ranks whose rows are computed with on a device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from places import owned
from whole_scenarios import excluded_by, queries_of, weights

import speedswap
from speedswap.collectives import RankGroup

ROWS, DIM = 60, 4


def batches(group, seed=3):
    generator = torch.Generator().manual_seed(seed + group.rank())
    return [torch.randint(ROWS, (6, 2), generator=generator) for _ in range(5)]


def trained(items, optimizer, group, device, keys_of=lambda ids: ids):
    """Return the losses of some steps."""
    losses = []
    for ids in speedswap.lookahead([keys_of(ids).to(device) for ids in batches(group)], {items: lambda ids: ids}):
        loss = items(ids).cos().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


def keyed(group, device):
    """Train rows of keys, some of which are reset."""
    id_map = speedswap.IdMap(50, evict="lru")
    items = speedswap.Embedding(id_map.num_rows, DIM, id_map=id_map, seed=5, storage=owned(group)).to(device)
    optimizer = torch.optim.Adagrad(items.parameters(), 0.1)
    losses = trained(items, optimizer, group, device, lambda ids: ids * 7919 - 1000)
    return losses, items.read()


def collection(group, device):
    """Train bags of two tables in one store and one in another, with clipping."""
    configs = [
        speedswap.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim, seed=dim, pooling=pooling)
        for name, dim, pooling in (("a", DIM, "sum"), ("b", DIM, "mean"), ("c", 3, "sum"))
    ]
    tables = speedswap.EmbeddingBagCollection(configs, storage=owned(group)).to(device)
    optimizer = torch.optim.Adam(tables.parameters(), 0.05)
    norms = []
    for ids in batches(group):
        loss = tables({name: ids.to(device) for name in "abc"}).values().cos().sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(tables.parameters(), 0.5)))
        optimizer.step()
    return torch.tensor(norms), *(table.read() for table in tables.tables.values())


def scored(group, device):
    items = speedswap.Embedding.from_pretrained(weights(), padding_idx=3, storage=owned(group)).to(device)
    found = items.score(queries_of(group.rank()).to(device), 4, exclude=excluded_by(group.rank(), "ids"))
    assert found.values.device.type == device
    return found.values.cpu().nan_to_num(9.0), found.ids.cpu()


def compact(group, device):
    """Train rows that are rounded stochastically, by their ids."""
    settings = {"stored_dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "seed": 5}
    items = speedswap.Embedding(ROWS, DIM, storage=owned(group), **settings).to(device)
    optimizer = torch.optim.Adam(items.parameters(), 0.01)
    return trained(items, optimizer, group, device), items.read()


def through_nccl(group):
    """Send bytes of rows as a lane of a job over NCCL does; return whether they come."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    nccl = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    lane = RankGroup.of(group).main
    sent = torch.arange(48, device=device, dtype=torch.uint8).view(6, 8)
    came = torch.empty_like(sent)
    lane._payload = nccl
    try:
        lane.exchange_rows(came, sent, [6], [6])
    finally:
        lane._payload = None
    return torch.equal(came, sent)
