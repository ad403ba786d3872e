"""Figures of a model's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import speedswap
from speedswap.monitor import table_metrics


def test_figures_are_those_of_the_rows_and_files(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "user": speedswap.Embedding(100, 4, storage="pageable"),
            "item": speedswap.Embedding(8, 4, path=tmp_path / "rows", id_map=speedswap.IdMap(7)),
            "last": nn.Linear(4, 1),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (model["user"](torch.tensor([1])) + model["item"](torch.tensor([77, 78]))).sum().backward()
        optimizer.step()
    model["item"].table.flush()
    found = table_metrics(model)
    assert found["tables/user/bytes"] == 100 * 2 * 4 * 4
    assert found["tables/user/writes"] == 3
    assert found["tables/item/keys"] == 2
    assert found["tables/item/touched_rows"] == 8  # the disk's blocks hold several such rows
    assert found["tables/item/log_bytes"] == (tmp_path / "rows" / "rows.log").stat().st_size
    assert not any("last" in name or "hot_share" in name for name in found)
    assert all(isinstance(value, int | float) for value in found.values())
    alone = table_metrics(model["item"].table)
    assert alone.keys() == {f"tables/rows/{name.split('/')[-1]}" for name in found if "item" in name}


def test_a_table_of_two_modules_counts_once() -> None:
    table = speedswap.Table.create(10, 2, storage="pageable")
    model = nn.ModuleList([speedswap.Embedding(10, 2, table=table) for _ in range(2)])
    assert [name for name in table_metrics(model) if "bytes" in name] == ["tables/0/bytes"]


def test_a_model_without_tables_has_no_figures() -> None:
    assert table_metrics(nn.Linear(2, 2)) == {}


def test_hot_rows_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on a GPU; here the counts are given."""
    items = speedswap.Embedding(10, 2, storage="pageable")

    class Cache:
        def counts(self) -> speedswap.monitor.HotCounts:
            return speedswap.monitor.HotCounts(4, gathered_hits=30, gathered_misses=10)

    monkeypatch.setattr(items.table.store.notes, "hot", Cache())
    assert table_metrics(items)["tables/table/hot_share"] == 0.75
