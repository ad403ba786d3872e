"""Modules over tables and their inputs, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Config", "Lookup", "MicroBatch", "ask", "random_config", "random_lookup", "reference"]


@dataclass
class Config:
    """One table and the module over it."""

    bag: str | None  # the mode, of an EmbeddingBag
    rows: int
    dim: int
    padding_idx: int | None
    storage: str
    dtype: torch.dtype
    stored: torch.dtype | None
    state: torch.dtype | None
    rounding: str | None
    seed: int

    @property
    def stochastic(self) -> bool:
        return (self.stored or self.state) is not None and self.rounding != "nearest"


@dataclass
class Lookup:
    """The input of one lookup in one micro-batch."""

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    target: Tensor


MicroBatch = list[list[Lookup]]  # for each table its lookups


def random_config(rng: random.Random) -> Config:
    """Draw a table and the module over it."""
    rows = rng.choice([1, 2, 7, 11, 30, 60])
    stored = rng.choice([None, None, None, torch.bfloat16, torch.float16, torch.float32])
    state = rng.choice([None, None, None, torch.bfloat16, torch.float32])
    compact = {stored, state} & {torch.bfloat16, torch.float16}
    return Config(
        bag=rng.choice([None] * 7 + ["sum", "mean", "max"]),
        rows=rows,
        dim=rng.choice([1, 2, 3, 4, 7, 8, 16, 17, 33]),
        padding_idx=rng.choice([None, None, rng.randrange(rows), -rows]),
        storage=rng.choice(["auto", "pageable", "device", "disk", "disk"]),
        dtype=torch.float32,
        stored=stored,
        state=state,
        rounding=rng.choice(["nearest", "nearest", "stochastic", None]) if compact else None,
        seed=rng.randrange(2**62),
    )


def random_lookup(config: Config, rng: random.Random, generator: torch.Generator) -> Lookup:
    """Draw ids, and what goes with them."""
    count = rng.choice([1, 1, 3, 8, 25])
    ids = torch.randint(config.rows, (count,), generator=generator)
    if config.padding_idx is not None and rng.random() < 0.5:
        ids[0] = config.padding_idx % config.rows
    ids = ids.to(rng.choice([torch.int64, torch.int32]))
    if config.bag is None:
        target = torch.randn(count, config.dim, generator=generator, dtype=config.dtype)
        return Lookup(ids, None, None, target)
    bags = rng.choice([1, 2, 5])
    offsets = torch.sort(torch.randint(count + 1, (bags,), generator=generator))[0].to(ids.dtype)
    offsets[0] = 0
    weights = None
    if config.bag == "sum" and rng.random() < 0.5:
        weights = torch.randn(count, generator=generator, dtype=config.dtype)
    return Lookup(ids, offsets, weights, torch.randn(bags, config.dim, generator=generator, dtype=config.dtype))


def ask(module: Any, asked: Lookup) -> Tensor:
    """Look up in a module."""
    out = module(asked.ids) if asked.offsets is None else module(asked.ids, asked.offsets, asked.weights)
    assert isinstance(out, Tensor)
    return out


def reference(leaf: Tensor, local: Tensor, asked: Lookup, mode: str | None, padding: int | None) -> Tensor:
    """Look up in plain rows, as torch does."""
    if mode is None:
        return F.embedding(local, leaf, padding_idx=padding)
    assert asked.offsets is not None
    offsets, weights = asked.offsets.long(), asked.weights
    return F.embedding_bag(local, leaf, offsets, mode=mode, per_sample_weights=weights, padding_idx=padding)
