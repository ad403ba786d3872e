"""Ranks on several hosts exchange in two levels, by the same result as in one."""

from __future__ import annotations

from contextlib import closing, nullcontext

import levels_scenarios as scenarios
import lookahead_scenarios as lookahead
import misfit_scenarios as misfits
import pytest
import torch
from equality_scenarios import train_all
from rank_pool import RankPool
from test_equality import CASES_ON_HOSTS, UNEVEN, assert_as_one_process

import speedswap

HOSTS = {4: [[0, 1], [2, 3]], 5: [[0, 1], [2, 3], [4]], 6: [[0, 1, 2], [3, 4, 5]]}  # by the number of ranks


def in_order_of_hosts(hosts: list[list[int]], steps: int) -> torch.Tensor:
    """Return the rows that torch's SGD trains with sums over the ranks of each host, and then over the hosts."""
    weight = torch.ones(scenarios.ROWS, scenarios.DIM)
    for step in range(steps):
        total = torch.zeros_like(weight)
        for ranks in hosts:
            of_host = torch.zeros_like(weight)
            for rank in ranks:
                of_host.index_add_(0, scenarios.ids_of(rank, step), scenarios.factors_of(rank, step))
            total += of_host
        weight.add_(total, alpha=-0.125)
    return weight


@pytest.mark.parametrize("size", [4, 5])
def test_gradients_are_summed_by_host_and_then_over_hosts(ranks: RankPool, size: int) -> None:
    """Bit for bit, whichever rank carries them; the order of ranks alone would give others."""
    expected = in_order_of_hosts(HOSTS[size], steps=4)
    assert not torch.equal(expected, in_order_of_hosts([[rank] for rank in range(size)], steps=4))
    for (rows,), _ in ranks.run(scenarios.train, size, 2, HOSTS[size]):
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("size", HOSTS)
def test_two_levels_have_the_bits_of_one_with_less_between_hosts(ranks: RankPool, size: int) -> None:
    """For gradients whose sums do not depend on their order; two hosts exchange one message where all ranks did."""
    steps, tables, hosts = 4, 2, HOSTS[size]
    more = {"exact": True, "count": tables, "rows": 4000, "steps": steps}
    with closing(RankPool(6)) if size == 6 else nullcontext(ranks) as pool:
        flat, two = (pool.run(scenarios.train, size, host, hosts, **more) for host in (1, len(hosts[0])))
    for (rows, _), (expected, _) in zip(two, flat, strict=True):
        assert all(torch.equal(*both) for both in zip(rows, expected, strict=True))
    before, after = ({name: sum(found[name] for _, found in each) for name in flat[0][1]} for each in (flat, two))
    pairs = len(hosts) * (len(hosts) - 1)
    # A message for each round; and for each lookup's counts, ids and weights, and each step's gradients.
    assert after["messages"] == pairs * (two[0][1]["rounds"] + steps * (3 * tables + 1))
    of_ranks = sum(size - len(host) for host in hosts for _ in host)
    assert before["messages"] == of_ranks * flat[0][1]["exchanges"]
    print(f"{size} ranks on {len(hosts)} hosts: between them, flat {before}, in two levels {after}")
    assert after["bytes"] < 0.8 * before["bytes"]
    assert after["messages"] == {4: 104, 5: 312, 6: 104}[size] < before["messages"]


def test_ranks_on_hosts_train_as_one_process(ranks: RankPool) -> None:
    """Uneven and empty batches, passes, losses that ignore the rows, bags, clipping; hosts as torchrun tells them."""
    for size in (4, 5):
        found = ranks.run(scenarios.on_hosts, size, 2, train_all, CASES_ON_HOSTS)
        for number, case in enumerate(CASES_ON_HOSTS):
            assert_as_one_process(case, [each[number] for each in found])


def test_lookahead_on_hosts_changes_no_bit(ranks: RankPool) -> None:
    """Rows come ahead, and those that steps change are sent again."""
    for depths in ranks.run(scenarios.on_hosts, 5, 2, lookahead.compared, (0, 1, 3), sizes=UNEVEN):
        (rows, losses, taken, _), *others = depths
        assert taken == 0
        for other_rows, other_losses, other_taken, _ in others:
            assert torch.equal(other_rows, rows)
            assert other_losses == losses
            assert other_taken >= 3


def test_error_of_one_rank_is_raised_on_all_hosts_and_training_goes_on(ranks: RankPool) -> None:
    found = ranks.run(scenarios.failing, 4, 2)
    rows = found[0][1]
    for rank, (said, own_rows) in enumerate(found):
        assert torch.equal(own_rows, rows)
        assert [each is not None for each in said] == [False, True, False, True, False], said
        for step in (1, 3):
            assert said[step].startswith("IdError" if rank == step else f"PeerError: rank {step} failed")


@pytest.mark.parametrize(("what", "lost", "says"), [
    ("lookup", (), "did not come within 2 seconds"), ("kill", (1,), "cannot be reached"),
])  # fmt: skip
def test_rank_that_is_lost_is_noticed_on_all_hosts(ranks: RankPool, what, lost, says) -> None:
    """Within the time limit, although ranks on other hosts have no message of it."""
    for rank, result in enumerate(ranks.run(scenarios.on_hosts, 3, 2, misfits.alone, what, lost=lost)):
        if rank not in lost:
            said, took = result
            assert said.startswith("PeerError"), said
            assert (says if rank == 0 else "cannot be reached") in said or rank
            assert took < 6


def test_hosts_that_do_not_fit_are_refused_on_all_ranks(ranks: RankPool) -> None:
    for groups, well, other in ranks.run(scenarios.mistaken, 4, alone=True):
        assert groups.startswith("ValueError: host has the ranks [")
        assert "give all ranks of a host the same process group" in groups
        assert well is None
        assert other.startswith("ValueError: host is 3, but 2 for the first table of these ranks")
    with pytest.raises(ValueError, match="host is 0; give the number of ranks on each host"):
        speedswap.Ranks(host=0)


def test_host_may_be_a_process_group(ranks: RankPool) -> None:
    expected = in_order_of_hosts(HOSTS[4], steps=4)
    for (rows,) in ranks.run(scenarios.trained_by_groups, 4, HOSTS[4], alone=True):
        assert torch.equal(rows, expected)
