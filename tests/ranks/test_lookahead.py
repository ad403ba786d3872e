"""Lookahead over tables owned by ranks: bit for bit the loop without it, and no rank hangs."""

from __future__ import annotations

from pathlib import Path

import lookahead_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool

UNEVEN = ((7, 0, 3, 9, 5), (0, 6, 0, 2, 0), (0, 0, 0, 0, 0), (4, 4, 4, 4, 4))


def require_equal(results, wanted):
    """Assert that every rank has found the same rows and losses at each depth."""
    for depths in results:
        (rows, losses, taken, _), *others = depths
        assert taken == 0
        for other in others:
            assert torch.equal(other[0], rows)
            assert other[1] == losses
            assert other[2] >= wanted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_lookahead_changes_no_bit(ranks: RankPool, world_size: int) -> None:
    """Batches share rows, are of different sizes, empty on some ranks or on all; a lookup takes what came ahead.

    The first step gives the table its columns of state, so that the batches announced before it are looked up again.
    """
    results = ranks.run(scenarios.compared, world_size, (0, 1, 3), sizes=UNEVEN)
    require_equal([[depths[0], depths[1]] for depths in results], 5)
    require_equal([[depths[0], depths[2]] for depths in results], 3)
    assert world_size == 1 or any(depths[1][3] for depths in results)  # rows were sent again


@pytest.mark.parametrize(("between", "wanted"), scenarios.BETWEEN)
def test_what_comes_between_steps_changes_no_bit(ranks: RankPool, between: str, wanted: int) -> None:
    """Two lookups, a loss that ignores the rows, several passes, other lookups, and writes to the table."""
    require_equal(ranks.run(scenarios.compared, 2, (0, 1), optimizer="adagrad", between=between), wanted)


@pytest.mark.parametrize("store", ["bfloat16", "disk"])
def test_lookahead_of_other_stores_changes_no_bit(ranks: RankPool, store: str, tmp_path: Path) -> None:
    """Rows stored in fewer bytes are rounded alike; rows on disk come through the cache."""
    require_equal(ranks.run(scenarios.stored, 2, store, tmp_path), 5)


def test_bags_and_several_tables(ranks: RankPool) -> None:
    """Tables of one step are announced together, each lookup with its own rows."""
    plain, ahead = ranks.run(scenarios.bags, 3, 0), ranks.run(scenarios.bags, 3, 1)
    for (words, items, _), (words_ahead, items_ahead, taken) in zip(plain, ahead, strict=True):
        assert torch.equal(words, words_ahead)
        assert torch.equal(items, items_ahead)
        assert taken >= 8


def test_lookups_of_many_tables_come_ahead_together(ranks: RankPool) -> None:
    """In as many rounds as those of one; in the batch's turn they share one more, separate embeddings too."""
    for in_collection, lookups, clips in ((False, 8, False), (False, 8, True), (True, 1, False)):
        more = {"in_collection": in_collection, "clips": clips}
        plain, ahead = (ranks.run(scenarios.many, 3, 8, depth, **more) for depth in (0, 1))
        for (rows, rounds, _, said), (rows_ahead, rounds_ahead, errands, nothing) in zip(plain, ahead, strict=True):
            assert [text[:25] for text in said] == ["SW403: 8 tables of ranks "] * (not in_collection)
            assert nothing == []
            assert all(map(torch.equal, rows, rows_ahead))
            assert (rounds, rounds_ahead) == (2 * lookups + 2 + clips, 3 + clips)
            assert errands == [3] * 4


def test_evaluation_takes_what_came_ahead(ranks: RankPool) -> None:
    plain, ahead = ranks.run(scenarios.evaluate, 3, 0), ranks.run(scenarios.evaluate, 3, 1)
    for (found, _), (found_ahead, taken) in zip(plain, ahead, strict=True):
        assert all(map(torch.equal, found, found_ahead))
        assert taken == 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("counts", "steps"), [((5, 3), [3, 3]), ((4, 6, 1), [1, 1]), ((2, 0), [0, 0])])
