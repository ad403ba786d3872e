"""Training loops in every order of their parts, over embeddings that ranks own, with the rounds that they take."""

from __future__ import annotations

import torch
from places import owned

import speedswap
from speedswap.collectives import RankGroup

ROWS, DIM, STEPS = 30, 3, 3


class Model(torch.nn.Module):
    """Tables, each looked up with a separate tensor."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, *ids):
        pairs = zip(self.tables, ids, strict=True)
        return sum((factor * table(some).square()).sum() for factor, (table, some) in enumerate(pairs, 1))


class Loop:
    """Parts of a training loop over some embeddings: of one rank, or of one process that has all ranks' batches.

    Args:
        group: the ranks; None for torch's embeddings in one process.
        size: the number of ranks.
        count: embeddings.
        ignoring: the rank whose loss ignores what it looks up.
    """

    def __init__(self, group, size, count, ignoring=None):
        self.ranks = range(size) if group is None else [group.rank()]
        self.group, self.size, self.ignoring = group, size, ignoring
        more = {"storage": owned(group), "init": speedswap.init.constant(1.0)}
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(ROWS, DIM + number, dtype=torch.float64)
            if group is None
            else speedswap.Embedding(ROWS, DIM + number, dtype=torch.float64, **more)
            for number in range(count)
        )
        for table in self.tables if group is None else []:
            torch.nn.init.ones_(table.weight)
        self.model = Model(self.tables)
        self.optimizer = torch.optim.SGD(self.tables.parameters(), 0.1)
        self.losses, self.norms, self.number = [], [], 0

    def loss(self):
        self.number += 1
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for rank in self.ranks:
            ids = torch.arange(rank + self.number, 12 + 3 * rank)
            loss = self.model(*(ids.clone() for _ in self.tables))
            total = total + (0 if rank == self.ignoring else loss)
        return total / len(self.ranks)

    def forward(self):
        self.losses.append(self.loss())

    def idle(self):
        self.loss()

    def backward(self):
        sum(self.losses).backward()
        self.losses = []

    def zero(self):
        self.optimizer.zero_grad()

    def zero_in_place(self):
        self.optimizer.zero_grad(set_to_none=False)

    def zero_model(self):
        self.tables.zero_grad()

    def none(self):
        for each in self.tables.parameters():
            each.grad = None

    def look(self):
        for each in self.tables.parameters():
            if each.grad is not None:
                each.grad = None

    def clip(self):
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.tables.parameters(), 1.0)))

    def clip_value(self):
        torch.nn.utils.clip_grad_value_(self.tables.parameters(), 0.05)

    def norms_by_hand(self):
        grads = [each.grad for each in self.tables.parameters()]
        self.norms.append(float(grads[0].norm()))
        for each in grads:
            each.data.mul_(0.5)
        self.norms += [float(norm) for each in grads for norm in (each.data.norm(), each.detach().norm(3))]

    def step(self):
        self.optimizer.step()


def trained(group, size, count, parts, ignoring=None):
    """Train some steps; return the rounds of the last one, the norms that were clipped, and the rows."""
    loop, rounds = Loop(group, size, count, ignoring), 0
    for _ in range(STEPS):
        before = 0 if group is None else RankGroup.of(group).main.rounds
        for part in parts.split():
            getattr(loop, part)()
        rounds = 0 if group is None else RankGroup.of(group).main.rounds - before
    rows = [table.weight.detach() if group is None else table.read() for table in loop.tables]
    return rounds, torch.tensor(loop.norms), *rows


def all_trained(group, size, cases):
    return [trained(group, size, *case) for case in cases]
