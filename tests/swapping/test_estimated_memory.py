"""estimate_memory with tables: their rows are not counted, and the trial leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedswap

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


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("pending", [True, False])
def test_estimating_between_steps_changes_neither_gradients_nor_steps(
    model: nn.Sequential, pending: bool, accumulate: bool
) -> None:
    """Rows of the trial have momentum, and would move if the next step took them."""
    twin = nn.Sequential(speedswap.Embedding(ROWS, DIM, seed=1), nn.Flatten(), nn.Linear(2 * DIM, 1))
    twin[2].load_state_dict(model[2].state_dict())
    for each in (model, twin):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        each(torch.arange(100).view(50, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if pending:
            each(torch.tensor([[1, 2], [60, 61]])).square().sum().backward()
        if each is model:
            grad = each[0].weight.grad.clone() if pending else None
            speedswap.batching.estimate_memory(
                each,
                torch.randint(100, (16, 2)),
                optimizer,
                loss_fn=lambda ids: model(ids).square().sum(),
                accumulate=accumulate,
            )
            assert torch.equal(each[0].weight.grad, grad) if pending else each[0].weight.grad is None
        each(torch.tensor([[3, 4]])).square().sum().backward()
        optimizer.step()
    assert torch.equal(model[0].table.read(), twin[0].table.read())
    assert torch.equal(model[2].weight, twin[2].weight)
