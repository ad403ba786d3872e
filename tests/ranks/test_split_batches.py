"""A splitter over tables that ranks own: equal to one process with all ranks' samples, whatever each rank's memory."""

from __future__ import annotations

import pytest
import split_scenarios as scenarios
import torch
from rank_pool import RankPool


def close(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((9, 9), {"size": 4}),
        ((11, 3, 6), {"size": 4, "masked": True}),
        ((9, 0, 5), {"size": 2, "accumulate": True}),
        ((8, 12), {"size": 5, "wrapped": True}),
        ((12, 7, 5), {"most": {0: 4, 2: 3}}),
        ((16, 9), {"most": {1: 3}, "wrapped": True, "masked": True}),
    ],
    ids=str,
)
def test_batch_equals_that_of_one_process(ranks: RankPool, sizes, options) -> None:
    """Uneven ranks, one without samples, counts, accumulation, DistributedDataParallel, ranks short of memory."""
    expected = scenarios.unsplit_training(sizes, options)
    for losses, size, *tables in ranks.run(scenarios.split_training, len(sizes), sizes, options):
        close([losses, *tables], [expected[0], *expected[2:]])
        if "most" in options:
            assert size <= 4  # of all ranks, in parts that differ by one sample at most


@pytest.mark.parametrize("how", ["coupled", "forward"])
def test_coupled_losses_equal_those_of_one_process(ranks: RankPool, how) -> None:
    """Two passes look everything up twice; ranks' losses are averaged. Evaluation goes at each rank's pace too."""
    sizes = (7, 10, 4)
    *expected, outputs = scenarios.coupled_alone(sizes)
    for rank, (*tables, found) in enumerate(ranks.run(scenarios.coupled_training, 3, sizes, how)):
        close(tables, expected)
        torch.testing.assert_close(found, outputs[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("stage", "error"),
    [("id", "IdError"), ("forward", "ValueError"), ("memory", "OutOfMemoryError"), ("backward", "IndexError")],
)
def test_failure_on_one_rank_ends_the_batch_on_all(ranks: RankPool, stage, error) -> None:
    """It leaves tables and gradients as they were, and every rank goes on with the next batch."""
    sizes = (9, 7, 4)
    expected = scenarios.failing_alone(sizes)
    for rank, (said, *tables) in enumerate(ranks.run(scenarios.failing, 3, sizes, stage)):
        assert said == [error if rank == 1 else "PeerError"]
        close(tables, expected)


@pytest.mark.parametrize("looks", [False, True], ids=["", "looked at"])
def test_split_batch_after_an_ordinary_pass(ranks: RankPool, looks) -> None:
    """The first pass counts once, as the mean over the ranks, whether its gradient was looked at or not."""
    expected = scenarios.mixed_training(None, 5, looks)
    for tables in ranks.run(scenarios.mixed_training, 2, 5, looks):
        close(tables, expected)
