"""The requested way of rows between a table in host memory and a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from pinned_places import PINNED
from torch import Tensor

import speedswap
from speedswap import Column, Pageable, Pinned, Table, kernels
from speedswap.kernels import Shares
from speedswap.kernels.cuda import engines, moves
from speedswap.tables import Commit, LocalStore, local, prefetch


@pytest.mark.filterwarnings("ignore:SW405")
@pytest.mark.parametrize("way", PINNED)
def test_rows_train_as_with_torch_in_every_way(way: str, device: str):
    """Adagrad over rows that come and go each step; where there is no GPU, the way does not matter."""
    init = speedswap.init.constant(1.0)
    ours = speedswap.Embedding(300, 8, storage=PINNED[way], init=init, device=device)
    theirs = torch.nn.Embedding(300, 8, device=device)
    torch.nn.init.ones_(theirs.weight)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for _ in range(4):
        ids = torch.randint(300, (120,), device=device)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(ids).pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.table.read(), theirs.weight.detach().cpu())


@pytest.mark.parametrize("storage", ["pageable", "disk"])
def test_rows_that_a_gpu_cannot_reach_are_staged(storage: str, device: str, tmp_path: Path):
    path = tmp_path / "table" if storage == "disk" else None
    with Table.create(50, 4, storage=storage, path=path, init=speedswap.init.constant(1.0)) as table:
        rows = torch.tensor([3, 49], device=device)
        table.scatter(rows, table.gather(rows).weight * 2)
        np.testing.assert_array_equal(table.read().sum(1).numpy(), [8.0 if i in (3, 49) else 4.0 for i in range(50)])


def test_a_wrong_engine_is_an_error():
    with pytest.raises(ValueError, match="engine is 'fast'; choose one of auto, zero_copy, staged"):
        speedswap.Pinned("fast")
    with pytest.raises(ValueError, match=r"scatter_share is 1.5; give a share of the rows, 0 to 1"):
        speedswap.Pinned(scatter_share=1.5)


def test_auto_reads_and_writes_pinned_memory_directly_and_stages_any_other(
    device: str, monkeypatch: pytest.MonkeyPatch
):
    """A fixed rule, on every machine."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    shares: list[float] = []
    real = engines.move_between

    def watched(what: str, share: float, *more: object) -> None:
        shares.append(share)
        real(what, share, *more)

    by_kernel = moves.copy

    def copied(*given: object) -> None:
        shares.append(1.0)
        by_kernel(*given)

    monkeypatch.setattr(engines, "move_between", watched)
    monkeypatch.setattr(moves, "copy", copied)
    rows = torch.tensor([3, 49], device=device)
    for storage, share in (("pinned", 1.0), ("pageable", 0.0)):
        with Table.create(50, 4, storage=storage) as table:
            table.scatter(rows, torch.ones(2, 4, device=device))
            table.gather(rows)
        assert shares == [share] * 2
        shares.clear()


