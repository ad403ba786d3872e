"""Ranks that do not do the same: what must work does, and what cannot is an error on all of them, soon."""

from __future__ import annotations

import misfit_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool


def close(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "ignoring", [({0}, set(), {1}), ({0, 1}, {2}, {0}), ({2}, {2}, {0, 1, 2}), ({0, 1, 2},) * 3], ids=str
)
def test_losses_that_ignore_the_rows_take_part_in_accumulation(ranks: RankPool, ignoring) -> None:
    """A rank behind joins the others' exchange of gradients, in whichever pass and call they meet."""
    expected = scenarios.accumulate(None, ignoring, 3)
    for tables in ranks.run(scenarios.accumulate, 3, ignoring, 3):
        close(tables, expected)


@pytest.mark.parametrize("how", ["retained", "older", "second order", "checkpoint", "reentrant"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_graphs_that_are_kept_or_made_again_train_as_in_one_process(ranks: RankPool, how) -> None:
    """Retained graphs, a backward pass through an older forward, gradients of gradients, both checkpoints."""
    expected = scenarios.graphs(None, how, 2)
    for tables in ranks.run(scenarios.graphs, 2, how, 2):
        close(tables, expected)


@pytest.mark.parametrize("stage", ["forward", "backward", "step"])
def test_rank_that_catches_its_own_error_misses_its_batch_with_all_others(ranks: RankPool, stage) -> None:
    """All raise where they meet next, the one that went on too; then they train on, as one process on what counted."""
    found = ranks.run(scenarios.caught, 3, stage)
    done = [done for _, done, *_ in found]
    expected = scenarios.faults.alone(done)
    for rank, (said, _, tables, state) in enumerate(found):
        own = [text for text in said if text.startswith("ZeroDivisionError")]
        assert len(own) == (rank == 1)
        peers = [text for text in said if text.startswith("PeerError: rank ")]
        assert len(own) + len(peers) == len(said) <= 3, said
        if rank != 1:
            assert any(text.startswith("PeerError: rank 1 ") for text in peers), said
        for (ids, rows), table in zip(tables, expected, strict=True):
            torch.testing.assert_close(rows, table[ids], rtol=0, atol=1e-12)
        assert all(status == "STEPPED" and not is_unsettled for status, is_unsettled in state)


@pytest.mark.parametrize(("what", "lost", "says"), [
    ("read", (), "did not come within 2 seconds"),
    ("lookup", (), "did not come within 2 seconds"),
    ("kill", (1,), "cannot be reached"),
    ("exit", (1,), "cannot be reached"),
])  # fmt: skip
def test_rank_that_is_left_alone_raises_soon(ranks: RankPool, what, lost, says) -> None:
    """One rank calls alone, or another's process ends: an error at the time limit, or at once; and again at once."""
    found = ranks.run(scenarios.alone, 3, what, lost=lost)
    for rank, result in enumerate(found):
        if rank in lost:
            continue
        said, took = result
        assert said.startswith("PeerError"), said
        if rank == 0 or lost:
            assert says in said
            assert took < 5
        else:
            assert "cannot be reached" in said


def test_table_that_one_rank_cannot_make_is_made_on_none(ranks: RankPool) -> None:
    """The next one has the same number on all of them."""
    for rank, (said, errors) in enumerate(ranks.run(scenarios.making, 3)):
        assert said.startswith("MemoryError: no room" if rank == 1 else "PeerError: rank 1 failed")
        assert errors == [None, None]


def test_copies_threads_and_modules_that_are_gone(ranks: RankPool) -> None:
    """Copies are refused with a remedy, a second thread with its own error; one rank may lose a module."""
    for said, thread_error, errors in ranks.run(scenarios.oddities, 2):
        assert set(said) == {"deepcopy", "pickle"}
        assert all("save" in text or "checkpoint" in text for text in said.values()), said
        assert thread_error == ["ThreadError"]
        assert errors == [None, None]


@pytest.mark.parametrize("how", ["retried", "twice", "zeroed", "scaled", "kept"])
def test_second_step_of_rows_that_one_rank_owns(ranks: RankPool, how) -> None:
    """A rank without rows steps, counts and writes as the others do, whatever was done to its empty gradient."""
    rows, writes = scenarios.step_again(None, how, 2)
    for found, written in ranks.run(scenarios.step_again, 2, how, 2):
        torch.testing.assert_close(found, rows, rtol=0, atol=1e-12)
        assert written == writes


@pytest.mark.parametrize("what", ["read", "reset", "map", "forward"])
def test_argument_that_does_not_fit_on_one_rank(ranks: RankPool, what) -> None:
    """The others hear of it at once, in the same call, and all go on."""
    for rank, (said, rows) in enumerate(ranks.run(scenarios.bad_argument, 3, what)):
        assert said.startswith(("IdError", "BatchError", "TypeError") if rank == 2 else "PeerError: rank 2 failed"), (
            said
        )
        assert rows == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("what", ["gather", "gather more", "scatter", "read"])
def test_columns_are_the_same_on_all_ranks(ranks: RankPool, what) -> None:
    """Else values of one would come as another's. Their order does not matter, nor the call that asks for weights."""
    for said, weight, other in ranks.run(scenarios.other_columns, 3, what):
        assert "another rank has others" in said
        assert torch.equal(weight, torch.zeros(4, 2))
        assert torch.equal(other, torch.full((4, 2), 7.0))


def test_settings_are_the_same_on_all_ranks(ranks: RankPool) -> None:
    for said, rows in ranks.run(scenarios.other_settings, 2):
        assert len(said) == 3
        assert all("reduction" in text and "state_dtype" in text and "on another one" in text for text in said)
        assert "name users" in said[2] or "name items" in said[2]
        assert rows == 3


def test_tables_of_a_collection_are_in_one_order_on_all_ranks(ranks: RankPool) -> None:
    """Else they would share each other's rows."""
    for rank, said in enumerate(ranks.run(scenarios.other_order, 2)):
        assert f"tables {['users', 'items'][:: -1 if rank else 1]}" in said
        assert "give the same on all ranks" in said


def test_id_maps_have_the_same_settings_on_all_ranks(ranks: RankPool) -> None:
    """Else owners would admit or evict their keys by their own, or wait for messages of another size."""
    for rank, (said, rows) in enumerate(ranks.run(scenarios.other_maps, 2)):
        assert len(said) == 3
        assert f"admit_after {1 + rank}" in said[0]
        assert f"evict {[None, 'lru'][rank]!r}" in said[1]
        assert f"keys {['int64', 'exact'][rank]!r}" in said[2]
        assert all("give the same on all ranks" in text for text in said)
        assert rows == [1, 2]


@pytest.mark.parametrize(("how", "says"), [
    ("class", ("'users' is trained with optimizer Adam on rank 0", "with optimizer RMSprop on rank 2")),
    ("lr", ("'users' is trained with lr 0.1 on rank 0", "with lr 0.2 on rank 2")),
    ("betas", ("betas (0.9, 0.999) on rank 0", "betas (0.9, 0.99) on rank 2")),
    ("flag", ("amsgrad 0 on rank 0", "amsgrad 1 on rank 2")),
    ("one table", ("'items' is trained with optimizer Adam on rank 0", "with optimizer none on rank 2")),
    ("scheduler", ("with lr 0.05 on rank 0", "with lr 0.025 on rank 2")),
])  # fmt: skip
def test_optimizers_have_the_same_settings_on_all_ranks(ranks: RankPool, how, says) -> None:
    """Else each owner would step in its own rows with its own: an error of all in the first step that would."""
    for said, is_kept, goes_on in ranks.run(scenarios.other_optimizers, 3, how):
        assert said.startswith("RanksError: table ")
        assert all(text in said for text in says), said
        assert is_kept
        assert goes_on


def test_settings_that_may_differ_between_ranks(ranks: RankPool) -> None:
    """Those of dense layers, the way to compute the same step, names, and the order of groups."""
    expected = scenarios.same_optimizers(None)
    for found in ranks.run(scenarios.same_optimizers, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)  # an lr of torch's is a float32


@pytest.mark.parametrize("passes", [1, 70])
def test_gradient_of_a_lookup_long_before(ranks: RankPool, passes) -> None:
    """It is told apart from those of later lookups, however many there were."""
    expected = scenarios.late_gradient(None, 2, passes)
    for found in ranks.run(scenarios.late_gradient, 2, 2, passes):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
