"""Several process groups in one job, and processes outside its ranks."""

from __future__ import annotations

import re

import groups_scenarios as scenarios
import torch
from rank_pool import RankPool

SIZE = 5  # the whole job, all of which makes a group


def close(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_groups_train_as_one_process(ranks: RankPool) -> None:
    """A recreated group, one without the first rank, overlapping ones, and two of the same ranks."""
    expected = scenarios.every_group(None, SIZE)
    for rank, found in enumerate(ranks.run(scenarios.every_group, SIZE, SIZE)):
        if rank == 0:
            (said,) = found.pop("without the first")
            assert "group does not contain rank 0, this process" in said
        for name, rows in found.items():
            close(rows, expected[name])


def test_connections_of_one_name_are_made_again(ranks: RankPool) -> None:
    """Former addresses are not taken for the current ones."""
    for found in ranks.run(scenarios.connected_again, 3):
        assert found == [[10 * number + rank for rank in range(3)] for number in range(4)]


def test_forked_workers_are_told_that_ranks_alone_look_up(ranks: RankPool) -> None:
    """At once, instead of waiting for other ranks; workers that return ids work, and the training goes on."""
    _, ids, expected = scenarios.forked(None, 2)
    for said, found, rows in ranks.run(scenarios.forked, 2, 2):
        assert "RanksError" in said
        assert "forked from rank" in said
        assert "let workers return ids, and look up in the training loop" in said
        assert found == ids
        close([rows], [expected])


def test_a_wrapper_that_would_average_rows_is_named(ranks: RankPool) -> None:
    """With a reason that holds for a table of all ranks."""
    for said in ranks.run(scenarios.wrapped, 2):
        assert re.match(
            r"RanksError: each rank looks up different rows of table 'table-\d+', but DistributedData", said
        )
        assert "speedswap.ignore_in_ddp(model)" in said


def test_copies_and_pickles_are_refused_with_a_remedy(ranks: RankPool) -> None:
    expected = scenarios.train(scenarios.table(None), None, range(2), range(2))
    for said, rows in ranks.run(scenarios.copied, 2, 2):
        assert all(error.startswith("TypeError: ") and "save" in error for error in said), said
        close([rows], [expected])
