"""A prefetched batch that is looked up more than once gives, each time, what the plain loop gives."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import speedswap

ROWS, DIM = 40, 3
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
LOOKUPS = list(itertools.product([*MODES, "train"], repeat=3))


def batches() -> list[Tensor]:
    return [torch.randint(ROWS, (6, 2), generator=torch.Generator().manual_seed(step)) for step in range(4)]


def run(kind: Any, lookups: tuple[str, ...], depth: int, device: str) -> list[list[Any]]:
    """Return all outputs, and the rows at the end, of a loop that looks each batch up several times."""
    items = kind(ROWS, DIM, seed=1).to(device)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    found = []
    for ids in speedswap.lookahead([ids.to(device) for ids in batches()], {items: lambda ids: ids}, depth=depth):
        for lookup in lookups:
            if lookup == "train":
                optimizer.zero_grad()
                loss = items(ids).square().sum()
                loss.backward()
                optimizer.step()
                found.append(loss.tolist())
            else:
                with MODES[lookup]():
                    found.append(items(ids).tolist())
    return [*found, items.table.read().tolist()]


@pytest.mark.parametrize("lookups", LOOKUPS, ids=lambda lookups: "-".join(lookups))
def test_evaluating_a_prefetched_batch_leaves_it_fit_for_training(lookups: tuple[str, ...], device: str) -> None:
    """In inference mode or without gradients, before and after training on it, in any order."""
    for kind in (speedswap.Embedding, speedswap.EmbeddingBag):
        assert run(kind, lookups, 1, device) == run(kind, lookups, 0, device)


class FailsOnce(torch.optim.Adam):
    """Adam whose step raises after it has changed everything, a given number of times."""

    failures = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("in the middle of the step")


def with_a_failed_step(depth: int, device: str) -> Tensor:
    items = speedswap.Embedding(ROWS, DIM, seed=1).to(device)
    optimizer = FailsOnce(items.parameters(), lr=0.1)
    for number, ids in enumerate(speedswap.lookahead(batches(), {items: lambda ids: ids}, depth=depth)):
        if number == 2:
            items(ids.to(device)).square().sum().backward()
            optimizer.failures = 1
            with contextlib.suppress(RuntimeError):
                optimizer.step()
            optimizer.zero_grad()
        items(ids.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return items.table.read()


def test_batch_whose_step_failed_is_trained_from_the_tables_rows(device: str) -> None:
    """Not from those that the failed step has changed on the device."""
    expected = with_a_failed_step(0, device)
    assert torch.equal(with_a_failed_step(1, device), expected)
    undisturbed = speedswap.Embedding(ROWS, DIM, seed=1).to(device)
    optimizer = torch.optim.Adam(undisturbed.parameters(), lr=0.1)
    for ids in batches():
        undisturbed(ids.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(undisturbed.table.read(), expected)
