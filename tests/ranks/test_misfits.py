"""Ranks that diverge: supported cases work, and the others soon raise on all ranks."""

from __future__ import annotations

import argument_scenarios
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


@pytest.mark.parametrize("stage", ["before", "forward", "backward", "step"])
def test_rank_that_catches_its_own_error_misses_its_batch_with_all_others(ranks: RankPool, stage) -> None:
    """All raise at their next exchange; then they train on, like one process on the batches that counted."""
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


@pytest.mark.sweep(13)
@pytest.mark.parametrize(
    "where", ["before the lookup", "after the lookup", "after the backward pass", "after the step"]
)
@pytest.mark.parametrize(("how", "left"), [
    (0, 2), (1, 2), (2, 2), ("sampler", 2), ("zero_grad", 2), ("zero_grad", 0), ("the model's zero_grad", 2),
    ("the model's zero_grad", 0), ("zero_grad in place", 0),
])  # fmt: skip
def test_batch_that_one_rank_leaves(ranks: RankPool, how, left, where) -> None:
    """The ranks that are behind raise until they are in the same batch as it, and never train another with it."""
    found = ranks.run(scenarios.skipped, 3, how, where, left)
    is_begun = where in ("after the lookup", "after the backward pass")
    missed = {"after the step": (), "before the lookup": (left,)}.get(where, (left, left + 1))
    wanted = [number for number in range(10) if number not in missed]
    which = "step" if "zero_grad" in str(how) else "batch"
    for rank, (said, done) in enumerate(found):
        assert done == wanted
        own = [(left, "ZeroDivisionError")] * (rank == 1)
        peers = [(left, "PeerError")]
        if is_begun:
            peers = [(left + (rank == 1), "PeerError"), (left + 1, "PeerError")][: 2 - (rank == 1)]
        peers = peers if is_begun or rank != 1 else []
        assert [(number, text.split(":")[0]) for number, text in said] == own + peers * (where != "after the step")
        for number, text in said:
            if text.startswith("PeerError"):
                numbers = (left + 1, left) if number == left or rank == 1 else (left + 2, left + 1)
                assert all(f"of {which} {each}" in text for each in numbers), text


@pytest.mark.parametrize(("what", "place", "remedy"), [
    ("read", "a lookup without a gradient in table 'items' of step 1", "let the others make the call too"),
    ("lookup", "a lookup without a gradient in table 'items' of step 1", "let the others make the call too"),
    ("state_dict", "state_dict() or load_state_dict() in table 'items' of step 1", "make them on every rank"),
    ("norm", "a norm or sum of a gradient in table 'items' of step 1", "compute it on every rank"),
    ("lookahead", "the beginning of a lookahead of step 1", "in the same order"),
])  # fmt: skip
def test_what_one_rank_does_alone_is_named_with_its_remedy(ranks: RankPool, what, place, remedy) -> None:
    for rank, said in enumerate(ranks.run(scenarios.classics, 3, what)):
        here = "the optimizer's step of step 1" if what == "norm" else "a training lookup in table 'items' of step 1"
        sides = (f"rank 0 is at {place}", f"rank {rank} at {here}") if rank else (f"is at {here}", f"rank 0 at {place}")
        assert len(said) == 1, said
        assert all(each in said[0] for each in (*sides, remedy)), said


def test_tables_without_a_name_are_told_apart(ranks: RankPool) -> None:
    for names in ranks.run(scenarios.unnamed, 2):
        assert len({*names}) == len(names) == 3
        assert not {"table", None} & {*names}


def test_zero_redundancy_optimizer_is_refused_by_name(ranks: RankPool) -> None:
    for refused, rows in ranks.run(scenarios.zero_redundancy, 2):
        assert refused.startswith("WeightError")
        assert "ZeroRedundancyOptimizer" in refused
        assert "parameters_to_ignore(model)" in refused
        assert not torch.equal(rows, torch.zeros(3, 2))  # as the message says


@pytest.mark.sweep(2)
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
    """The next table has the same number on all ranks."""
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


def test_arguments_that_do_not_fit_on_one_rank(ranks: RankPool, tmp_path) -> None:
    """In any call the others raise at their next exchange with that rank, at once, and all go on."""
    found = ranks.run(argument_scenarios.bad_calls, 3, str(tmp_path))
    assert len(found[0]) > 100
    for name in found[0]:
        for rank, (said, took, after) in enumerate(each[name] for each in found):
            is_told = said is not None and said.startswith("PeerError: rank 2 failed")
            assert (said is not None and not said.startswith("PeerError")) if rank == 2 else is_told, (name, rank, said)
            assert took < 5, (name, rank, took)
            assert after is None, (name, rank, after)


@pytest.mark.parametrize("what", ["gather", "gather more", "scatter", "read"])
def test_columns_are_the_same_on_all_ranks(ranks: RankPool, what) -> None:
    """Otherwise values of different columns would be mixed up. Neither their order nor the call for weights matters."""
    for said, weight, other in ranks.run(scenarios.other_columns, 3, what):
        assert "another rank has different ones" in said
        assert torch.equal(weight, torch.zeros(4, 2))
        assert torch.equal(other, torch.full((4, 2), 7.0))


def test_settings_are_the_same_on_all_ranks(ranks: RankPool) -> None:
    """Otherwise owners would step, admit, round or pool differently, or share each other's rows."""
    for rank, (found, rows) in enumerate(ranks.run(scenarios.other_settings, 2)):
        assert len(found) > 20
        for name, said in found.items():
            assert said is not None, (name, rank)
            assert said.startswith("ValueError"), (name, rank, said)
            assert name.split(" of a table that is there")[0] in said, (name, said)
            assert " on rank 0" in said
            assert " on rank 1" in said
        assert "has reduction sum on rank 0, but reduction mean on rank 1; give the same" in found["reduction"]
        assert "has mode mean on rank 0, but mode sum on rank 1" in found["mode"]
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
    """Otherwise each owner would step its rows with its own settings: all raise in the first such step."""
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
    """It is distinguished from those of later lookups, however many."""
    expected = scenarios.late_gradient(None, 2, passes)
    for found in ranks.run(scenarios.late_gradient, 2, 2, passes):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    ["convert", "from_pretrained", "collection", "load_state_dict", "id_map", "copied", "filled", "optimizer", "write"],
)
def test_given_rows_are_the_same_on_all_ranks(ranks: RankPool, how) -> None:
    """Else each owner's own would be mixed, as where one rank has loaded them and left the others to a broadcast."""
    for said, is_unchanged, rows in ranks.run(scenarios.given, 3, how):
        assert "differ between ranks 0 and 1" in said
        assert "torch.distributed.broadcast" in said
        assert is_unchanged
        expected = torch.arange(60.0).view(20, 3)
        if how == "optimizer":
            _, rows = rows
        elif how == "filled":
            expected = torch.zeros(20, 3)
        assert torch.equal(rows, expected)


def test_ranks_may_draw_random_rows_of_their_own(ranks: RankPool) -> None:
    first, *others = ranks.run(scenarios.random_rows, 3)
    assert ((first >= 5) & (first <= 6)).all()
    assert all(torch.equal(first, each) for each in others)
