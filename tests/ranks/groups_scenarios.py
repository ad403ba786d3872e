"""Several models and process groups; copies, pickles and forks of modules whose rows ranks own."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from outcomes import error_of
from places import owned
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset

import speedswap
from speedswap.collectives.lane import connect

ROWS, DIM = 30, 3


def table(group, seed=1, **more):
    more = {"dtype": torch.float64, "seed": seed, **more}
    return speedswap.Embedding(
        ROWS, DIM, **more, **({} if group is None else {"storage": owned(group, reduction="sum")})
    )


def ids_of(rank, number):
    return torch.randint(ROWS, (5,), generator=torch.Generator().manual_seed(100 * number + rank))


def train(items, group, members, steps):
    """Train on the batches of some ranks: all of them without a group."""
    optimizer = Adam(items.parameters(), 0.05)
    for number in steps:
        optimizer.zero_grad()
        ids = torch.cat([ids_of(rank, number) for rank in members if group is None or rank == dist.get_rank()])
        items(ids).square().sum().backward()
        optimizer.step()
    return items.read()


def remade(group, members):
    """Train in a group that is then destroyed, and in another of the same ranks."""
    found = []
    for _ in range(2):
        own = None if group is None else dist.new_group(members)
        found.append(train(table(own), own, members, range(3)))
        if own is not None:
            gc.collect()
            dist.destroy_process_group(own)
    return found


def without_first(group, members):
    """Create a table owned by all ranks but the first; return the first one's error."""
    members = members[1:]
    own = None if group is None else dist.new_group(members)
    if group is None or dist.get_rank() in members:
        return [train(table(own), own, members, range(3))]
    return [error_of(lambda: table(own))]


def overlapping(group, members, optimizers):
    """Train a table of all ranks, and one of some of them, in one loss."""
    part = members[1:]
    own = None if group is None else dist.new_group(part)
    is_in = group is None or dist.get_rank() in part
    tables = [table(group), *([table(own, 2)] if is_in else [])]
    parameters = [parameter for each in tables for parameter in each.parameters()]
    optimizers = [Adam(parameters, 0.05)] if optimizers == 1 else [Adam([each], 0.05) for each in parameters]
    for number in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = members if group is None else [dist.get_rank()]
        loss = sum(tables[0](ids_of(rank, number)).square().sum() for rank in mine)
        if is_in:
            loss = loss + sum(tables[1](ids_of(rank, number)).cos().sum() for rank in mine if rank in part)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [each.read() for each in tables]


def same_ranks_twice(group, members):
    """Train one model with tables of two groups of the same ranks."""
    own = None if group is None else dist.new_group(members)
    model = nn.ModuleList([table(group), table(own, 2)])
    optimizer = Adam(model.parameters(), 0.05)
    for number in range(3):
        optimizer.zero_grad()
        mine = members if group is None else [dist.get_rank()]
        sum((model[0](ids_of(rank, number)) * model[1](ids_of(rank, number + 9))).sum() for rank in mine).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [each.read() for each in model]


def every_group(group, size):
    """Return what each training has found."""
    members = list(range(size))
    return {
        "remade": remade(group, members),
        "without the first": without_first(group, members),
        "overlapping": overlapping(group, members, 1),
        "overlapping, an optimizer for each": overlapping(group, members, 2),
        "the same ranks twice": same_ranks_twice(group, members),
    }


def connected_again(group):
    """Connect under one name repeatedly, as a process does that rejoins a job; return what came each time."""
    ranks, found = dist.get_process_group_ranks(group), []
    for number in range(4):
        connections = connect(group, "again", ranks, timedelta(seconds=10))
        came = torch.empty(len(ranks), dtype=torch.int64)
        sent = torch.full((len(ranks),), 10 * number + group.rank())
        connections.alltoall_base(came, sent, [], []).wait()
        found.append(came.tolist())
        del connections  # whose addresses stay in the store
    return found


# ---------------------------------------------------------------------- other processes


class Rows(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.items.read(torch.tensor([index]))


class Ids(Rows):
    def __getitem__(self, index):
        return index % self.items.num_embeddings


def forked(group, size):
    """Let forked workers of a DataLoader read rows, or ids alone; return the error, and rows after a training."""
    items = table(group)
    train(items, group, range(size), range(1))
    settings = {"num_workers": 1, "multiprocessing_context": "fork"}
    said = error_of(lambda: list(DataLoader(Rows(items), **settings)))
    ids = torch.cat(list(DataLoader(Ids(items), **settings)))
    return said, ids.tolist(), train(items, group, range(size), range(1, 3))


def wrapped(group):
    """Return the error of a lookup under a wrapper that does not ignore the weight."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(table(group)), process_group=group)
    return error_of(lambda: model(torch.tensor([1])))


def copied(group, size):
    """Return the errors of copies and pickles, and the rows after a training."""
    items = table(group)
    keyed = table(group, id_map=speedswap.IdMap(ROWS - 1))
    model = nn.ModuleDict({"rows": items, "layer": nn.Linear(2, 2)})
    calls = {
        copy.deepcopy: (items, model, items.table, keyed.id_map),
        pickle.dumps: (items, items.table, keyed.id_map),
        lambda each: torch.save(each, io.BytesIO()): (model,),
    }
    said = [error_of(lambda call=call, each=each: call(each)) for call, some in calls.items() for each in some]
    return said, train(items, group, range(size), range(2))
