"""Checks of rounds between ranks: numbers, votes, and one error for all."""

from __future__ import annotations

import torch.distributed as dist
from ranks_common import raised

from speedswap.collectives import Kind, OwnPace, PeerOutOfMemory
from speedswap.errors import PeerError

FIRST, SECOND = 1, 2


def check_every_rank_hears_all_numbers(rank, world_size):
    pace = OwnPace.of(range(world_size))
    with pace.task(Kind.BACKWARD):
        assert pace.round(FIRST, rank, 10 * rank) == [[one, 10 * one] for one in range(world_size)]


def check_flags_of_which_some_rank_has_none(rank, world_size):
    pace = OwnPace.of(range(world_size))
    with pace.task(Kind.BACKWARD):
        assert pace.anywhere([2, 0]) == ([2, 0], False)
        assert pace.anywhere([rank, 0]) == ([world_size - 1, 0], True)


def check_a_rank_that_is_out_of_memory_takes_the_others_along(rank, world_size):
    pace = OwnPace.of(range(world_size))
    with pace.task(Kind.BACKWARD):
        if rank == 0:
            assert pace.round(FIRST, is_out_of_memory=True) == []
        else:
            error = raised(lambda: pace.round(FIRST))
            assert type(error) is PeerOutOfMemory
            assert "rank 0 has run out of memory" in str(error)
        assert len(pace.round(SECOND)) == world_size  # and they go on together


def check_an_error_of_one_rank_reaches_all(rank, world_size):
    pace = OwnPace.of(range(world_size))

    def work():
        with pace.task(Kind.BACKWARD):
            if rank == 1:
                raise ZeroDivisionError("a mistake")
            pace.round(FIRST)

    error = raised(work)
    if rank == 1:
        assert type(error) is ZeroDivisionError
    else:
        assert type(error) is PeerError
        assert "rank 1 failed" in str(error)
    with pace.task(Kind.FORWARD):
        assert len(pace.round(FIRST)) == world_size


def check_ranks_at_different_stages_are_told(rank, world_size):
    pace = OwnPace.of(range(world_size))

    def work():
        with pace.task(Kind.BACKWARD):
            pace.round(SECOND if rank == world_size - 1 else FIRST)

    error = raised(work)
    assert type(error) is PeerError
    assert f"rank {world_size - 1} is at another point" in str(error)
    assert "Every rank must call the splitter the same number of times" in str(error)


def check_ranks_of_unequally_many_groups_find_each_other(rank, world_size):
    """Connect ranks that ``dist.new_group`` with local synchronization would leave waiting under different names."""
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    paces = [OwnPace.of(range(world_size)) for _ in range(2)]
    for number, pace in enumerate(paces):
        with pace.task(Kind.BACKWARD):
            assert pace.round(FIRST, number) == [[number]] * world_size
