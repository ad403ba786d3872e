"""Trainings of ranks on several hosts, simulated on one machine, with what crosses between hosts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from outcomes import error_of
from torch import nn
from torch.optim import SGD

import speedswap
from speedswap.collectives import Lane, RankGroup
from speedswap.collectives.group import _groups as ranks_of_groups

ROWS, DIM = 200, 4


def ids_of(rank, step, table=0, rows=ROWS):
    """Return distinct ids, of which ranks have many in common, and each another number."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + table)
    return torch.randperm(rows // 2, generator=draw)[: rows // 4 + 7 * rank]


def factors_of(rank, step, table=0, rows=ROWS, *, exact=False):
    draw = torch.Generator().manual_seed(77 + 1000 * step + 10 * rank + table)
    shape = len(ids_of(rank, step, table, rows)), DIM
    if exact:  # sums of these are the same in every order
        return torch.randint(-8, 9, shape, generator=draw).float()
    return torch.randn(shape, generator=draw)


@contextmanager
def counted(lane, hosts):
    """Provide the numbers of this lane's exchanges, rounds, and messages and bytes sent to other hosts."""
    here = next(ranks for ranks in hosts if lane.rank in ranks)
    others = [rank for rank in range(len(lane.ranks)) if rank not in here]
    found = {"exchanges": 0, "rounds": 0, "messages": 0, "bytes": 0}
    exchange = Lane._exchange

    def count(self, group, into, out, received, sent):
        exchange(self, group, into, out, received, sent)
        if self is lane:
            sizes = [part.nbytes for part in torch.split(out, sent)] if sent else [out[0].nbytes] * len(self.ranks)
            found["exchanges"] += 1
            found["messages"] += len(others)
            found["bytes"] += sum(sizes[rank] for rank in others)

    rounds = lane.rounds
    with mock.patch.object(Lane, "_exchange", count):
        before = (0, 0) if lane.levels is None else (lane.levels.messages, lane.levels.message_bytes)
        yield found
    found["rounds"] = lane.rounds - rounds
    if lane.levels is not None:
        found["messages"], found["bytes"] = lane.levels.messages - before[0], lane.levels.message_bytes - before[1]


def train(group, host, hosts, steps=4, *, exact=False, count=1, rows=ROWS):
    """Train by given gradients of each rank; return the rows as every rank reads them, and what crossed hosts."""
    ranks_of_groups.pop(group, None)  # whose hosts an earlier training has settled
    more = {"storage": speedswap.Ranks(group=group, host=host, reduction="sum"), "init": speedswap.init.constant(1.0)}
    tables = nn.ModuleList(speedswap.Embedding(rows, DIM, **more) for _ in range(count))
    lane, rank, optimizer = RankGroup.of(group).main, group.rank(), SGD(tables.parameters(), 0.125)
    with counted(lane, hosts) as found:
        for step in range(steps):
            optimizer.zero_grad()
            ids = [ids_of(rank, step, place, rows) for place in range(count)]
            factors = [factors_of(rank, step, place, rows, exact=exact) for place in range(count)]
            every = zip(tables, ids, factors, strict=True)
            sum((each(some) * factor).sum() for each, some, factor in every).backward()
            optimizer.step()
    return [each.read() for each in tables], found


def trained_by_groups(group, hosts):
    """Train with a process group of this rank's host, in a job of no other ranks."""
    groups = [dist.new_group(ranks) for ranks in hosts]
    own = next(each for each, ranks in zip(groups, hosts, strict=True) if group.rank() in ranks)
    return train(group, own, hosts)[0]


def on_hosts(group, per_host, scenario, *arguments, **more):
    """Run a scenario with hosts of some ranks each, as torchrun's variables tell them."""
    ranks_of_groups.pop(group, None)
    with mock.patch.dict(os.environ, LOCAL_RANK=str(group.rank() % per_host)):
        return scenario(group, *arguments, **more)


def mistaken(group):
    """Return the errors of hosts that do not fit, and whether ranks go on after them."""
    said = []
    pairs = [[0, 1], [1, 2], [2, 3], [3, 0]]
    groups = [dist.new_group(pair) for pair in pairs]
    for host in (groups[group.rank()], 2, 3):
        if host != 3:  # which contradicts that of the table before
            ranks_of_groups.pop(group, None)
        said.append(
            error_of(lambda host=host: speedswap.Embedding(5, 2, storage=speedswap.Ranks(group=group, host=host)))
        )
    return said


def failing(group, per_host):
    """Train while one rank and then another fail in a lookup; return each step's error, and the rows."""
    ranks_of_groups.pop(group, None)
    items = speedswap.Embedding(ROWS, DIM, storage=speedswap.Ranks(group=group, host=per_host, reduction="sum"))
    optimizer, said = SGD(items.parameters(), 0.125), []
    for step in range(5):
        ids = ids_of(group.rank(), step)

        def run(step=step, ids=ids):
            optimizer.zero_grad()
            bad = step in (1, 3) and group.rank() == step
            items(ids + ROWS if bad else ids).sum().backward()
            optimizer.step()

        said.append(error_of(run))
    return said, items.read()
