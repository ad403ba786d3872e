"""Training loops in every order of their parts, over embeddings that ranks own, with the rounds that they take."""

from __future__ import annotations

import torch
from places import owned

import speedswap
from speedswap.collectives import RankGroup

ROWS, DIM, STEPS = 30, 3, 3


class Apart(torch.nn.Module):
    """Tables, each looked up by itself; torch's in one process."""

    def __init__(self, group, widths):
        super().__init__()
        self.group = group
        more = {"storage": owned(group), "init": speedswap.init.constant(1.0)}
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(ROWS, width, dtype=torch.float64)
            if group is None
            else speedswap.Embedding(ROWS, width, dtype=torch.float64, **more)
            for width in widths
        )
        for table in self.tables if group is None else []:
            torch.nn.init.ones_(table.weight)

    def forward(self, ids):
        return [table(ids.clone()) for table in self.tables]

    def rows(self):
        is_torchs = self.group is None
        return [each.weight.detach() if is_torchs else each.read() for each in self.tables]


class Together(torch.nn.Module):
    """Tables of a collection, which looks all of them up at once."""

    def __init__(self, group, widths):
        super().__init__()
        configs = [
            speedswap.EmbeddingConfig(
                name=f"t{width}",
                num_embeddings=ROWS,
                embedding_dim=width,
                dtype=torch.float64,
                init=speedswap.init.constant(1.0),
            )
            for width in widths
        ]
        self.tables = speedswap.EmbeddingCollection(configs, storage=owned(group))

    def forward(self, ids):
        found = self.tables({name: ids.clone() for name in self.tables.embeddings})
        return [each.values() for each in found.values()]

    def rows(self):
        return [table.read() for table in self.tables.embeddings.values()]


class Loop:
    """Parts of a training loop over some embeddings: of one rank, or of one process that has all ranks' batches.

    Args:
        group: the ranks; None for torch's embeddings in one process.
        size: the number of ranks.
        count: embeddings.
        model: Apart or Together.
        ignoring: the rank whose loss ignores what it looks up.
    """

    def __init__(self, group, size, count, model, ignoring=None):
        self.ranks = range(size) if group is None else [group.rank()]
        self.group, self.size, self.ignoring = group, size, ignoring
        self.model = model(group, [DIM + number for number in range(count)])
        self.tables = self.model.tables
        self.optimizer = torch.optim.SGD(self.tables.parameters(), 0.1)
        self.losses, self.norms, self.number = [], [], 0

    def loss(self):
        self.number += 1
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for rank in self.ranks:
            ids = torch.arange(rank + self.number, 12 + 3 * rank)
            loss = sum((factor * rows.square()).sum() for factor, rows in enumerate(self.model(ids), 1))
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


def trained(group, size, count, kind, parts, ignoring=None):
    """Train some steps; return the rounds of the last one, the norms that were clipped, and the rows."""
    loop, rounds = (
        Loop(group, size, count, Together if group is not None and kind == "collection" else Apart, ignoring),
        0,
    )
    for _ in range(STEPS):
        before = 0 if group is None else RankGroup.of(group).main.rounds
        for part in parts.split():
            getattr(loop, part)()
        rounds = 0 if group is None else RankGroup.of(group).main.rounds - before
    return rounds, torch.tensor(loop.norms), *loop.model.rows()


def all_trained(group, size, cases):
    return [trained(group, size, *case) for case in cases]
