"""Ranks on several hosts whose process group has NCCL between their GPUs, or something that stands in for it."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import levels_scenarios as levels
import lookahead_scenarios as lookahead
import simulated_gpu
import torch
import torch.distributed as dist
from outcomes import error_of
from torch import nn
from torch.optim import SGD

import speedswap
from speedswap.collectives import RankGroup, group, lane
from speedswap.collectives.group import _groups as ranks_of_groups

ROWS, DIM = levels.ROWS, levels.DIM


class StandIn:
    """A communicator that sends what is in GPU memory, through host memory."""

    sent = ()
    """How many rows went to each rank, for each exchange of this process so far."""

    def __init__(self, process_group):
        ranks = dist.get_process_group_ranks(process_group)
        self._gloo = lane.connect(process_group, "stand-in", ranks, timedelta(seconds=10))

    def alltoall_base(self, into, out, received, sent):
        assert into.is_cuda
        assert out.is_cuda
        StandIn.sent += (sent,)
        came = torch.empty(into.shape, dtype=into.dtype)
        self._gloo.alltoall_base(came, out.cpu(), received, sent).wait()
        into.copy_(came)
        return SimpleNamespace(wait=lambda: True)


@contextmanager
def with_nccl(process_group, per_host, host=None):
    """Let a group's ranks find that it has NCCL, and be on hosts as torchrun's variables tell them, or as given."""
    backend_of, kind = group._backend_of, lane.Lane
    nccl = SimpleNamespace(name=lambda: "nccl")

    def make(process_group, name, timeout, payload=None):
        assert payload in (None, process_group)
        return kind(process_group, name, timeout, payload and StandIn(process_group))

    ranks_of_groups.pop(process_group, None)
    with (
        mock.patch.object(group, "_backend_of", lambda *at: nccl if at[1] == "cuda" else backend_of(*at)),
        mock.patch.object(group, "Lane", make),
        mock.patch.dict(os.environ, LOCAL_RANK=str(process_group.rank() % per_host)),
    ):
        yield RankGroup.of(process_group, host).main
    ranks_of_groups.pop(process_group, None)


def on_hosts(process_group, per_host, scenario, *arguments, **more):
    """Run a scenario in such a group."""
    with with_nccl(process_group, per_host) as main:
        assert (main.levels is None) == (per_host in (1, process_group.size()))
        return scenario(process_group, *arguments, **more)


def rows_sent_to_ranks(process_group, per_host, seed):
    """Send rows of several widths to the other ranks in two levels, some of them none; return what came and should."""
    with with_nccl(process_group, per_host) as main:
        size, rank, found = process_group.size(), process_group.rank(), []
        for number, width in enumerate((1, 3, 8, 9)):
            counts = torch.randint(4, (size, size), generator=torch.Generator().manual_seed(seed + number))
            counts[:, number % size] = 0
            numbers = torch.arange(int(counts.sum()), dtype=torch.uint8).split(counts.reshape(-1).tolist())
            every = [[numbers[a * size + b] for b in range(size)] for a in range(size)]
            with main.task(speedswap.collectives.Kind.COMPARE) as task:
                sent = torch.cat(every[rank]).unsqueeze(1).expand(-1, width)
                came = task.send(sent, counts[rank].tolist(), counts[:, rank].tolist())
            found.append((came, torch.cat([of_rank[rank] for of_rank in every]).unsqueeze(1).expand(-1, width)))
    return found


def train(process_group, device="cpu", steps=4, *, exact=False, tables=1):
    """Train by given gradients of each rank; return the rows as every rank reads them."""
    more = {"storage": speedswap.Ranks(group=process_group, reduction="sum"), "init": speedswap.init.constant(1.0)}
    items = nn.ModuleList(speedswap.Embedding(ROWS, DIM, **more) for _ in range(tables)).to(device)
    rank, optimizer = process_group.rank(), SGD(items.parameters(), 0.125)
    for step in range(steps):
        optimizer.zero_grad()
        ids = [levels.ids_of(rank, step, place).to(device) for place in range(tables)]
        factors = [levels.factors_of(rank, step, place, exact=exact).to(device) for place in range(tables)]
        every = zip(items, ids, factors, strict=True)
        sum((each(some) * factor).sum() for each, some, factor in every).backward()
        optimizer.step()
    return [each.read() for each in items]


def train_on_groups(process_group, hosts, device):
    """Train as :func:`train` with hosts that are process groups; return the rows, and what each exchange sent."""
    groups = [dist.new_group(ranks) for ranks in hosts]
    own = next(each for each, ranks in zip(groups, hosts, strict=True) if process_group.rank() in ranks)
    StandIn.sent = ()
    with with_nccl(process_group, 1, own):
        return train(process_group, device)[0], StandIn.sent


def waits_of_a_step(process_group, per_host, device):
    """Return a step's waits for the GPU, and the number of its exchanges between GPUs, whose stand-in waits, too."""
    with with_nccl(process_group, per_host):
        items = speedswap.Embedding(ROWS, DIM, storage=speedswap.Ranks(group=process_group)).to(device)
        optimizer = SGD(items.parameters(), 0.125)
        for step in range(3):
            StandIn.sent = ()
            with simulated_gpu.counted() as counts:
                items(levels.ids_of(process_group.rank(), step).to(device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [str(each) for each in counts.round_trips if __file__ not in each.where], len(StandIn.sent)


def compared_at_random(process_group, seeds, device="cpu"):
    """Train with random settings, without NCCL and a lookahead and with both; return what differs, by seed."""
    different = {}
    for seed in seeds:
        draw = random.Random(seed)
        how = {
            "optimizer": draw.choice([*lookahead.OPTIMIZERS]),
            "between": draw.choice([*lookahead.ids_of]),
            "sizes": [[draw.choice([0, 1, 5, 40]) for _ in range(process_group.size())] for _ in range(3)],
            "steps": 4,
            "seed": seed,
            "dtype": draw.choice([torch.float32, torch.float64]),
            "device": device,
        }
        depth, per_host = draw.choice([0, 1, 2]), draw.choice([2, 3, 4])
        rows, losses = levels.on_hosts(process_group, per_host, lookahead.train, 0, **how)[:2]
        other_rows, other_losses = on_hosts(process_group, per_host, lookahead.train, depth, **how)[:2]
        if not torch.equal(rows, other_rows) or losses != other_losses:
            different[seed] = how | {"depth": depth, "per_host": per_host}
    return different


def killed_with_a_lookahead(process_group, device):
    """Train with a lookahead until one rank ends; return the others' errors, and how long they took to come."""
    items = speedswap.Embedding(ROWS, DIM, seed=1, storage=speedswap.Ranks(group=process_group)).to(device)
    optimizer, begun = SGD(items.parameters(), 0.125), 0.0

    def run():
        nonlocal begun
        batches = [levels.ids_of(process_group.rank(), step).to(device) for step in range(8)]
        for step, ids in enumerate(speedswap.lookahead(batches, {items: lambda ids: ids})):
            begun = time.monotonic()
            if step == 3 and process_group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            items(ids).sum().backward()
            optimizer.step()

    return error_of(run), time.monotonic() - begun
