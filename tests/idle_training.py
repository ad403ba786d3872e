"""Trainings of ``nn.Embedding``, and of a table whose idle rows take every step, side by side."""

from __future__ import annotations

import math

import torch
from torch import nn, optim

import speedswap

ROWS, DIM, BATCH = 60, 5, 6

CLOSED = {
    "SGD": lambda weights: optim.SGD(weights, lr=0.1),
    "SGD with decay": lambda weights: optim.SGD(weights, lr=0.1, weight_decay=0.01),
    "momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9),
    "Nesterov": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "Adam": lambda weights: optim.Adam(weights, lr=0.01),
    "AdamW": lambda weights: optim.AdamW(weights, lr=0.01, weight_decay=0.1),
    "AdamW, other betas": lambda weights: optim.AdamW(weights, lr=0.01, betas=(0.8, 0.98)),
    "AMSGrad": lambda weights: optim.AdamW(weights, lr=0.01, amsgrad=True),
    "NAdam": lambda weights: optim.NAdam(weights, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda weights: optim.RAdam(weights, lr=0.01),
    "RMSprop": lambda weights: optim.RMSprop(weights, lr=0.01, momentum=0.9),
    "Adagrad": lambda weights: optim.Adagrad(weights, lr=0.1, lr_decay=0.01),
    "Adadelta": lambda weights: optim.Adadelta(weights),
    "ASGD": lambda weights: optim.ASGD(weights, lr=0.01, t0=10, lambd=0.01),
}
REPLAYED = {
    "Adam with decay": lambda weights: optim.Adam(weights, lr=0.01, weight_decay=0.1),
    "AdamW, far betas": lambda weights: optim.AdamW(weights, lr=0.01, betas=(0.95, 0.9)),
    "Adagrad with decay": lambda weights: optim.Adagrad(weights, lr=0.1, weight_decay=0.1, lr_decay=0.01),
    "RMSprop with decay": lambda weights: optim.RMSprop(weights, lr=0.01, weight_decay=0.1),
    "centered RMSprop": lambda weights: optim.RMSprop(weights, lr=0.01, centered=True),
    "NAdam with decay": lambda weights: optim.NAdam(weights, lr=0.01, weight_decay=0.1),
    "Adamax": lambda weights: optim.Adamax(weights, lr=0.01),
    "Adadelta with decay": lambda weights: optim.Adadelta(weights, weight_decay=0.1),
    "Rprop": lambda weights: optim.Rprop(weights, lr=0.01),
}
EVERY = {**CLOSED, **REPLAYED}


class Training:
    """The same training of ``nn.Embedding`` and of a table whose idle rows take every step."""

    def __init__(self, make, dtype=torch.float64, rows=ROWS, dim=DIM, schedule=None, start=None, **settings):
        self.ours = speedswap.Embedding(rows, dim, seed=1, dtype=dtype, **settings)
        if start is not None:
            self.ours.table.write(0, start)
        self.dense = nn.Embedding.from_pretrained(self.ours.table.read(), freeze=False)
        self.other = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
        groups = (
            [{"params": [other]}, {"params": [each.weight]}]
            for other, each in zip(self.other, self.models, strict=True)
        )
        self.optimizers = [make(group) for group in groups]
        speedswap.attach(self.optimizers[1], self.ours, idle_rows="dense")
        self.schedulers = [] if schedule is None else [schedule(each) for each in self.optimizers]
        self.random = torch.Generator().manual_seed(2)
        self.popularity = torch.arange(1, rows + 1.0) ** -1.2

    @property
    def models(self):
        return self.dense, self.ours

    def steps(self, count, *, scale=1.0, clip=None, batch=BATCH):
        for _ in range(count):
            ids = torch.multinomial(self.popularity, batch, replacement=True, generator=self.random)
            slope = torch.randn(batch, self.dense.embedding_dim, generator=self.random, dtype=torch.float32) * scale
            ids, slope = ids.to(self.dense.weight.device), slope.to(self.dense.weight)
            for model, optimizer, other in zip(self.models, self.optimizers, self.other, strict=True):
                optimizer.zero_grad()
                ((model(ids) * slope).sum() + other.square().sum()).backward()
                if clip is not None:
                    nn.utils.clip_grad_value_([model.weight], clip)
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
        return self

    def errors(self):
        """Return the largest difference of the weight, and of each state, relative to its largest value."""
        theirs = {"weight": self.dense.weight.detach(), **self.optimizers[0].state[self.dense.weight]}
        state = self.optimizers[1].state_dict()["state"].get(1, {})
        ours = {"weight": self.ours.table.read(), **state}
        assert theirs.keys() == ours.keys()
        return {name: relative_error(ours[name], values) for name, values in theirs.items()}

    def check(self, most=1e-12):
        errors = self.errors()
        assert max(errors.values()) <= most, errors

    def dense_half(self):
        """Return the ``nn.Embedding`` and its optimizer."""
        return self.dense, self.optimizers[0]

    @property
    def missed(self):
        return self.ours._step.state.idle.steps


def relative_error(ours, theirs):
    if not isinstance(theirs, torch.Tensor):
        return abs(ours - theirs)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


def warmup(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10) * (0.55 + 0.45 * math.cos(step / 20)))