@pytest.mark.parametrize("storage", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("near", [{"weight"}, {"momentum"}])
def test_columns_on_several_devices_are_moved_together(
    near: set[str], storage: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    """No loop of the processor is given a GPU's address, and no kernel one of pageable memory."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    devices: list[set[torch.device]] = []
    scatter = kernels.scatter_blocks

    def watched(records: Any, ids: Tensor, columns: Any, blocks: Mapping[str, Tensor], *more: Any) -> None:
        devices.append({block.device for block in blocks.values()})
        scatter(records, ids, columns, blocks, *more)

    monkeypatch.setattr(kernels, "scatter_blocks", watched)
    rows = torch.tensor([3, 49])
    values = {name: torch.rand(2, 4, device=device if name in near else "cpu") for name in ("weight", "momentum")}
    with Table.create(50, 4, storage=storage) as table:
        table.add_columns([Column("momentum", (4,), torch.float32, speedswap.init.zeros())])
        table.scatter(rows, values)
        found = table.gather(rows, device="cpu")
    for name, value in values.items():
        assert torch.equal(found.columns[name], value.cpu())
    assert devices
    assert all(len(each) == 1 for each in devices)


@pytest.mark.parametrize("storage", ["pinned", "device"])
def test_moves_on_several_streams_keep_their_order(storage: str, device: str):
    """A gather sees what another stream was asked to write before it, and nothing that one writes after it."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    writing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    rows = torch.tensor([3, 49], device=device)
    values = [torch.full((2, 4), float(turn), device=device) for turn in range(4)]
    with Table.create(50, 4, storage=storage) as table:
        torch.cuda.synchronize()
        read = []
        for value in values:
            with torch.cuda.stream(writing):
                table.scatter(rows, value)
            with torch.cuda.stream(reading):
                read.append(table.gather(rows).weight)
        writing.synchronize()
        reading.synchronize()
        assert [weight.unique().tolist() for weight in read] == [[0.0], [1.0], [2.0], [3.0]]
        with torch.cuda.stream(reading):
            before = table.gather(rows).weight
        with torch.cuda.stream(writing):
            table.scatter(rows, values[0])
        writing.synchronize()
        reading.synchronize()
        assert before.unique().tolist() == [3.0]


@pytest.mark.parametrize("reset", [False, True], ids=["added", "reset"])
def test_a_copied_column_has_what_a_gpu_is_writing(device: str, reset: bool):
    """The host copies records only once a queued scatter has reached them."""
    before = speedswap.tables.Column("before", (4,), torch.float32, speedswap.init.copy_of("weight"))
    with Table.create(30, 4, storage="pinned" if device == "cuda" else "pageable") as table:
        rows = torch.arange(9, device=device)
        table.write(0, torch.ones(30, 4))
        if reset:
            table.add_columns([before])
        table.scatter(rows, torch.full((9, 4), 2.0, device=device))
        if reset:
            table.reset_columns([before])
        else:
            table.add_columns([before])
        assert table.read(column="before")[:, 0].tolist() == [2.0] * 9 + [1.0] * 21


@pytest.mark.parametrize("ends", ["closed", "freed"])
@pytest.mark.parametrize("writes", [False, True], ids=["gather", "scatter"])
def test_memory_of_a_device_table_stays_until_moves_on_other_streams_are_done(ends: str, writes: bool, device: str):
    """torch gives freed memory to the next tensor of the stream that allocated it."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    side, rows = torch.cuda.Stream(), torch.tensor([3, 49], device=device)
    table = Table.create(50, 4, storage="device", init=speedswap.init.constant(2.0))
    values = torch.ones(2, 4, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if writes:
            table.scatter(rows, values)
        weight = table.gather(rows).weight
    if ends == "closed":
        table.close()
    del table
    gc.collect()
    others = [torch.zeros(50 * 4, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    assert weight.unique().tolist() == [1.0 if writes else 2.0]
    assert not any(bool(other.any()) for other in others)


def test_streams_are_used_while_their_gpu_is_current(device: str, monkeypatch: pytest.MonkeyPatch):
    """Otherwise torch makes the GPU current that was so before, which takes it into use."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    current, entered = threading.local(), []

    class Current(torch.cuda.device):  # type: ignore[misc]
        def __enter__(self) -> None:
            current.depth = getattr(current, "depth", 0) + 1
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            current.depth -= 1
            super().__exit__(*error)

    class Noted(torch.cuda.StreamContext):
        def __enter__(self) -> None:
            entered.append(getattr(current, "depth", 0))
            super().__enter__()

    monkeypatch.setattr(torch.cuda, "device", Current)
    set_stream = torch.cuda.set_stream

    def for_good(stream: torch.cuda.Stream) -> None:
        """Set a stream and make its GPU current, which nothing else in a transfers' thread uses.

        torch's StreamContext does so when it is entered and left.
        """
        is_transfers = threading.current_thread().name.startswith("speedswap-")
        entered.append(is_transfers or getattr(current, "depth", 0) >= 1)
        set_stream(stream)

    monkeypatch.setattr(torch.cuda, "stream", Noted)
    monkeypatch.setattr(torch.cuda, "set_stream", for_good)
    rows, ones = torch.arange(9, device=device), torch.ones(9, 4, device=device)
    engines.ring.cache_clear()
    with Table.create(50, 4, storage="pageable") as table:
        table.scatter(rows, ones)
        table.gather(torch.where(rows < 5, rows, rows + 1))
        (prefetched,) = prefetch([(table, rows, rows.device)])
        with Commit() as commit:
            table.scatter(rows, ones * 2, commit=commit)
        assert prefetched.take() is not None
        table.drain()
    assert len(entered) > 4
    assert all(entered)


def test_the_cpu_waits_for_every_gpu_in_use_before_it_touches_shared_memory(monkeypatch: pytest.MonkeyPatch):
    """Work of others on the memory is not tracked, and may be on any GPU. One that is not in use gets no context."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    fence = speedswap.kernels.Fence()
    fence.share()
    fence.wait()
    assert waited == [0, 2]


def test_rows_of_a_table_are_moved_with_a_wait_for_each_check_of_the_ids(device: str):
    if not simulated_gpu.is_on():
        pytest.skip("round trips are counted on the simulated GPU: SPEEDSWAP_TEST_DEVICE=simulated")
    ids, rows = torch.randperm(90, device=device)[:40], torch.ones(40, 4, device=device)
    with Table.create(100, 4, storage="pinned") as table:
        table.write(0, torch.zeros(1, 4))  # takes the memory
        for move, checks in (
            (lambda: speedswap.gather_rows(table, ids, out=rows), 1),  # range
            (lambda: speedswap.scatter_rows(table, ids, rows), 2),  # range, duplicates
        ):
            move()
            with simulated_gpu.counted() as counts:
                move()
            assert len(counts.round_trips) == checks


@pytest.mark.parametrize("ahead", [False, True])
def test_a_large_table_measures_once_how_its_rows_go(ahead: bool, device: str, monkeypatch: pytest.MonkeyPatch):
    """Before the first of them go; they stay as they are."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    monkeypatch.setattr(engines, "_LEAST_TABLE_BYTES", 1)
    timed, measured = engines._seconds, list[Shares]()

    def seconds(move: Callable[[Shares], None], how: Shares, where: torch.device) -> float:
        measured.append(how)
        timed(move, how, where)
        if len(measured) <= 3:
            return 1.0 if how.multiprocessors == 8 else 2.0
        return {1.0: 3.0, 0.0: 1.0}.get(how.scatter, 2.0) if len(measured) > 6 else 1.0

    monkeypatch.setattr(engines, "_seconds", seconds)
    engines._known.clear()
    plain, model = (
        speedswap.Embedding(300, 8, storage=place, device=device, seed=1) for place in (Pageable(), Pinned())
    )
    batches = [torch.randint(300, (120,), device=device) for _ in range(4)]
    for each in (plain, model):
        optimizer = torch.optim.Adagrad(each.parameters(), lr=0.1)
        speedswap.attach(optimizer, each)
        for ids in speedswap.lookahead(batches, {each: lambda ids: ids}) if ahead else batches:
            each(ids).pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured[:3] == [Shares(1.0, 1.0, 16), Shares(1.0, 1.0, 8), Shares(1.0, 1.0, 4)]
    assert measured[3:6] == [Shares(share, 1.0, 8) for share in (1.0, 0.0, 0.5)]
    assert measured[6:] == [Shares(1.0, share, 8) for share in (1.0, 0.0, 0.25)]
    assert isinstance(model.table.store, LocalStore)
    assert model.table.store.groups[0].shares == Shares(1.0, 0.0, 8)
    assert torch.equal(model.table.read(), plain.table.read())


def test_without_room_to_measure_kernels_move_all_rows(device: str, monkeypatch: pytest.MonkeyPatch):
    if device != "cuda":
        pytest.skip("is about a GPU")

    def full(*how: object) -> Shares:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engines, "_LEAST_TABLE_BYTES", 1)
    monkeypatch.setattr(engines, "_measured", full)
    engines._known.clear()
    with Table.create(50, 4, storage=Pinned()) as table:
        rows = torch.tensor([3, 49], device=device)
        table.scatter(rows, torch.ones(2, 4, device=device))
        assert isinstance(table.store, LocalStore)
        assert table.store.groups[0].shares == Shares(1.0, 1.0)


def test_rows_are_not_staged_past_their_cache(device: str, monkeypatch: pytest.MonkeyPatch):
    if device != "cuda":
        pytest.skip("is about a GPU")
    monkeypatch.setattr(local.kernels, "best_shares", lambda records, device: Shares(0.0, 0.25))
    for place, expected in ((Pinned(hot_bytes=0.5), Shares(1.0, 0.25)), (Pinned(scatter_share=1), Shares(0.0, 1.0))):
        with Table.create(50, 4, storage=place) as table:
            rows = torch.tensor([3, 49], device=device)
            table.scatter(rows, torch.ones(2, 4, device=device))
            assert isinstance(table.store, LocalStore)
            assert table.store.groups[0].shares == expected
