"""Ranks that share one GPU, whose rows go between them through pinned host memory."""

from __future__ import annotations

from typing import Any

import gpu_scenarios as scenarios
import lookahead_scenarios as lookahead
import nccl_scenarios as nccl
import pytest
import simulated_gpu
import torch
from equality_scenarios import Case, train, train_all
from rank_pool import RankPool
from test_equality import UNEVEN, assert_as_one_process
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


def test_rows_go_between_gpus_on_hosts_with_the_bits_of_a_flat_exchange(ranks: RankPool, device: str) -> None:
    """Rounds and ids go in two levels; a communicator of gloo stands in for NCCL."""
    only_on_a_simulated_gpu()
    flat, two = (ranks.run(nccl.on_hosts, 3, per_host, nccl.train, device, on_gpu=True) for per_host in (1, 2))
    assert all(torch.equal(rows, flat[0]) for rows in (*flat, *two))


@pytest.mark.parametrize("size", [3, 5])
def test_lookahead_between_gpus_on_hosts_changes_no_bit(ranks: RankPool, device: str, size: int) -> None:
    only_on_a_simulated_gpu()
    more = {"sizes": UNEVEN, "device": device, "on_gpu": True}
    require_equal(ranks.run(nccl.on_hosts, size, 2, lookahead.compared, (0, 1, 3), **more), 3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(7))
def test_random_settings_have_the_bits_of_a_flat_exchange_without_lookahead(
    ranks: RankPool, device: str, part: int
) -> None:
    only_on_a_simulated_gpu()
    seeds = range(5 * part, 5 * part + 5)
    assert ranks.run(nccl.compared_at_random, 4, seeds, device) == [{}] * 4


def test_rank_that_is_killed_during_a_lookahead_ends_the_others(ranks: RankPool, device: str) -> None:
    """With an error, not a hang, although their GPUs wait for it."""
    only_on_a_simulated_gpu()
    found = ranks.run(nccl.on_hosts, 3, 2, nccl.killed_with_a_lookahead, device, on_gpu=True, lost=(1,))
    for said, took in found[::2]:
        assert said.startswith("PeerError: another rank cannot be reached")
        assert took < 6
