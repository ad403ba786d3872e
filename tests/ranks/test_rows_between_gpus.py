"""Ranks on several hosts with NCCL between GPUs: rounds and ids go in two levels, rows directly.

NCCL is a stand-in over gloo here, and rows in host memory are taken for those of a GPU; `test_gpu_ranks.py` has GPUs.
"""

from __future__ import annotations

import misfit_scenarios as misfits
import nccl_scenarios as scenarios
import pytest
import torch
from equality_scenarios import train_all
from rank_pool import RankPool
from test_equality import CASES_ON_HOSTS, assert_as_one_process


@pytest.mark.parametrize(("size", "per_host"), [(3, 2), (4, 2), (5, 2), (5, 3), (5, 4)])
def test_rows_that_are_not_merged_reach_the_rank_they_are_sent_to(ranks: RankPool, size: int, per_host: int) -> None:
    for found in ranks.run(scenarios.rows_sent_to_ranks, size, per_host, seed=size):
        assert all(torch.equal(came, expected) for came, expected in found)


@pytest.mark.parametrize("size", [3, 5])
def test_two_levels_have_the_bits_of_a_flat_exchange(ranks: RankPool, size: int) -> None:
    """For gradients whose sums depend on their order, which is that of the ranks."""
    flat, two = (ranks.run(scenarios.on_hosts, size, per_host, scenarios.train) for per_host in (1, 2))
    assert all(torch.equal(rows, flat[0]) for rows in (*flat, *two))


def test_ranks_on_hosts_train_as_one_process(ranks: RankPool) -> None:
    found = ranks.run(scenarios.on_hosts, 5, 2, train_all, CASES_ON_HOSTS)
    for number, case in enumerate(CASES_ON_HOSTS):
        assert_as_one_process(case, [each[number] for each in found])


def test_error_of_one_rank_is_raised_on_all_hosts_and_training_goes_on(ranks: RankPool) -> None:
    found = ranks.run(scenarios.on_hosts, 4, 2, scenarios.failing)
    for rank, (said, rows) in enumerate(found):
        assert torch.equal(rows, found[0][1])
        assert [each is not None for each in said] == [False, True, False, True, False], said
        for step in (1, 3):
            assert said[step].startswith("IdError" if rank == step else f"PeerError: rank {step} failed")


def test_rank_that_is_killed_is_noticed_on_all_hosts(ranks: RankPool) -> None:
    for said, took in ranks.run(scenarios.on_hosts, 3, 2, misfits.alone, "kill", lost=(1,))[::2]:
        assert said.startswith("PeerError: another rank cannot be reached")
        assert took < 6


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(6))
def test_random_settings_have_the_bits_of_a_flat_exchange_without_lookahead(ranks: RankPool, part: int) -> None:
    """On the CPU, where rows come ahead by gloo, and those that change again."""
    assert ranks.run(scenarios.compared_at_random, 5, range(6 * part, 6 * part + 6)) == [{}] * 5
