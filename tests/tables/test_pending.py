"""Prefetches and pending writes of a table, where something comes between."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap.errors import TableClosedError
from speedswap.tables import Commit, LocalStore, Prefetched, Table, prefetch
from speedswap.tables import pending as pending_module
from speedswap.tables.store import StoreFacts

ROWS, DIM = 50, 4


@pytest.fixture(params=["cpu-loops", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The thread that transfers rows on the CPU; the threads that serve a GPU work without one too."""
    if request.param == "threads":
        monkeypatch.setattr(LocalStore, "_in_host_memory", lambda store, device: False)
    return str(request.param)


def table_of(storage: str = "pageable", **settings: object) -> Table:
    return Table.create(ROWS, DIM, storage=storage, init=speedswap.init.normal(), **settings)  # type: ignore[arg-type]


def begin(table: Table, ids: Tensor) -> Prefetched:
    (prefetched,) = prefetch([(table, ids, ids.device)])
    return prefetched


def take(table: Table, prefetched: Prefetched) -> Tensor | None:
    with table.lock:
        found = prefetched.take()
    return None if found is None else found[0].weight


def test_rows_are_looked_up_again_after_an_interrupted_take(
    way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later writes are not forwarded to them any more."""
    table, ids = table_of(), torch.arange(10, device=device)
    prefetched = begin(table, ids)

    def interrupt(tensors: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pending_module.kernels, "used_here", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take(table, prefetched)
    with Commit() as commit:
        table.scatter(ids, torch.ones(10, DIM, device=device), commit=commit)
    assert take(table, prefetched) is None
    assert bool((table.gather(ids).weight == 1).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_a_pending_write_of_any_ids_is_forwarded(dtype: torch.dtype, step: int, way: str, device: str) -> None:
    table, ids = table_of(), torch.arange(0, 40, 3, device=device)
    prefetched = begin(table, ids)
    rows = torch.arange(1, 31, device=device, dtype=dtype)[::step]
    with Commit() as commit:
        table.scatter(rows, torch.full((len(rows), DIM), 7.0, device=device), commit=commit)
    assert torch.equal(take(table, prefetched), table.gather(ids).weight)  # type: ignore[arg-type]


def test_writes_that_arrive_while_they_are_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one that had not arrived is not forwarded over a newer one that has arrived since."""
    monkeypatch.setattr(LocalStore, "_in_host_memory", lambda store, device: False)  # where writes are forwarded
    table, ids = table_of(), torch.arange(10, device=device)
    answers: list[bool] = []
    monkeypatch.setattr(pending_module.PendingWrite, "has_arrived", lambda write: bool(answers) and answers.pop(0))
    for value in (1.0, 2.0):
        with Commit() as commit:
            table.scatter(ids, torch.full((10, DIM), value, device=device), commit=commit)
    kernels.finish_transfers()
    if device == "cuda":
        torch.cuda.synchronize()
    answers += [False, True]
    rows = take(table, begin(table, ids))
    assert not answers
    assert rows is not None
    assert bool((rows == 2).all())


@pytest.mark.parametrize("storage", ["pinned", "pageable", "device"])
def test_a_write_is_forwarded_to_another_stream_once_its_values_are_there(storage: str, device: str) -> None:
    if device != "cuda":
        pytest.skip("is about a GPU")
    writing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    table, ids, rows = table_of(storage), torch.arange(10, device=device), torch.arange(5, 20, device=device)
    table.scatter(ids, torch.zeros(10, DIM, device=device))
    prefetched, ones = begin(table, ids), torch.ones(15, DIM, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(writing), Commit() as commit:
        table.scatter(rows, ones * 7, commit=commit)
    with torch.cuda.stream(reading):
        weight = take(table, prefetched)
        assert weight is not None
        copied = weight.clone()
    reading.synchronize()
    assert copied.sum(1).tolist() == [0.0] * 5 + [7.0 * DIM] * 5
    table.drain()


def test_rows_of_a_pending_write_must_ascend(device: str) -> None:
    with table_of() as table:
        before, rows = table.read(), torch.tensor([3, 1], device=device)
        with Commit() as commit, pytest.raises(ValueError, match="rows are not ascending"):
            table.scatter(rows, torch.ones(2, DIM, device=device), commit=commit)
        assert torch.equal(table.read(), before)
        table.scatter(rows, torch.ones(2, DIM, device=device))


def test_prefetched_rows_of_a_closed_table_are_not_given(way: str, device: str) -> None:
    items = speedswap.Embedding(ROWS, DIM, device=device)
    batches = [torch.arange(5, device=device)] * 2
    with torch.no_grad():
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):
            items.table.close()
            with pytest.raises(TableClosedError):
                items(ids)
            break


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:SW405")
@pytest.mark.parametrize("storage", ["pageable", "pinned", "device"])
def test_a_table_may_be_freed_before_its_rows_are_written(storage: str, way: str, device: str) -> None:
    """Later contents of its memory are not overwritten."""
    for _ in range(3):
        table, rows = table_of(storage), torch.arange(0, ROWS, 2, device=device)
        begin(table, rows)
        with Commit() as commit:
            table.scatter(rows, torch.ones(len(rows), DIM, device=device), commit=commit)
        del table
        gc.collect()
        others = [torch.zeros(ROWS * DIM, device=device) for _ in range(8)]
        speedswap.kernels.finish_transfers()
        assert not any(bool(other.any()) for other in others)


class BrokenError(Exception):
    pass


class Breaking(speedswap.tables.WrappedStore):
    """A store whose pending writes have failed."""

    def drain(self) -> None:
        raise BrokenError


@pytest.mark.parametrize("broken", [0, 1])
def test_a_lookahead_drains_every_table_though_one_has_failed(broken: int, device: str) -> None:
    both = []
    for number in range(2):
        weight = speedswap.Column("weight", (DIM,), torch.float32, speedswap.init.normal())
        store = LocalStore.create(StoreFacts(ROWS, "pageable"), weight)
        table = Table(Breaking(store) if number == broken else store)
        both.append(speedswap.Embedding(ROWS, DIM, table=table, device=device))
    sound = both[1 - broken]
    optimizer = torch.optim.SGD(sound.parameters(), lr=1.0)
    ids_of = {items: (lambda ids: ids) for items in both}

    def train() -> None:
        for ids in speedswap.lookahead([torch.arange(5, device=device)] * 2, ids_of):
            sound(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(BrokenError):
        train()
    assert [items._step.lookaheads for items in both] == [0, 0]
    assert sound._step.announced is None


def test_a_loop_that_is_collected_in_the_thread_of_its_writes_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python may collect garbage wherever it allocates."""
    monkeypatch.setattr(LocalStore, "_in_host_memory", lambda store, device: False)
    is_dropped, scatter = threading.Event(), speedswap.kernels.scatter_records

    def collect_and_scatter(*arguments: Any) -> None:
        assert is_dropped.wait(60)
        gc.collect()
        scatter(*arguments)

    items = speedswap.Embedding(ROWS, DIM, init=speedswap.init.zeros())
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    loop = [iter(speedswap.lookahead([torch.arange(5)] * 3, {items: lambda ids: ids}))]
    items(next(loop[0])).sum().backward()
    monkeypatch.setattr(speedswap.kernels, "scatter_records", collect_and_scatter)
    gc.disable()
    try:
        optimizer.step()
        next(loop[0])  # starts the write
        loop.append(loop)  # type: ignore[arg-type]
        del loop
        is_dropped.set()
        items.table.drain()
    finally:
        gc.enable()
    assert items.table.read(stop=6).tolist() == [[-1.0] * DIM] * 5 + [[0.0] * DIM]
