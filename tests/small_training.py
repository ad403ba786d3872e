"""A small training, the same bits every time, for tests of tables that are killed or not closed, and their scripts."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from children import run_script
from torch import Tensor
from torch.optim import Optimizer

import speedswap

__all__ = ["DIM", "ROWS", "embedding", "ids_of", "over", "run_training", "train", "uninterrupted_rows"]

ROWS, DIM = 20, 4


def ids_of(step: int) -> Tensor:
    return torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))


def embedding(**settings: Any) -> speedswap.Embedding:
    """Return an embedding over a new table."""
    return speedswap.Embedding(ROWS, DIM, seed=3, dtype=torch.float64, **settings)


def over(table: speedswap.Table) -> speedswap.Embedding:
    """Return an embedding over an existing table."""
    return speedswap.Embedding(ROWS, DIM, table=table)


def train(items: speedswap.Embedding, optimizer: Optimizer, steps: Iterable[int]) -> Optimizer:
    """Train some steps, and return the optimizer."""
    for step in steps:
        optimizer.zero_grad()
        items(ids_of(step)).square().sum().backward()
        optimizer.step()
    return optimizer


def uninterrupted_rows(kind: Callable[..., Optimizer]) -> Tensor:
    """Return the rows after six steps in one go, in memory."""
    items = embedding()
    train(items, kind(items.parameters(), lr=0.1), range(6))
    return items.table.read()


def run_training(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script over a table at ``path`` in a separate process; it may use everything here."""
    preface = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch, speedswap
        from small_training import *
        torch.set_num_threads(1)  # some scripts fork
        path = sys.argv[1]
    """
    return run_script(textwrap.dedent(preface) + textwrap.dedent(script), path)
