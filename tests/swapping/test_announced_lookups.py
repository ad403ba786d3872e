"""A lookahead over a module that makes its ids of several tensors, and looks them up in several tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.swapping.lookup import look_up
from speedswap.swapping.prefetched import Announced, Request

Batch = tuple[Tensor, Tensor]


class Pairs(nn.Module):
    """Two tables that are asked for the same ids: those of two features, the second's above the first's."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.wide = speedswap.Embedding(20, 4, seed=1, device=device)
        self.narrow = speedswap.Embedding(20, 2, seed=2, device=device)
        self.merged = 0

    def tables(self) -> tuple[speedswap.Embedding, speedswap.Embedding]:
        return self.wide, self.narrow

    def merge(self, given: Batch) -> Tensor:
        self.merged += 1
        return torch.cat([given[0], given[1] + 10])

    def lookups_of(self, given: Batch) -> list[tuple[Any, Announced]]:
        ids = self.merge(given)
        return [(each, Announced(each.table, given, ids.device, ids)) for each in self.tables()]

    def forward(self, given: Batch) -> Tensor:
        found = [each._look_up(Request(given, given[0].device, lambda: self.merge(given))) for each in self.tables()]
        return sum((look_up(weight, local).square().sum() for weight, local in found), start=torch.zeros(()))


def batches(device: str, steps: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(10, (6,), generator=generator).to(device),
            torch.randint(10, (5,), generator=generator).to(device),
        )
        for _ in range(steps)
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_results_are_those_of_the_plain_loop(depth: int, device: str) -> None:
    found = []
    for ahead in (True, False):
        model = Pairs(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loop: Iterable[Batch] = batches(device)
        for batch in speedswap.lookahead(loop, {model: lambda batch: batch}, depth=depth) if ahead else loop:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        assert model.merged == (8 if ahead else 16)  # once ahead, and not again
        found.append([each.table.read(column=name) for each in model.tables() for name in each.table.columns])
    assert len(found[0]) == 6
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))


def test_tensors_that_change_after_they_were_announced_are_looked_up_anew(device: str) -> None:
    model = Pairs(device)
    with torch.no_grad():
        for first, second in speedswap.lookahead(batches(device), {model: lambda batch: batch}):
            second.copy_(9 - second)
            expected = sum(each.read(torch.cat([first, second + 10]).cpu()).square().sum() for each in model.tables())
            torch.testing.assert_close(model((first, second)).cpu(), expected)


def test_a_module_that_announces_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a key of ids is .*Linear; give a speedswap.Embedding"):
        speedswap.lookahead([], {nn.Linear(1, 1): lambda batch: batch})  # type: ignore[type-var]
