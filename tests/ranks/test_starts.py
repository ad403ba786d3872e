"""Starts over tables on disk that ranks own: a failed one leaves existing files, and nothing new."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_scenarios as scenarios
import torch
from rank_pool import RankPool


def test_failed_start_leaves_trained_tables(ranks: RankPool, tmp_path: Path) -> None:
    """A collection opens its first group and refuses the second: the first one's rows stay on disk."""
    for said, rows in ranks.run(scenarios.start_again, 2, str(tmp_path / "tables")):
        assert said.startswith(("ValueError: path is", "PeerError")), said
        assert rows.tolist() == [7.0] * scenarios.ROWS


def test_failed_start_leaves_no_new_table(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    for said, left, rows in ranks.run(scenarios.fail_to_begin, 2, str(folder)):
        assert said.startswith("MemoryError: no room"), said
        assert left == []
        assert rows.tolist() == [0.0] * scenarios.ROWS


def test_removed_table_can_be_made_again(ranks: RankPool, tmp_path: Path) -> None:
    for left, rows in ranks.run(scenarios.remove, 2, str(tmp_path)):
        assert left == []
        assert torch.equal(rows, torch.full((scenarios.ROWS,), 2.0))


def test_table_is_not_saved_over_itself(ranks: RankPool, tmp_path: Path) -> None:
    for said, rows, again in ranks.run(scenarios.save_over_itself, 2, str(tmp_path)):
        assert said.startswith("FileExistsError: path is")
        assert "where this table already is" in said
        assert rows.tolist() == again.tolist() == [-2.0] * scenarios.ROWS


@pytest.mark.parametrize("names", ["ba", "ac"])
def test_collection_refuses_the_rows_of_other_tables(ranks: RankPool, tmp_path: Path, names: str) -> None:
    """Rows lie in the order of the tables: with two of them exchanged, each would get the other's."""
    for said, rows in ranks.run(scenarios.begin_with_others, 2, str(tmp_path / "tables"), {"names": names}):
        assert "give the configs that it was made with, in their order" in said
        assert rows.tolist() == [7.0] * scenarios.ROWS


@pytest.mark.parametrize("size", [None, 2])
def test_switchers_refuse_existing_rows_but_load_them(ranks: RankPool, tmp_path: Path, size: int | None) -> None:
    folder = str(tmp_path)
    for said, rows in (
        ranks.run(scenarios.switch_again, size, folder) if size else [scenarios.switch_again(None, folder)]
    ):
        assert all(text.startswith("FileExistsError") and "words', which exists" in text for text in said), said
        assert rows.tolist() == [7.0] * scenarios.ROWS


def test_tables_of_a_model_on_meta_come_with_the_rows(ranks: RankPool) -> None:
    """Loaded whole on every rank, and from a state_dict of which each rank has a part; both with a step after it."""
    rows = torch.arange(2.0 * scenarios.ROWS).view(scenarios.ROWS, 2)
    for twice, a, b in ranks.run(scenarios.load_on_meta, 2):
        assert torch.equal(twice, rows - 2)
        assert torch.equal(a, rows - 1)
        assert torch.equal(b, rows.repeat(1, 2) - 1)
