"""One rank fails at any call of a step: all raise soon, no table changes, and training goes on as one process trains.

A slice of all calls; SPEEDSWAP_FAULTS=5000 makes it as many faults as that, of 1,400 calls and their returns, in
a model's first step and later, by four kinds of failure, on two to four ranks.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import fault_scenarios as scenarios
import pytest
from rank_pool import RankPool

KINDS = ("memory", "error", "interrupt", "signal")
FAULTS = int(os.environ.get("SPEEDSWAP_FAULTS", "60"))
AT_ONCE = 16


@pytest.mark.sweep(1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_step_that_fails_on_one_rank_fails_on_all(ranks: RankPool, world_size, record_property) -> None:
    """Faults are spread evenly over the calls of a step."""
    rng = random.Random(world_size)
    calls = {after: ranks.run(scenarios.calls_of_a_step, world_size, after)[0] for after in (False, True)}
    count = FAULTS // 3
    plan = []
    for number in range(count):
        after, is_first = rng.random() < 0.5, number % 8 == 0
        most = len(calls[after][0 if is_first else 1])
        at = 1 + int(most * (number + rng.random()) / count)
        fault = {"at": at, "kind": rng.choice(KINDS), "after": after}
        plan.append((rng.randrange(world_size), fault, is_first))
    rng.shuffle(plan)
    outcomes: Counter[str] = Counter()
    for begin in range(0, len(plan), AT_ONCE):
        some = plan[begin : begin + AT_ONCE]
        outcomes += scenarios.check(ranks.run(scenarios.attack, world_size, some, f"{world_size}-{begin}"))
    print(f"{world_size} ranks, {sum(outcomes.values())} faults: {dict(outcomes)}")
    record_property("faults", dict(outcomes))
    assert sum(outcomes.values()) == count
    assert outcomes["ended"] < count / 3
    assert outcomes["no fault"] <= count / 10


def test_an_error_right_after_an_exchange_is_told_in_the_next_round(ranks: RankPool) -> None:
    """The exchange counts as done, so that this rank is where the others are."""
    *_, fifth = ranks.run(scenarios.calls_of_a_step, 3, True, 5)[1]  # from where on rounds without counts are lean
    plan = []
    for at, place in enumerate(fifth, 1):
        if place == "lane.py:connected":
            fault = {"at": at, "kind": "error", "after": True}
            plan += [(1, {"at": 0}, True), (1, {"at": 0}, False), (1, fault, False)]
    outcomes = scenarios.check(ranks.run(scenarios.attack, 3, plan, "exchanges"))
    assert sum(outcomes.values()) == len(plan) >= 12
    assert outcomes["no fault"] == 2 * len(plan) // 3


def test_full_disk_of_one_rank_keeps_the_step_from_all_tables(ranks: RankPool, tmp_path) -> None:
    """Room is made before the ranks vote; once there is some again, all go on."""
    for rank, said in enumerate(ranks.run(scenarios.full_disk, 3, str(tmp_path))):
        ((_, text),) = said
        assert text.startswith("TableFullError" if rank == 1 else "PeerError: rank 1 failed in the same step"), said
