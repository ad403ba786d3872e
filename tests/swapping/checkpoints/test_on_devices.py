"""Checkpoints of a training on a GPU, whose ids, gradients and state are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import speedswap


def training(device: str, storage: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    items = speedswap.Embedding(500, 8, seed=1, storage=storage, dtype=torch.float64)
    model = nn.Sequential(items, nn.Linear(8, 1, dtype=torch.float64)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: str) -> None:
    batches = (torch.randint(500, (16,), generator=torch.Generator().manual_seed(step)).to(device) for step in steps)
    for ids in speedswap.lookahead(batches, {model[0]: lambda ids: ids}, depth=2):
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("storage", ["auto", "pageable"])
def test_a_training_goes_on_with_what_has_changed_alone(storage: str, device: str, tmp_path: Path) -> None:
    expected, optimizer = training(device, storage)
    run(expected, optimizer, range(8), device)
    model, optimizer = training(device, storage)
    run(model, optimizer, range(2), device)
    first = speedswap.save_checkpoint(tmp_path, model, optimizer, step=2)
    run(model, optimizer, range(2, 4), device)
    second = speedswap.save_checkpoint(tmp_path, model, optimizer, step=4)
    assert second.bytes_written < first.bytes_written / 3
    other, optimizer = training(device, storage)
    assert speedswap.load_checkpoint(tmp_path, other, optimizer).step == 4
    run(other, optimizer, range(4, 8), device)
    for name, value in expected.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert other[1].weight.device.type == device
