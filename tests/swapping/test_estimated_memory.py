"""estimate_memory with tables: their rows are not counted, and the trial leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedswap
from speedswap.errors import BatchError

ROWS, DIM = 100_000, 16


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(speedswap.Embedding(ROWS, DIM, seed=1), nn.Flatten(), nn.Linear(2 * DIM, 1))


@pytest.mark.parametrize("made", [True, False], ids=["an optimizer", "its class"])
def test_estimating_counts_no_table_and_leaves_no_gradient(made: bool, model: nn.Sequential) -> None:
    optimizer = torch.optim.Adam(model.parameters()) if made else torch.optim.Adam
    before = model[0].table.read()
    estimate = speedswap.batching.estimate_memory(
        model, torch.randint(ROWS, (64, 2)), optimizer, loss_fn=lambda ids: model(ids).square().mean()
    )
    assert estimate.parameters == estimate.gradients == 4 * (2 * DIM + 1)
    assert estimate.optimizer_state < 4 * estimate.parameters
    assert model[0].weight.grad is None
    assert torch.equal(model[0].table.read(), before)
    # A training batch behaves as if there had been no trial.
    twin = nn.Sequential(speedswap.Embedding(ROWS, DIM, seed=1), nn.Flatten(), nn.Linear(2 * DIM, 1))
    twin[2].load_state_dict(model[2].state_dict())
    for each in (model, twin):
        torch_optimizer = torch.optim.Adam(each.parameters())
        each(torch.tensor([[1, 2], [3, 1]])).square().mean().backward()
        torch_optimizer.step()
    assert torch.equal(model[0].table.read(), twin[0].table.read())


def test_table_that_only_the_loss_knows_is_left_as_it_was() -> None:
    items, head = speedswap.Embedding(ROWS, DIM, seed=1), nn.Linear(DIM, 1)
    estimate = speedswap.batching.estimate_memory(
        head, torch.randint(ROWS, (16,)), loss_fn=lambda ids: head(items(ids)).sum()
    )
    assert estimate.parameters == 4 * (DIM + 1)
    assert items.weight.grad is None


def test_estimating_between_backward_and_step_is_an_error(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2]])).sum().backward()
    grad = model[0].weight.grad.clone()
    with pytest.raises(BatchError, match=r"0\.weight has a gradient.*optimizer\.zero_grad\(\)"):
        speedswap.batching.estimate_memory(model, torch.randint(ROWS, (4, 2)), loss_fn=lambda ids: model(ids).sum())
    assert torch.equal(model[0].weight.grad, grad)
    optimizer.step()
