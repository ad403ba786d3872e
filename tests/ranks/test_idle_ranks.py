"""Rows of ranks with ``idle_rows="dense"`` are those of ``nn.Embedding`` over the batches of all ranks."""

from __future__ import annotations

import idle_scenarios as scenarios
import pytest
import torch
from idle_training import EVERY, relative_error
from rank_pool import RankPool
from torch import nn

import speedswap


def dense(initial, name):
    model = nn.Embedding.from_pretrained(initial.clone(), freeze=False)
    optimizer = EVERY[name](model.parameters())
    for each in scenarios.batches(40):
        ids, slopes = (torch.cat(some) for some in zip(*each, strict=True))
        optimizer.zero_grad()
        (model(ids) * slopes).sum().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize(("name", "depth"), [("AdamW", 0), ("Nesterov", 2), ("Adam with decay", 0)])
def test_rows_of_ranks_are_those_of_dense_training(ranks: RankPool, name, depth) -> None:
    """Some ranks have no ids in some steps; with and without a lookahead; and decay that is taken again."""
    for rank, (initial, *found) in enumerate(ranks.run(scenarios.trained, 3, name, None, depth)):
        wanted = dense(initial, name)
        for values, rows in zip(found, (0, rank), strict=True):
            assert relative_error(values, wanted[rows:]) <= 1e-12


def test_rows_of_ranks_on_disk_are_those_of_dense_training(ranks: RankPool, tmp_path) -> None:
    """After a checkpoint to which they return, opened again, and read by one process from a copy and in place."""
    for rank, (initial, *found) in enumerate(ranks.run(scenarios.trained, 3, "AdamW", str(tmp_path), 1)):
        wanted = dense(initial, "AdamW")
        for values, rows in zip(found, (0, rank, 0, 0), strict=True):
            assert relative_error(values, wanted[rows:]) <= 1e-12
    for name in ("items", "copy"):
        with speedswap.Table.open(tmp_path / name, "r") as table:
            assert relative_error(table.read(), wanted) <= 1e-12


def test_rows_lent_ahead_lack_no_step(ranks: RankPool) -> None:
    for initial, rows, _ in ranks.run(scenarios.lent_while_counting, 3):
        assert relative_error(rows, dense(initial, "AdamW")) <= 1e-12


def test_whatever_uses_rows_of_ranks_holds_their_lock(ranks: RankPool, tmp_path) -> None:
    """The lookahead's thread gathers rows for other ranks at any time."""
    assert ranks.run(scenarios.guarded, 3, str(tmp_path)) == [[], [], []]


def test_ranks_go_on_from_a_checkpoint_to_the_same_bits(ranks: RankPool, tmp_path) -> None:
    for saved, resumed in ranks.run(scenarios.resumed, 3, "AdamW", str(tmp_path)):
        assert torch.equal(saved, resumed)


def test_averages_of_rows_that_ranks_own_are_refused(ranks: RankPool) -> None:
    for found in ranks.run(scenarios.averaged, 2):
        for kind, message in found:
            assert kind == "ValueError", message
            assert "cannot have averages: ranks own the rows" in message
        assert len(found) == 2
