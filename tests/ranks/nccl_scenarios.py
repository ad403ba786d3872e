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

import lookahead_scenarios as lookahead
import torch
from levels_scenarios import factors_of, ids_of
from outcomes import error_of
from torch.optim import SGD

import speedswap
from speedswap.collectives import RankGroup, group, lane
from speedswap.collectives.group import _groups as ranks_of_groups

ROWS, DIM = 200, 4
_ID_BYTES = 8


class StandIn:
    """A communicator that sends what is in GPU memory, through host memory; or what a test on a CPU takes for that.

    Attributes:
        exchanges: the number of exchanges in this process so far.
    """

    exchanges = 0

    def __init__(self, process_group):
        ranks = torch.distributed.get_process_group_ranks(process_group)
        self._gloo = lane.connect(process_group, "stand-in", ranks, timedelta(seconds=10))

    def alltoall_base(self, into, out, received, sent):
        StandIn.exchanges += 1
        came = torch.empty(into.shape, dtype=into.dtype)
        self._gloo.alltoall_base(came, out.cpu(), received, sent).wait()
        into.copy_(came)
        return SimpleNamespace(wait=lambda: True)


class RowsBetweenGpus(lane.Lane):
    """A lane on which all rows that are wider than an id count as in GPU memory."""

    def exchange_rows(self, into, rows, received, sent):
        if self._payload is None or rows.shape[1] <= _ID_BYTES:
            super().exchange_rows(into, rows, received, sent)
            return
        self.payloads += 1
        self._exchange(self._payload, into, rows, list(received), list(sent))


@contextmanager
def with_nccl(process_group, per_host, *, on_gpu=False):
    """Let a group's ranks find that it has NCCL, and be on hosts as torchrun's variables tell them."""
    backend_of, kind = group._backend_of, lane.Lane if on_gpu else RowsBetweenGpus
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
        yield RankGroup.of(process_group).main
    ranks_of_groups.pop(process_group, None)


def on_hosts(process_group, per_host, scenario, *arguments, on_gpu=False, **more):
    """Run a scenario in such a group."""
    with with_nccl(process_group, per_host, on_gpu=on_gpu) as main:
        assert (main.levels is None) == (per_host == 1)
        assert main.merging is None
        before = StandIn.exchanges
        found = scenario(process_group, *arguments, **more)
        assert StandIn.exchanges > before
    return found


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


def train(process_group, device="cpu", steps=4):
    """Train by given gradients of each rank; return the rows as every rank reads them."""
    items = speedswap.Embedding(ROWS, DIM, seed=1, storage=speedswap.Ranks(group=process_group)).to(device)
    rank, optimizer = process_group.rank(), SGD(items.parameters(), 0.125)
    for step in range(steps):
        optimizer.zero_grad()
        (items(ids_of(rank, step).to(device)) * factors_of(rank, step).to(device)).sum().backward()
        optimizer.step()
    return items.read()


def failing(process_group):
    """Train while one rank and then another fail in a lookup; return each step's error, and the rows."""
    items = speedswap.Embedding(ROWS, DIM, seed=1, storage=speedswap.Ranks(group=process_group))
    optimizer, said = SGD(items.parameters(), 0.125), []
    for step in range(5):
        ids = ids_of(process_group.rank(), step)

        def run(step=step, ids=ids):
            optimizer.zero_grad()
            bad = step in (1, 3) and process_group.rank() == step
            items(ids + ROWS if bad else ids).sum().backward()
            optimizer.step()

        said.append(error_of(run))
    return said, items.read()


def compared_at_random(process_group, seeds, device="cpu"):
    """Train with random settings, flat without a lookahead and on hosts with one; return what differs, by seed."""
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
        found = []
        for host, ahead in ((1, 0), (per_host, depth)):
            with with_nccl(process_group, host, on_gpu=device != "cpu"):
                found.append(lookahead.train(process_group, ahead, **how)[:2])
        (rows, losses), (other_rows, other_losses) = found
        if not torch.equal(rows, other_rows) or losses != other_losses:
            different[seed] = how | {"depth": depth, "per_host": per_host}
    return different


def killed_with_a_lookahead(process_group, device):
    """Train with a lookahead until one rank ends; return the others' errors, and how long they took to come."""
    items = speedswap.Embedding(ROWS, DIM, seed=1, storage=speedswap.Ranks(group=process_group)).to(device)
    optimizer, begun = SGD(items.parameters(), 0.125), 0.0

    def run():
        nonlocal begun
        batches = [ids_of(process_group.rank(), step).to(device) for step in range(8)]
        for step, ids in enumerate(speedswap.lookahead(batches, {items: lambda ids: ids})):
            begun = time.monotonic()
            if step == 3 and process_group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            items(ids).sum().backward()
            optimizer.step()

    return error_of(run), time.monotonic() - begun
