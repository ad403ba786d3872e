"""Ranks on several hosts whose process group has NCCL, so that all ranks of a host carry what passes between hosts.

Rows are in host memory here; `test_gpu_ranks.py` has GPUs.
"""

from __future__ import annotations

import levels_scenarios as levels
import lookahead_scenarios as lookahead
import nccl_scenarios as scenarios
import pytest
import torch
from equality_scenarios import train_all
from rank_pool import RankPool
from test_equality import CASES_ON_HOSTS, UNEVEN, assert_as_one_process
from test_levels import in_order_of_hosts
from test_lookahead import require_equal


@pytest.mark.parametrize(("size", "per_host"), [(3, 2), (4, 2), (5, 2), (5, 3), (5, 4)])
def test_rows_that_are_not_merged_reach_the_rank_they_are_sent_to(ranks: RankPool, size: int, per_host: int) -> None:
    for found in ranks.run(scenarios.rows_sent_to_ranks, size, per_host, seed=size):
        assert all(torch.equal(came, expected) for came, expected in found)


@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0, 1], [2, 3]], [[0, 1, 2], [3, 4]], [[0, 1, 2, 3], [4]]])
def test_gradients_are_summed_by_host_and_then_over_hosts(ranks: RankPool, hosts: list[list[int]]) -> None:
    """Bit for bit, whichever rank of a host carries them."""
    found = ranks.run(scenarios.on_hosts, 1 + hosts[-1][-1], len(hosts[0]), scenarios.train, tables=2)
    for first, second in found:
        assert torch.equal(first, in_order_of_hosts(hosts, steps=4))
        assert torch.equal(second, found[0][1])


def test_every_rank_of_two_hosts_carries_for_the_rank_in_its_place(ranks: RankPool) -> None:
    """Two hosts have two carriers: each sends half as much as the single one without NCCL."""
    before, after = (
        [found for _, found in ranks.run(run, 4, 2, *more, levels.train, None, [[0, 1], [2, 3]], exact=True)]
        for run, more in ((levels.on_hosts, ()), (scenarios.on_hosts, ()))
    )
    assert {each["messages"] for each in after} == {max(each["messages"] for each in before)}
    assert min(each["messages"] for each in before) == 0
    for rank in range(4):
        assert 0.4 < after[rank]["bytes"] / max(each["bytes"] for each in before) < 0.6


def test_ranks_on_hosts_train_as_one_process(ranks: RankPool) -> None:
    found = ranks.run(scenarios.on_hosts, 5, 3, train_all, CASES_ON_HOSTS)
    for number, case in enumerate(CASES_ON_HOSTS):
        assert_as_one_process(case, [each[number] for each in found])


def test_lookahead_changes_no_bit(ranks: RankPool) -> None:
    require_equal(ranks.run(scenarios.on_hosts, 4, 2, lookahead.compared, (0, 1, 3), sizes=UNEVEN), 3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(6))
def test_random_settings_have_the_bits_of_one_carrier_without_lookahead(ranks: RankPool, part: int) -> None:
    """On the CPU, where rows come ahead by gloo, and those that change again."""
    assert ranks.run(scenarios.compared_at_random, 5, range(6 * part, 6 * part + 6)) == [{}] * 5
