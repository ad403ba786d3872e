"""Ranks that share one GPU, whose rows go between them through pinned host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu_scenarios as scenarios
import lookahead_scenarios as lookahead
import nccl_scenarios as nccl
import pytest
import simulated_gpu
import torch
from equality_scenarios import Case, train, train_all
from rank_pool import RankPool
from test_equality import CASES_ON_HOSTS, UNEVEN, assert_as_one_process
from test_levels import in_order_of_hosts
from test_lookahead import require_equal

import speedswap

CASES: dict[str, dict[str, Any]] = {
    "pinned": {"clip": {"norm_type": 2.0}, "sizes": UNEVEN},
    "staged": {"settings": {"storage": speedswap.Pinned("staged")}, "passes": 2},
    "device": {"settings": {"storage": "device"}, "optimizer": "momentum"},
    "pageable": {"settings": {"storage": "pageable"}, "scaler": True},
    "bags": {"model": "bag mean ragged", "optimizer": "adagrad", "sizes": UNEVEN},
    "ignored on a rank": {"ignoring": ((2, 1), (3, -1)), "passes": 2},
    "with fewer rows than ranks": {"rows": 1, "padding_idx": None},
}

WAITS = 4  # of the host for the GPU, in a step


@pytest.fixture(autouse=True)
def _on_a_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_on_a_gpu_as_one_process_does_on_the_cpu(ranks: RankPool, device: str, name: str) -> None:
    settings = {"storage": "pinned", **CASES[name].get("settings", {})}
    case = Case(**{**CASES[name], "settings": settings, "dense": "manual", "device": device})
    found = ranks.run(train_all, 2, [case])
    assert_as_one_process(
        case, [each[0] for each in found], train(Case(**{**vars(case), "settings": {}, "device": "cpu"}), None, 2)
    )


@pytest.mark.parametrize("scenario", [scenarios.keyed, scenarios.collection, scenarios.scored, scenarios.compact])
def test_ranks_on_a_gpu_do_as_on_the_cpu(ranks: RankPool, device: str, scenario: Any) -> None:
    """Keys of an id map, tables of a collection with bags, scores, rows stored as bfloat16 with a lookahead."""
    for found, expected in zip(ranks.run(scenario, 2, device), ranks.run(scenario, 2, "cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2 if scenario is scenarios.compact else 1e-6, atol=1e-6)


def test_bytes_of_rows_go_through_nccl(ranks: RankPool) -> None:
    """With itself, since two ranks cannot share a GPU there: the call and its arguments are those of any rank."""
    if not (torch.cuda.is_available() and torch.version.cuda and torch.distributed.is_nccl_available()):
        pytest.skip("needs a GPU, and NCCL")
    assert ranks.run(scenarios.through_nccl, 1) == [True]


@pytest.mark.parametrize("size", [1, 3])
def test_lookahead_changes_no_bit(ranks: RankPool, device: str, size: int) -> None:
    """Ids go ahead and rows are gathered ahead; weights are sent in the batch's turn, through host memory."""
    found = ranks.run(lookahead.compared, size, (0, 1, 3), sizes=UNEVEN, device=device)
    require_equal(found, 3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("between", "wanted"), lookahead.BETWEEN)
def test_what_comes_between_steps_changes_no_bit(ranks: RankPool, device: str, between: str, wanted: int) -> None:
    more = {"optimizer": "adagrad", "between": between, "device": device}
    require_equal(ranks.run(lookahead.compared, 2, (0, 1), **more), wanted)


def only_on_a_simulated_gpu() -> None:
    if not simulated_gpu.is_on():
        pytest.skip("stands in for NCCL, whose ranks need a GPU each")


@pytest.mark.parametrize("size", [3, 4, 5])
def test_rows_go_between_gpus_with_the_bits_of_two_levels_on_the_cpu(ranks: RankPool, device: str, size: int) -> None:
    """Summed over the ranks of a host, and then over hosts; a communicator of gloo stands in for NCCL."""
    only_on_a_simulated_gpu()
    hosts = [[*range(first, min(first + 2, size))] for first in range(0, size, 2)]
    for (rows,) in ranks.run(nccl.on_hosts, size, 2, nccl.train, device):
        assert torch.equal(rows, in_order_of_hosts(hosts, steps=4))


def test_rows_between_gpus_are_those_of_a_flat_exchange(ranks: RankPool, device: str) -> None:
    """For gradients whose sums are the same in any order, of several tables, which share each hop."""
    only_on_a_simulated_gpu()
    flat, two = (ranks.run(nccl.on_hosts, 5, per_host, nccl.train, device, exact=True, tables=3) for per_host in (1, 3))
    assert all(torch.equal(*both) for found in (*flat, *two) for both in zip(found, flat[0], strict=True))


def test_hosts_may_have_ranks_between_those_of_others(ranks: RankPool, device: str) -> None:
    """Rows of a hop then lie in the order of ranks, not of hosts; each rank sends to its host and one of the other."""
    only_on_a_simulated_gpu()
    hosts = [[0, 3], [1, 2]]
    for rank, (rows, sent) in enumerate(ranks.run(nccl.train_on_groups, 4, hosts, device, alone=True)):
        assert torch.equal(rows, in_order_of_hosts(hosts, steps=4))
        own = next(ranks_of_host for ranks_of_host in hosts if rank in ranks_of_host)
        for hop, counts in enumerate(sent):
            others = [other for other, count in enumerate(counts) if count and other not in own]
            assert len(others) == (hop % 3 == 1)


def test_ranks_on_hosts_train_on_gpus_as_one_process_does(ranks: RankPool, device: str) -> None:
    only_on_a_simulated_gpu()
    cases = [replace(case, device=device, dense="manual") for case in CASES_ON_HOSTS[:2]]
    found = ranks.run(nccl.on_hosts, 5, 2, train_all, cases)
    for number, case in enumerate(cases):
        assert_as_one_process(case, [each[number] for each in found], train(replace(case, device="cpu"), None, 5))


def test_hops_add_no_wait_for_the_gpu(ranks: RankPool, device: str) -> None:
    """A lookup and its gradients take three exchanges each in place of one, all of them posted without a wait."""
    only_on_a_simulated_gpu()
    for per_host, exchanges in ((1, 2), (2, 6)):
        for waits, number in ranks.run(nccl.waits_of_a_step, 4, per_host, device):
            assert (len(waits), number) == (WAITS, exchanges), waits


@pytest.mark.parametrize("size", [3, 5])
def test_lookahead_between_gpus_on_hosts_changes_no_bit(ranks: RankPool, device: str, size: int) -> None:
    only_on_a_simulated_gpu()
    more = {"sizes": UNEVEN, "device": device}
    require_equal(ranks.run(nccl.on_hosts, size, 2, lookahead.compared, (0, 1, 3), **more), 3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(7))
def test_random_settings_have_the_bits_of_rows_through_host_memory_without_lookahead(
    ranks: RankPool, device: str, part: int
) -> None:
    only_on_a_simulated_gpu()
    seeds = range(5 * part, 5 * part + 5)
    assert ranks.run(nccl.compared_at_random, 4, seeds, device) == [{}] * 4


def test_rank_that_is_killed_during_a_lookahead_ends_the_others(ranks: RankPool, device: str) -> None:
    """With an error, not a hang, although their GPUs wait for it."""
    only_on_a_simulated_gpu()
    found = ranks.run(nccl.on_hosts, 3, 2, nccl.killed_with_a_lookahead, device, lost=(1,))
    for said, took in found[::2]:
        assert said.startswith("PeerError: another rank cannot be reached")
        assert took < 6
