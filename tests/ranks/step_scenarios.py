"""Scenarios of the benchmark of ranks: one recorded step, and the benchmark's own work."""

from __future__ import annotations

import torch
from places import owned
from ranks import trainers
from ranks.counting import counted
from ranks.processes import Here
from ranks.stages import recorded, timed_stages
from ranks.trainers import Dense, Ours, Shape

import speedswap
from speedswap.collectives import RankGroup
from speedswap.collectives.group import _groups as ranks_of_groups

_here = Here(0, {})


def one_step(group, rows, dim, ids_of_ranks):
    """Train one step; return its exchanges, and the rounds and bytes that the package has counted itself."""
    ids = ids_of_ranks[group.rank()]
    trainer = Ours(Shape(rows, dim, len(ids)), group, torch.float32)
    lane = RankGroup.of(group).main
    rounds, payload = lane.rounds, lane.payload_bytes
    with recorded() as sent:
        list(trainer.steps([ids], torch.ones(len(ids), dim), Dense(), False))
    counted = lane.rounds - rounds, lane.payload_bytes - payload
    trainer.close()
    return sent, *counted


def step_of_tables(group, count):
    """Train tables of several widths and dtypes one step; return rounds and payloads since the lookups, and rows."""
    dtypes = (torch.float32, torch.float64)
    tables = torch.nn.ModuleList(
        speedswap.Embedding(
            50, 2 + number, storage=owned(group, reduction="sum"), dtype=dtypes[number % 2], init=speedswap.init.zeros()
        )
        for number in range(count)
    )
    optimizer = torch.optim.SGD(tables.parameters(), lr=1.0)
    lane, ids = RankGroup.of(group).main, torch.arange(10 * group.rank(), 30)
    loss = sum(((number + 1) * table(ids)).double().sum() for number, table in enumerate(tables))
    before = lane.rounds, lane.payloads
    loss.backward()
    optimizer.step()
    counted = lane.rounds - before[0], lane.payloads - before[1]
    return counted, [table.read() for table in tables]


def stages_of_a_step(group, rows, dim, ids):
    """Train one step, and return the seconds of its stages."""
    trainer = Ours(Shape(rows, dim, len(ids)), group, torch.float32)
    with timed_stages() as seconds:
        list(trainer.steps([ids], torch.ones(len(ids), dim), Dense(1), False))
    trainer.close()
    return dict(seconds)


def work(group, asked, args):
    """Run a process's part of the benchmark."""
    _here.rank = group.rank()
    _here.groups[group.size()] = group
    return asked(_here, *args)


def forget(group):
    """Let the next table of these ranks settle their hosts."""
    ranks_of_groups.pop(group, None)


class Broken(Ours):
    """Leaves the last batch out."""

    def steps(self, batches, grad, dense, ahead):
        return super().steps(batches[:-1], grad, dense, ahead)


def verify_broken(group, shape):
    """Verify a wrong trainer."""
    trainers.TRAINERS["broken"] = Broken
    trainers.verify(Here(group.rank(), {group.size(): group}), "broken", group.size(), shape, False)


def traffic_of_a_step(group, per_host, rows, dim, ids_of_ranks):
    """Train on hosts of some ranks; return the third step's rounds, bytes of a line and its room, and what was sent."""
    forget(group)
    ids = ids_of_ranks[group.rank()]
    items = speedswap.Embedding(rows, dim, storage=speedswap.Ranks(group=group, host=per_host))
    optimizer, lane = torch.optim.Adagrad(items.parameters()), RankGroup.of(group).main
    for _ in range(3):  # two show which rounds carry nothing but lines
        rounds = lane.rounds
        with counted(group.rank(), group.size()) as traffic:
            items(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return lane.rounds - rounds, lane.sheet.line_bytes, traffic
