"""Dense layers under fully_shard, with rows that ranks own: checkpoints on other numbers of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from places import owned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import speedswap
from speedswap.errors import BatchError, PeerError

ROWS, DIM, SAMPLES = 40, 4, 12


class Net(nn.Module):
    def __init__(self, group, is_sharded=True):
        super().__init__()
        torch.manual_seed(3)
        more = {} if group is None else {"storage": owned(group)}
        self.rows = speedswap.Embedding(ROWS, DIM, seed=3, dtype=torch.float64, **more)
        self.first = nn.Linear(DIM, 5, dtype=torch.float64)
        self.last = nn.Linear(5, 1, dtype=torch.float64)
        if group is not None and is_sharded:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in (self.first, self.last, self):
                fully_shard(layer, mesh=mesh, ignored_params=speedswap.parameters_to_ignore(layer))
            assert isinstance(self.first.weight, DTensor)

    def forward(self, ids):
        return self.last(torch.tanh(self.first(self.rows(ids)))).squeeze(1)

    def state(self):
        dense = [self.first.weight, self.last.weight]
        dense = [each.full_tensor() if isinstance(each, DTensor) else each for each in dense]
        return [self.rows.read(), *[each.detach().clone() for each in dense]]


def batch_of(group, number):
    ids = torch.randint(ROWS, (SAMPLES,), generator=torch.Generator().manual_seed(number))
    if group is None:
        return ids
    return ids.chunk(group.size())[group.rank()]


def train(net, optimizer, group, steps):
    for number in steps:
        optimizer.zero_grad()
        (net(batch_of(group, number)) - 1).square().mean().backward()
        optimizer.step()


def split_training(group, sizes, most=None, failing=None):
    """Train with a splitter over batches of these sizes by rank; return the losses, the rows and the layers.

    Args:
        sizes: samples of each rank; one process has them all, and needs no splitter.
        most: the samples above which a rank runs out of memory, by rank; else micro-batches have 3.
        failing: a rank on which the second batch fails once, in the loss function.
    """
    net = Net(group)
    rank = None if group is None else group.rank()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    splitter = None if group is None else speedswap.BatchSplitter(net, micro_batch_size="auto" if most else 3)
    found, said, fails = [], [], rank == failing

    def loss_of(ids):
        nonlocal fails
        out = net(ids)
        if rank is not None and len(ids) > (most or {}).get(rank, len(ids)):
            raise torch.OutOfMemoryError("simulated")
        if fails and rank is not None and len(found) == 1:
            fails = False
            raise ValueError("once")
        return (out - 1).square().mean()

    while len(found) < 4:
        numbers = torch.randint(ROWS, (sum(sizes),), generator=torch.Generator().manual_seed(len(found)))
        optimizer.zero_grad()
        try:
            if splitter is None:
                loss = loss_of(numbers)
                loss.backward()
            else:
                loss = splitter.backward(loss_of, numbers.split(sizes)[rank])
        except (ValueError, PeerError) as error:
            said.append(type(error).__name__)
            continue
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found), *net.state(), said


def split_over_others(group):
    """Return the error of a splitter over layers that all ranks divide, and rows that two of them own."""
    mesh, some = DeviceMesh.from_group(group, "cpu"), dist.new_group([0, 1])
    if group.rank() > 1:
        return None
    net = nn.Sequential(speedswap.Embedding(ROWS, DIM, storage=owned(some)), nn.Linear(DIM, 1))
    fully_shard(net[1], mesh=mesh)
    try:
        speedswap.BatchSplitter(net)
    except BatchError as error:
        return str(error)


def save(group, folder, is_sharded=True):
    net = Net(group, is_sharded)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    if is_sharded or group is None:
        train(net, optimizer, group, range(2))
    else:
        speedswap.load_checkpoint(folder, net, optimizer)
    speedswap.save_checkpoint(folder, net, optimizer, step=2)
    return net.state()


def save_split_extra(group, folder):
    """Try to save a layer that the ranks have split as extra, which is the first rank's; return the error."""
    net = Net(group)
    try:
        speedswap.save_checkpoint(folder, net, step=0, extra={"average": net.first})
    except (TypeError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def load(group, folder, is_sharded=True):
    net = Net(group, is_sharded)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    assert speedswap.load_checkpoint(folder, net, optimizer).step == 2
    if is_sharded:
        train(net, optimizer, group, range(2, 4))
    return net.state()


def whole(group, steps):
    net = Net(None)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    train(net, optimizer, None, range(steps))
    return net.state()
