"""The garbage collector of a rank takes no part in what the ranks do together."""

from __future__ import annotations

import garbage_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool


@pytest.mark.parametrize(
    "where",
    [None, "before the lookups", "between lookups", "before the backward pass", "before the step"],
)
def test_a_loop_that_was_left_changes_no_later_one_wherever_it_is_freed(ranks: RankPool, where: str | None) -> None:
    """One rank frees it, at once or in the midst of a later loop, in which every lookup still takes what came ahead."""
    for rounds, taken, rows in ranks.run(scenarios.left_loop, 2, where):
        (wanted,) = {*rounds[:3]}
        assert rounds == [wanted] * 8
        assert taken == 8 * scenarios.TABLES
        (_, _, others) = ranks.run(scenarios.left_loop, 2, None)[0]
        assert all(map(torch.equal, rows, others))


@pytest.mark.parametrize("frees", [0, 1])
@pytest.mark.parametrize("left", ["lookups", "gradients", "gradients of one rank"])
def test_gradients_of_a_model_that_was_dropped_do_not_part_the_ranks(ranks: RankPool, left: str, frees: int) -> None:
    """One rank has freed the model, and the other has not yet."""
    found = ranks.run(scenarios.freed_model, 2, left, frees)
    wanted = ranks.run(scenarios.freed_model, 2, left, None)[0][0]
    for rows, rounds in found:
        assert all(map(torch.equal, rows, wanted))
        assert rounds[1:] == found[0][1][1:]


def test_rows_that_some_ranks_must_ask_for_are_asked_for_together(ranks: RankPool) -> None:
    """The first step adds columns before some ranks have lent rows for the next batch, and after others have."""
    for rounds, rows, said in ranks.run(scenarios.partly_fresh, 3):
        assert said == []
        assert max(rounds) <= 6
        assert rounds[-1] == 3
        assert len(rows) == scenarios.TABLES
