"""Ranks that share one GPU, whose rows go between them through pinned host memory."""

from __future__ import annotations

from typing import Any

import gpu_scenarios as scenarios
import pytest
import torch
from equality_scenarios import Case, train, train_all
from rank_pool import RankPool
from test_equality import UNEVEN, assert_as_one_process

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