def test_all_ranks_stop_with_the_first_whose_batches_end(ranks: RankPool, counts, steps, depth) -> None:
    """Ranks with more batches say so, leave them out, and all go on together with the next epoch.

    Nothing that was announced waits for ranks that have stopped, until the time limit closes the lane.
    """
    found = ranks.run(scenarios.uneven, len(counts), counts, depth)
    for rank, (taken, said, rows, waits) in enumerate(found):
        assert not waits
        assert taken == steps
        others = {counts[(rank + epoch) % len(counts)] != steps[0] for epoch in range(2)}
        assert any("ran out of batches" in text for text in said) == (True in others)
        assert torch.equal(rows, found[0][2])


def test_ranks_look_as_far_ahead_as_each_other(ranks: RankPool) -> None:
    """Otherwise one would leave the loop before the other has taken its last batches."""
    for said, steps in ranks.run(scenarios.other_depths, 2):
        assert said == "lookahead has depth 1 on rank 0, but depth 2 on rank 1; give the same on all ranks"
        assert steps == 5


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("loader", "ValueError: no such file"),
        ("id", "IdError"),
        ("thread", "MemoryError: no room"),
        ("thread interrupted", "KeyboardInterrupt"),
        ("body", "ValueError: this rank has had enough"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_failure_of_one_rank_is_raised_on_all_in_the_turn_of_its_batch(ranks: RankPool, where, error, depth) -> None:
    """The batches before it were trained on, no rank hangs, and all go on together."""
    found = ranks.run(scenarios.fail, 3, 1, where, depth)
    for rank, (raised, steps, before, after) in enumerate(found):
        assert raised.startswith(error if rank == 1 else "PeerError")
        assert steps == 2
        assert torch.equal(before, found[0][2])
        assert torch.equal(after, found[0][3])


@pytest.mark.parametrize("keep", [False, True])
def test_lookaheads_that_were_left_do_not_disturb_later_ones(ranks: RankPool, keep: bool) -> None:
    for plain, ahead in ranks.run(scenarios.leave, 2, keep):
        assert torch.equal(plain, ahead)


def test_ids_that_differ_from_those_announced_are_looked_up(ranks: RankPool) -> None:
    """On one rank only: the others discard their prefetched rows."""
    assert ranks.run(scenarios.differ, 3) == [[True] * 4] * 3


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_load_between_steps_changes_no_bit(ranks: RankPool, tmp_path: Path, on_disk: bool) -> None:
    """Rows of the next batch that came before a checkpoint is loaded are brought up to date."""
    plain, ahead = (ranks.run(scenarios.load_between, 2, tmp_path, on_disk, depth) for depth in (0, 1))
    for one, other in zip(plain, ahead, strict=True):
        assert all(map(torch.equal, one, other))


def test_loops_that_depart_from_what_they_announced_change_no_bit(ranks: RankPool) -> None:
    """A rank with other ids calls the others, who have their rows already; a table left out or looked up twice, another
    order, a read and a step in between: every one costs rounds, and nothing else."""
    plain, *others = (ranks.run(scenarios.departing, 3, depth) for depth in (None, 0, 1, 2))
    for depth, found in enumerate(others):
        for (rows, _), (rows_found, rounds) in zip(plain, found, strict=True):
            assert all(map(torch.equal, rows, rows_found))
            assert rounds[5:7] == [3 if depth else 4] * 2  # a table left out, another order
            assert rounds == found[0][1]


@pytest.mark.parametrize("how", ["id", "exception"])
def test_rank_that_leaves_a_batch_between_lookups(ranks: RankPool, how: str) -> None:
    """A bad id or an exception between lookups that need no round: all ranks raise, no table changes, all go on."""
    found = ranks.run(scenarios.failing_between, 3, 1, how)
    assert all(torch.equal(*rows) for each in found for rows in zip(each[2], found[0][2], strict=True))
    for rank, (raised, steps, _) in enumerate(found):
        own, others = (["IdError"], ["PeerError"]) if how == "id" else (["ValueError", "PeerError"], ["PeerError"] * 2)
        assert raised == (own if rank == 1 else others)
        assert steps == (7 if how == "id" else 6)
