"""Lookups of separate tables of ranks share the rounds of one."""

from __future__ import annotations

import pytest
import sharing_scenarios as scenarios
import torch
from rank_pool import RankPool


@pytest.mark.parametrize("kind", ["collection", "told"])
def test_step_of_any_number_of_tables_takes_four_rounds(ranks: RankPool, kind: str) -> None:
    """Ids are those of a collection, or told by a lookahead."""
    counts = (1, 3, 10)
    found = [ranks.run(scenarios.steady, 2, count, kind) for count in counts]
    assert [each[0][:2] for each in found] == [(4, 1)] * len(counts)
    assert all(rounds == found[0][0][0] for each in found for rounds, _, _ in each)


def test_separate_lookups_take_two_rounds_each(ranks: RankPool) -> None:
    assert [ranks.run(scenarios.steady, 2, count, "apart")[0][0] for count in (1, 3)] == [4, 8]


def test_loops_that_change_their_ways_change_no_bit(ranks: RankPool) -> None:
    apart, shared = (ranks.run(scenarios.departing, 3, shares=shares) for shares in (False, True))
    for (rows, rounds), (rows_shared, rounds_shared) in zip(apart, shared, strict=True):
        assert all(map(torch.equal, rows, rows_shared))
        assert rounds[6] == 2 * 4 + 3
        assert rounds_shared[6] == 2 + 3
        assert rounds_shared == shared[0][1]


@pytest.mark.parametrize("how", ["id", "exception"])
def test_failure_between_lookups_that_share_rounds(ranks: RankPool, how: str) -> None:
    """All ranks raise, no table changes, and all go on together."""
    found = ranks.run(scenarios.failing, 3, how)
    for rank, (raised, steps, rows) in enumerate(found):
        own, others = (["IdError"], ["PeerError"]) if how == "id" else (["ValueError", "PeerError"], ["PeerError"] * 2)
        assert raised == (own if rank == 1 else others)
        assert steps == (6 if how == "id" else 5)
        assert all(map(torch.equal, rows, found[0][2]))
