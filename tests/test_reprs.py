"""Results print in a line, without the numbers that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import speedswap
from speedswap.batching import estimate_memory, plan_accumulation
from speedswap.monitor import memory_snapshot

LONGEST = 300


def results(folder: Path) -> Iterator[Any]:
    """Yield a result of each kind, of calls whose results hold many numbers."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    batch = torch.randn(256, 20), torch.randint(5, (256,))
    yield estimate_memory(model, batch, torch.optim.Adam, loss_fn=lambda x, y: F.cross_entropy(model(x), y))
    yield plan_accumulation(global_batch_size=256, max_micro_batch_size=8, world_size=2)
    yield memory_snapshot()
    items = speedswap.Embedding(1000, 8)
    optimizer = torch.optim.Adam(items.parameters())
    items(torch.arange(500)).sum().backward()
    optimizer.step()
    yield from (items, items.table, items.weight, items.score(torch.randn(50, 8), k=10))
    yield items.table.gather(torch.arange(500))
    extra = {"seen": torch.arange(10_000), "words": {str(number): number for number in range(10_000)}}
    yield speedswap.save_checkpoint(folder, items, optimizer, step=7, extra=extra)
    yield speedswap.load_checkpoint(folder, items, optimizer)
    yield speedswap.IdMap(1000)


def test_results_print_in_a_short_line(tmp_path: Path) -> None:
    said = {type(found).__name__: repr(found) for found in results(tmp_path)}
    assert {name: text for name, text in said.items() if len(text) > LONGEST or "\n" in text} == {}
    assert said["MemoryEstimate"].startswith("MemoryEstimate(parameters=")
    assert said["Scored"] == "Scored(values and ids of shape (50, 10))"
    assert said["LoadedCheckpoint"].startswith("LoadedCheckpoint(step=7, extra={'seen': tensor(")
