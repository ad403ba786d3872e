"""Rounds that carry no counts: lines are gathered in log2(ranks) messages, in place of one to every other rank."""

from __future__ import annotations

import lean_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_rounds_of_gradients_and_step_are_gathered(ranks: RankPool, world_size: int) -> None:
    """Once two steps have shown that they carry no counts; ids, weights and gradients go to every rank."""
    found = ranks.run(scenarios.trained, world_size)
    for steps, rows in found:
        assert steps[-1] == (4, 2 + 1, 2)
        assert steps[0] == (4, 4 + 1, 0)
        assert torch.equal(rows, found[0][1])


def test_norm_in_place_of_the_vote_is_expected_too(ranks: RankPool) -> None:
    for steps, _ in ranks.run(scenarios.trained, 3, clips=True):
        assert steps[-1] == (5, 3 + 1, 2)


def test_ranks_that_come_to_another_place_than_expected(ranks: RankPool) -> None:
    """A read in place of gradients costs an exchange; failures and ranks elsewhere are raised on all, which go on."""
    found = ranks.run(scenarios.departing, 3)
    for rank, (raised, rows) in enumerate(found):
        own = ["ValueError", "PeerError", "IdError", "ValueError", "PeerError"]
        assert raised == (own if rank == 1 else ["PeerError"] * 3)
        assert torch.equal(rows, found[0][1])
