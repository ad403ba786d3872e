"""Tables whose place is left open, and that are small for the GPU: their rows move into its memory for good."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import speedswap
from speedswap import Table
from speedswap.tables import memory

ROWS, DIM = 3000, 16


@pytest.fixture
def share(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the share of the GPU's free memory that a small table takes at most; it is the usual one at first."""
    if device != "cuda":
        pytest.skip("is about a GPU")

    def give(value: float) -> None:
        monkeypatch.setattr(memory, "_NEAR_SHARE", value)

    give(1 / 64)
    return give


def trained(optimizer: Any, depth: int = 0, **storage: Any) -> speedswap.Embedding:
    torch.manual_seed(0)
    items = speedswap.Embedding(ROWS, DIM, device="cuda", **storage)
    steps = optimizer(items.parameters())
    batches = list(torch.randint(ROWS, (6, 100), generator=torch.Generator().manual_seed(0)).cuda())
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}, depth=depth):
        items(ids).square().sum().backward()
        steps.step()
        steps.zero_grad()
    return items


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_small_table_lies_on_the_gpu_with_its_state_once_it_is_trained(
    optimizer: Any, depth: int, share: Callable[[float], None]
) -> None:
    small = trained(optimizer, depth)
    pinned = trained(optimizer, depth, storage=speedswap.Pinned())
    assert (small.table.storage, pinned.table.storage) == ("device", "pinned")
    assert not small.table.pinned
    for name in pinned.table.columns:
        assert torch.equal(small.table.read(column=name), pinned.table.read(column=name)), name
    assert small.table.view("weight").is_cuda


def test_a_table_is_pinned_where_the_gpu_has_no_ample_room_for_all_of_its_columns(
    share: Callable[[float], None],
) -> None:
    free, _ = torch.cuda.mem_get_info()
    share(2.5 * ROWS * DIM * 4 / free)  # enough for the weights and half of Adam's state
    assert trained(torch.optim.SGD).table.storage == "device"
    assert trained(torch.optim.Adam).table.storage == "pinned"


def test_many_small_tables_leave_the_gpu_most_of_its_memory(
    share: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, total = torch.cuda.mem_get_info()
    gc.collect()
    before = memory._near.total()
    monkeypatch.setattr(memory, "_ALL_NEAR_SHARE", (before + 2.5 * ROWS * DIM * 4) / total)
    tables = [trained(torch.optim.SGD).table for _ in range(3)]
    assert [table.storage for table in tables] == ["device", "device", "pinned"]
    del tables[0]
    gc.collect()
    assert trained(torch.optim.SGD).table.storage == "device"


def test_rows_that_the_host_has_used_first_stay_pinned(share: Callable[[float], None]) -> None:
    items = speedswap.Embedding(ROWS, DIM, device="cuda")
    items.table.write(0, torch.ones(ROWS, DIM))
    items(torch.arange(5, device="cuda")).sum().backward()
    torch.optim.SGD(items.parameters(), lr=1.0).step()
    assert items.table.storage == "pinned"
    assert torch.equal(items.read()[:6].cpu(), torch.ones(6, DIM) - torch.tensor([[1.0]] * 5 + [[0.0]]))


def test_columns_of_a_later_optimizer_join_the_rows_on_the_gpu(share: Callable[[float], None]) -> None:
    items = trained(torch.optim.SGD)
    torch.optim.Adam(items.parameters()).step()  # without a gradient
    before = items.read()
    items(torch.arange(5, device="cuda")).sum().backward()
    torch.optim.Adam(items.parameters()).step()
    assert items.table.view("exp_avg").is_cuda
    assert torch.equal(items.read()[5:], before[5:])


def test_a_pinned_table_says_so_until_it_moves(share: Callable[[float], None]) -> None:
    with Table.create(ROWS, DIM) as table:
        assert table.storage == "pinned"
        table.scatter(torch.arange(3, device="cuda"), torch.ones(3, DIM, device="cuda"))
        assert table.storage == "device"
        assert table.read()[:3].eq(1).all()
