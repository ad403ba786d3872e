"""The ids that a part of a model asks an embedding for, without the lookup."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import speedswap


class Hashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = speedswap.Embedding(1000, 4, seed=0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.items(input=tokens * 31 % 1000).sum(1)


def test_ids_are_those_of_the_lookup_which_reads_nothing() -> None:
    model = Hashed()
    tokens = torch.tensor([[7, 900], [2, 2]])
    assert torch.equal(speedswap.asked(model.items, lambda: model(tokens)), tokens * 31 % 1000)
    before = model.items.table.read()
    model.items.table.close()
    assert torch.equal(speedswap.asked(model.items, lambda: model(tokens)), tokens * 31 % 1000)
    assert len(before) == 1000
    assert not model.items._forward_pre_hooks


def test_a_lookahead_of_hashed_ids_is_the_plain_loop() -> None:
    batches = list(torch.randint(10_000, (6, 4, 3), generator=torch.Generator().manual_seed(0)))
    found = []
    for is_ahead in (False, True):
        model = Hashed()
        optimizer = torch.optim.Adam(model.parameters())
        ids = {model.items: lambda tokens, model=model: speedswap.asked(model.items, lambda: model(tokens))}
        for tokens in speedswap.lookahead(batches, ids) if is_ahead else batches:
            optimizer.zero_grad()
            model(tokens).square().sum().backward()
            optimizer.step()
        found.append(model.items.read())
    assert torch.equal(*found)


def test_errors_before_the_lookup_and_none_at_all() -> None:
    model = Hashed()
    with pytest.raises(ZeroDivisionError):
        speedswap.asked(model.items, lambda: 1 // 0)
    with pytest.raises(ValueError, match="function looked nothing up in Embedding"):
        speedswap.asked(model.items, lambda: None)
    assert not model.items._forward_pre_hooks
