"""The pool of ranks itself: a scenario that goes wrong fails alone."""

from __future__ import annotations

import pool_scenarios as scenarios
import pytest
import torch.distributed as dist
from rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.release


def test_scenarios_run_on_as_many_ranks_as_asked(ranks: RankPool) -> None:
    """Each rank has its number and one thread, and the processes stay for the next scenario."""
    found = [ranks.run(scenarios.add_up, size, 10) for size in (1, 2, 3, 4, 5)]
    for size, each in enumerate(found, start=1):
        assert [rank[:5] for rank in each] == [(sum(range(size)) * 10, i, size, i, 1) for i in range(size)]


def test_scenario_that_fails_does_so_alone(ranks: RankPool) -> None:
    """The message has the error of a rank; ranks that end or hang are named, and the next scenario has new ones."""
    with pytest.raises(RanksFailed, match=r"rank 1 of 3: (.|\n)*ValueError: this is rank 1"):
        ranks.run(scenarios.raise_on, 3, 1)
    assert ranks.run(scenarios.end_on, 3, 1, lost={1}) == ["alone", None, "alone"]
    with pytest.raises(RanksFailed, match="rank 1 of 2: is gone, or hangs"):
        ranks.run(scenarios.end_on, 2, 1)
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 of 2: is gone, or hangs.*pool_scenarios.py.*hang"):
        ranks.run(scenarios.hang, 2, seconds=0.5)
    assert [rank[0] for rank in ranks.run(scenarios.add_up, 2, 10)] == [10, 10]


def test_scenarios_of_another_file_have_lanes_of_their_own(ranks: RankPool) -> None:
    """One that leaves its lanes broken spoils no other's scenarios."""
    ranks.run(scenarios.break_lanes, 2)
    with pytest.raises(RanksFailed, match="they are broken"):
        ranks.run(scenarios.agree, 2)
    ranks.run(scenarios.break_lanes, 2)
    ranks.run(dist.get_world_size, 2)
    assert ranks.run(scenarios.agree, 2) == [3, 3]
