"""Every possible plan, checked one by one, and by name the ones that the predecessor got wrong."""

from __future__ import annotations

import math

import pytest

from speedswap.batching.elastic import even_sizes, plan_accumulation
from speedswap.errors import BatchError

GLOBAL, MAXIMUM, RANKS = 512, 256, 8


def fault(plan, global_batch_size, maximum, world_size):
    """Return a plan's mistake; the empty string if it has none."""
    sizes = [size for rank in plan for size in rank]
    if len(plan) != world_size:
        return "ranks"
    if sum(sizes) != global_batch_size:
        return "sum"
    smallest, largest = min(sizes), max(sizes)
    if smallest < 1 or largest > maximum:
        return "bounds"
    if largest - smallest > 1:
        return "evenness"
    shares = [sum(rank) for rank in plan]
    if max(shares) - min(shares) > 1:
        return "shares"
    return ""


@pytest.mark.parametrize("world_size", range(1, RANKS + 1))
def test_p14_every_plan_is_exact_within_the_maximum_and_even(world_size):
    faults = [
        (global_batch_size, maximum, found)
        for global_batch_size in range(1, GLOBAL + 1)
        for maximum in range(1, MAXIMUM + 1)
        if (
            found := fault(
                plan_accumulation(global_batch_size, maximum, world_size), global_batch_size, maximum, world_size
            )
        )
    ]
    assert not faults, f"{len(faults)} of {GLOBAL * MAXIMUM} plans, the first for {faults[0]}"


@pytest.mark.parametrize("world_size", range(1, RANKS + 1))
def test_p14_ranks_have_equally_many_micro_batches_as_few_as_the_maximum_allows(world_size):
    """Unless there are too few samples: then some rank has one less, and only ranks without samples have none."""
    for global_batch_size in range(1, 129):
        for maximum in range(1, 65):
            plan = plan_accumulation(global_batch_size, maximum, world_size)
            fewest = math.ceil(global_batch_size / (maximum * world_size))
            steps = {len(rank) for rank in plan}
            assert max(steps) == fewest
            if fewest * world_size <= global_batch_size:
                assert steps == {fewest}
            else:
                assert sum(len(rank) for rank in plan) == global_batch_size


@pytest.mark.parametrize(
    "arguments, plan",
    [
        ((256, 64, 1), [[64, 64, 64, 64]]),
        ((256, 64, 2), [[64, 64], [64, 64]]),
        ((256, 64, 4), [[64], [64], [64], [64]]),
        ((100, 64, 1), [[50, 50]]),  # the predecessor: one of 100
        ((256, 64, 3), [[43, 43], [43, 42], [43, 42]]),  # one of 85 on each
        ((3, 8, 4), [[1], [1], [1], []]),  # of 0
    ],
)
def test_p14_plans_by_hand(arguments, plan):
    assert plan_accumulation(*arguments) == plan


def test_even_sizes_by_hand():
    assert even_sizes(10, 4) == [3, 3, 2, 2]
    assert even_sizes(8, 4) == [2, 2, 2, 2]
    assert even_sizes(5, 1) == [5]


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
@pytest.mark.parametrize("name", ["global_batch_size", "max_micro_batch_size", "world_size"])
def test_unfit_sizes_are_refused_by_name(name, value):
    sizes = {"global_batch_size": 8, "max_micro_batch_size": 4, "world_size": 2, name: value}
    with pytest.raises(BatchError, match=f"{name} is {value!r}; it must be an integer of at least 1"):
        plan_accumulation(**sizes)
