"""Gradients of rows that ranks own have the norms and sums of all ranks' rows, however they were changed."""

from __future__ import annotations

import grad_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool


@pytest.mark.parametrize("ids", [[*range(20)], [3]], ids=["all rows", "one row"])
def test_norms_are_those_of_all_rows(ranks: RankPool, ids: list[int]) -> None:
    """Also on a rank that owns no row of the gradient; norms of the whole matrix are refused with a remedy."""
    expected, _ = scenarios.norms(None, ids)
    for found, said in ranks.run(scenarios.norms, 3, ids):
        for name, norm in found.items():
            torch.testing.assert_close(norm, expected[name], rtol=1e-6, atol=0, msg=lambda text, n=name: f"{n}: {text}")
        assert len(said) == 2
        assert all("use torch.linalg.vector_norm" in text for text in said)


def test_gradient_without_rows(ranks: RankPool) -> None:
    """Its largest value is the error of torch, on all ranks."""
    expected = scenarios.reduce_no_rows(None)
    assert ranks.run(scenarios.reduce_no_rows, 3) == [expected] * 3
    assert expected[0] == 0
    assert expected[1]


@pytest.mark.parametrize("how", ["set", "by hand", "squares"])
def test_clipping_gradients_of_ones_own(ranks: RankPool, how: str) -> None:
    """Dense layers stay alike on all ranks, and are those of one process."""
    expected = scenarios.clip_another(None, how)
    for found in ranks.run(scenarios.clip_another, 2, how):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_first_use_of_a_gradient_exchanges_all_tables(ranks: RankPool) -> None:
    """Facts about it, and setting it to zero or None, meet no other rank."""
    for found in ranks.run(scenarios.rounds_of_uses, 2):
        assert found == dict.fromkeys(scenarios.FACTS, 0) | dict.fromkeys(scenarios.USES, 1)


def test_gradients_taken_before_their_exchange(ranks: RankPool) -> None:
    """They are the weight's gradient, as it is when they are used; one that was dropped has no rows."""
    for found in ranks.run(scenarios.kept_handles, 2):
        assert found == [20, 60, 0, 1, 140, 140, 240, 240, 1]
