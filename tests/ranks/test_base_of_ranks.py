"""Tables of ranks over a base: each reads the untouched rows that it owns from the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import base_scenarios as scenarios
import pytest
import torch
from rank_pool import RankPool
from tensor_files import write
from torch import Tensor

from speedswap import Table
from speedswap.errors import TableFormatError

ROWS, DIM = 100, 8


def model_of(folder: Path, seed: int) -> Tensor:
    """Write a model of two shards; return its rows."""
    folder.mkdir()
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    write(folder / "model.safetensors", {"shard_10": rows[70:], "shard_9": rows[:70]})
    return rows.float()


def test_ranks_own_rows_of_a_base(ranks: RankPool, tmp_path: Path) -> None:
    """In memory and on disk, as one process; resumed by other numbers of ranks, with the base elsewhere."""
    rows = model_of(tmp_path / "model", 1)
    weights = ranks.run(scenarios.train, 3, str(tmp_path), str(tmp_path / "model"))
    want = weights[0][0]
    assert all(torch.equal(want, each) for rank in weights for each in rank)
    changed = (want != rows).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 8, 11, 64, 99]
    for path in (tmp_path / "t", tmp_path / "saved"):
        with Table.open(path, "r") as table:
            assert torch.equal(table.read(), want)
    moved = shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    with pytest.raises(TableFormatError, match="base="):
        Table.open(tmp_path / "t", "r")
    with Table.open(tmp_path / "t", "r", base=moved) as table:
        assert torch.equal(table.read(), want)
    model_of(tmp_path / "other", 2)
    for each in ranks.run(scenarios.refused, 3, str(tmp_path), str(tmp_path / "other")):
        assert "which has changed since" in each
    for world_size in (2, 3, 2):
        for resumed in ranks.run(scenarios.resume, world_size, str(tmp_path), str(moved)):
            assert all(torch.equal(each, want) for each in resumed)
    with Table.open(tmp_path / "t", "r") as table:
        assert torch.equal(table.read(), want)
