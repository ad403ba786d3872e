"""Rows that the next batch has as well stay on the GPU: they do not cross the bus again, and are right all the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import simulated_gpu
import torch
from pinned_places import PINNED
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap.kernels import copies
from speedswap.kernels.cuda import driver, engines
from speedswap.tables import Block, Column, Commit, memory, pending
from speedswap.tables.pending import PendingTransfers, PendingWrite, Prefetch

ROWS, DIM = 60, 4
PLACES = {**PINNED, "pageable": speedswap.Pageable()}
STORED: list[dict[str, Any]] = [{}, {"state_dtype": torch.bfloat16}, {"stored_dtype": torch.bfloat16}]


@pytest.fixture
def gpu(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one: SPEEDSWAP_TEST_DEVICE=simulated")
    return device


class Moved(list[set[int]]):
    """The rows of a table that each move in one direction has read or written, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        super().__init__()
        move, copy = getattr(copies, f"{what}_records"), engines.copy_by_kernel

        def watched(records: kernels.Records, ids: Tensor, *rest: object) -> None:
            if records.device.type == "cpu":
                self.append({row for row in ids.tolist() if row >= 0})
            move(records, ids, *rest)

        def copied(direction: str, records: kernels.Records, ids: Tensor, *rest: object) -> bool:
            is_copied = copy(direction, records, ids, *rest)
            if is_copied and what == direction:
                self.append({row for row in ids.tolist() if row >= 0})
            return is_copied

        monkeypatch.setattr(copies, f"{what}_records", watched)
        monkeypatch.setattr(engines, "copy_by_kernel", copied)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(monkeypatch, "gather")


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(monkeypatch, "scatter")


@pytest.fixture(autouse=True)
def _writes_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are left out of small writes as well."""
    monkeypatch.setattr(pending, "LEAST_BYTES", 0)


def batches(gpu: str) -> list[Tensor]:
    """Yield batches that share half of their rows with the one before, and a few with the one before that."""
    return [(torch.arange(20) + start).to(gpu) % ROWS for start in (0, 10, 20, 25, 35, 45, 55, 3)]


def embedding(gpu: str, way: str = "auto", **stored: Any) -> speedswap.Embedding:
    model = speedswap.Embedding(ROWS, DIM, storage=PLACES[way], device=gpu, seed=1, **stored)
    for _ in range(2):  # from then on rows are read, not computed
        model.table.gather(torch.arange(ROWS, device=gpu))
    return model


def train(
    model: speedswap.Embedding,
    loader: Iterable[Tensor],
    skip: tuple[int, ...] = (),
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    speedswap.attach(optimizer, model)
    for step, ids in enumerate(loader):
        model(ids).pow(2).sum().backward()
        if step not in skip:
            optimizer.step()
        optimizer.zero_grad()


def ahead(model: speedswap.Embedding, loader: list[Tensor], depth: int = 1) -> Iterable[Tensor]:
    return speedswap.lookahead(loader, {model: lambda batch: batch}, depth=depth)


def same_tables(one: speedswap.Embedding, other: speedswap.Embedding) -> None:
    assert one.table.columns.keys() == other.table.columns.keys()
    for column in one.table.columns:
        assert torch.equal(one.table.read(column=column), other.table.read(column=column)), column


@pytest.mark.parametrize("way", ["zero_copy", "staged out", "staged", "split"])
def test_shared_rows_are_gathered_once(gpu: str, way: str, gathered: Moved):
    """From the third batch on a gather reads only rows that the batch before does not have."""
    plain, model = embedding(gpu), embedding(gpu, way=way)
    loader = batches(gpu)
    train(plain, loader)
    gathered.clear()
    train(model, ahead(model, loader))
    sets = [set(ids.tolist()) for ids in loader]
    assert len(gathered) == len(sets)
    for k, (read, rows) in enumerate(zip(gathered, sets, strict=True)):
        assert read <= rows
        if k >= 2:  # the first two were asked for before any step was taken
            assert not read & sets[k - 1], k
            assert read >= rows - set().union(*sets[:k])
    same_tables(model, plain)


def not_again(loader: list[Tensor]) -> list[set[int]]:
    """Return each batch's rows that the next one does not have."""
    sets = [set(ids.tolist()) for ids in loader]
    return [rows - others for rows, others in zip(sets, [*sets[1:], set()], strict=True)]


@pytest.mark.sweep(14)
@pytest.mark.parametrize("way", ["zero_copy", "staged out", "staged", "split", "pageable"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_no_row_is_written_that_the_next_step_rewrites(
    gpu: str, way: str, depth: int, stored: dict[str, Any], scattered: Moved
):
    plain, model = embedding(gpu, **stored), embedding(gpu, way, **stored)
    loader = batches(gpu) * 2
    for one in (plain, model):
        train(one, loader[:1])  # the optimizer's columns are there
    train(plain, loader)
    scattered.clear()
    train(model, ahead(model, loader, depth))
    assert scattered[-len(loader) :] == not_again(loader)  # before, columns are filled
    same_tables(model, plain)


def test_prefetches_that_others_still_hold_do_not_matter(gpu: str, scattered: Moved, monkeypatch: pytest.MonkeyPatch):
    """A thread may hold one for a moment after its batch."""
    held, add = list[Prefetch](), PendingTransfers.add_prefetch

    def add_and_hold(pending: PendingTransfers, prefetch: Prefetch) -> None:
        held.append(prefetch)
        add(pending, prefetch)

    monkeypatch.setattr(PendingTransfers, "add_prefetch", add_and_hold)
    model, loader = embedding(gpu), batches(gpu)
    train(model, loader[:1])
    scattered.clear()
    train(model, ahead(model, loader, depth=3))
    assert scattered[-len(loader) :] == not_again(loader)


@pytest.mark.parametrize("way", ["zero_copy", "split"])
@pytest.mark.parametrize("between", ["drain", "read", "break", "view"])
def test_rows_left_out_are_written_if_anyone_waits_for_them(gpu: str, way: str, between: str, scattered: Moved):
    plain, model, loader = embedding(gpu), embedding(gpu, way), batches(gpu) * 2
    for one in (plain, model):
        train(one, loader[:1])
    train(plain, loader[:4])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    speedswap.attach(optimizer, model)
    scattered.clear()
    for step, ids in enumerate(ahead(model, loader)):
        model(ids).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            break
    if between == "drain":
        model.table.drain()
    elif between == "read":
        model.table.read(column="exp_avg")
    elif between == "view":
        model.table.view()
    else:
        train(model, ahead(model, loader[4:6]))
        train(plain, loader[4:6])
    assert scattered[:4] == not_again(loader)[:4]
    assert scattered[4] == set(loader[3].tolist()) & set(loader[4].tolist())
    same_tables(model, plain)


@pytest.mark.parametrize("case", ["plain", "small", "viewed", "hot", "on the GPU"])
def test_writes_that_leave_nothing_out(gpu: str, case: str, scattered: Moved, monkeypatch: pytest.MonkeyPatch):
    nbytes = 20 * 3 * DIM * 4  # of a batch with Adam's state
    monkeypatch.setattr(pending, "LEAST_BYTES", nbytes + (case == "small"))
    monkeypatch.setattr(memory, "BATCHES", 0)
    places = {"hot": speedswap.Pinned(hot_bytes=0.5), "on the GPU": speedswap.Device()}
    place, loader = places.get(case, speedswap.Pinned()), batches(gpu)
    model = speedswap.Embedding(ROWS, DIM, storage=place, device=gpu)
    train(model, loader[:1])
    if case == "viewed":
        model.table.view()
    scattered.clear()
    train(model, ahead(model, loader))
    whole = [set(ids.tolist()) for ids in loader]
    assert (model.table.store.notes.hot is not None) == (case == "hot")
    assert scattered[-len(loader) :] == (not_again(loader) if case == "plain" else whole)


@pytest.mark.parametrize("way", ["zero_copy", "staged out"])
def test_a_write_waits_in_its_thread_for_the_rows_it_leaves_out(
    gpu: str, way: str, scattered: Moved, monkeypatch: pytest.MonkeyPatch
):
    """The host goes on; writes keep their order, those of this thread as well."""
    plain, model, loader = embedding(gpu), embedding(gpu, way), batches(gpu) * 2
    for one in (plain, model):
        train(one, loader[:1])
    train(plain, loader)
    threads, calls = [], itertools.count()
    rows_to_write, has_begun = PendingWrite.rows_to_write, Prefetch.has_begun

    def watched(write: PendingWrite, following: Prefetch | None) -> Tensor:
        threads.append(threading.current_thread().name)
        return rows_to_write(write, following)

    def sometimes(prefetch: Prefetch) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return has_begun(prefetch)
        kernels.finish_transfers()
        return next(calls) % 3 < 2

    with monkeypatch.context() as patch:
        patch.setattr(Prefetch, "has_begun", sometimes)
        patch.setattr(PendingWrite, "rows_to_write", watched)
        scattered.clear()
        train(model, ahead(model, loader))
    assert "speedswap-out" in threads
    assert ("MainThread" in threads) == (way == "zero_copy")
    assert scattered == not_again(loader)
    same_tables(model, plain)


def test_a_write_in_between_comes_after_the_rows_left_out(gpu: str, scattered: Moved):
    """A pending write of other rows, as of rows that get new keys, waits for nothing on the host."""
    plain, model, loader = embedding(gpu), embedding(gpu), batches(gpu)
    for one in (plain, model):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
        speedswap.attach(optimizer, one)
        for step, ids in enumerate(loader if one is plain else ahead(one, loader)):
            one(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 4):
                kernels.finish_transfers()
                scattered.clear()
                with Commit() as commit:
                    ones = torch.ones(10, DIM, device=gpu)
                    one.table.scatter(torch.arange(35, 45, device=gpu), ones, commit=commit)
                kernels.finish_transfers()
                assert len(scattered) == (1 if one is plain else 2)
    same_tables(model, plain)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_any_depth_and_compact_columns(gpu: str, depth: int, stored: dict[str, Any]):
    plain, model = embedding(gpu, **stored), embedding(gpu, **stored)
    train(plain, batches(gpu) * 2)
    train(model, ahead(model, batches(gpu) * 2, depth))
    same_tables(model, plain)


def arrived(turns: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield batches; after each step wait for the GPU, but for no table."""
    for ids in turns:
        yield ids
        kernels.finish_transfers()
        torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("skip", [(3,), (2, 3), (4, 6), (7,)], ids=str)
def test_a_step_that_was_not_taken_brings_nothing(gpu: str, skip: tuple[int, ...], waits: bool):
    """As a gradient scaler leaves steps out: the next batch's rows are then read from the table."""
    plain, model = embedding(gpu), embedding(gpu)
    train(plain, batches(gpu), skip)
    turns = ahead(model, batches(gpu))
    train(model, arrived(turns) if waits else turns, skip)
    same_tables(model, plain)


def test_evaluation_after_training(gpu: str, gathered: Moved):
    """Nothing is written then: one lookup finds that out, and the others are gathered whole, and once."""
    model = embedding(gpu)
    train(model, ahead(model, batches(gpu)))
    table = model.table.read()
    gathered.clear()
    with torch.no_grad():
        for ids in ahead(model, batches(gpu)):
            assert torch.equal(model(ids).cpu(), table[ids.cpu()])
    whole = sum(len(set(ids.tolist())) for ids in batches(gpu))
    assert sum(len(read) for read in gathered) <= whole + 3 * 20
    train(model, ahead(model, batches(gpu)))  # and training goes on


def test_columns_that_the_optimizer_does_not_write(gpu: str):
    """A write that has not every column of the rows cannot bring them."""
    plain, model = embedding(gpu), embedding(gpu)
    for one in (plain, model):
        one.table.add_columns([Column("seen", (1,), torch.float32, speedswap.init.uniform())])
        optimizer = torch.optim.Adagrad(one.parameters(), lr=0.1)
        for ids in batches(gpu) if one is plain else ahead(one, batches(gpu)):
            found = one._step.announced[0].take() if one._step.announced else None
            if found is not None:
                seen = one.table.read(column="seen")[found[0].rows.cpu()]
                assert torch.equal(found[0]["seen"].cpu(), seen)
            one(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_tables(model, plain)


@pytest.mark.parametrize("way", ["staged out", "staged", "split"])
def test_a_prefetch_waits_for_no_write(gpu: str, way: str, monkeypatch: pytest.MonkeyPatch):
    """Both directions of the bus are busy at once: what a write is changing is forwarded, and need not be read."""
    waited, wait = [], kernels.Fence.wait

    def watched(fence: kernels.Fence, **arguments: Any) -> None:
        if arguments.get("forwarded") is None:
            waited.append(threading.current_thread().name)
        wait(fence, **arguments)

    monkeypatch.setattr(kernels.Fence, "wait", watched)
    model = embedding(gpu, way=way)
    train(model, ahead(model, batches(gpu)))
    assert waited
    assert not [name for name in waited if name.startswith("speedswap-in")]


@pytest.mark.sweep(19)
@pytest.mark.parametrize("way", ["zero_copy", "staged out", "split out", "staged", "split"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("order", simulated_gpu.device.POLICIES)
def test_a_prefetch_after_someone_has_waited_for_the_writes(gpu: str, order: str, depth: int, way: str):
    """Ids on the CPU follow nothing: a write that is waited for on the GPU, and so no longer forwarded, may be late."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU has an order of its own")
    drawn = torch.randint(30, (20, 9), generator=torch.Generator().manual_seed(0))
    with simulated_gpu.policy("eager"):
        plain, few = embedding(gpu), torch.arange(5, device=gpu)
        train(plain, list(drawn.to(gpu)))
    with simulated_gpu.policy(order):
        model = embedding(gpu, way)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step, ids in enumerate(ahead(model, list(drawn), depth)):
            model(ids.to(gpu)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                model.table.gather(few)
        same_tables(model, plain)


def test_two_lookups_of_one_table_in_a_step(gpu: str):
    """The step writes the rows of both: neither lookup's alone."""
    plain, model = embedding(gpu), embedding(gpu)
    loader = [(ids[:12], ids[8:]) for ids in batches(gpu)]
    for one in (plain, model):
        optimizer = torch.optim.Adagrad(one.parameters(), lr=0.1)
        turns = loader if one is plain else speedswap.lookahead(loader, {one: lambda batch: batch})
        for first, second in turns:
            (one(first).pow(2).sum() + one(second).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    same_tables(model, plain)


def test_writing_the_table_in_between(gpu: str):
    """A write past the optimizer is in the next lookup."""
    plain, model = embedding(gpu), embedding(gpu)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step, ids in enumerate(batches(gpu) if one is plain else ahead(one, batches(gpu))):
            one(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                one.table.write(30, torch.full((20, DIM), 3.0))
    same_tables(model, plain)


@pytest.mark.filterwarnings("ignore:SW407")
def test_lookups_that_were_not_prefetched(gpu: str, monkeypatch: pytest.MonkeyPatch):
    """Their rows are made on the computation's stream, and compared on another stream, which must be recorded."""
    compared: list[Tensor] = []
    recorded: list[Tensor] = []
    compare, record = kernels.shared_places, kernels.used_here

    def watched(rows: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        compared.extend(others)
        return compare(rows, others)

    monkeypatch.setattr(kernels, "shared_places", watched)
    monkeypatch.setattr(kernels, "used_here", lambda some: (recorded.extend(some := list(some)), record(some))[1])
    plain, model = embedding(gpu), embedding(gpu)
    loader = batches(gpu) * 3
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step, ids in enumerate(loader if one is plain else ahead(one, loader)):
            looked_up = ids + 1 if step % 3 == 0 else ids
            one(looked_up % ROWS).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_tables(model, plain)
    assert compared
    assert {id(rows) for rows in compared} <= {id(tensor) for tensor in recorded}


def test_a_table_trained_on_a_gpu_and_looked_up_on_the_cpu(gpu: str):
    """Prefetches on either device see the writes of the other."""
    model = embedding(gpu)
    reader = speedswap.Embedding(ROWS, DIM, table=model.table)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    keys = {model: lambda batch: batch, reader: lambda batch: batch.cpu()}
    for ids in speedswap.lookahead(batches(gpu) * 2, keys):
        with torch.no_grad():
            found = reader(ids.cpu())
        model(ids).pow(2).sum().backward()
        before = model.table.read()[ids.cpu()]
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(found, before)


def test_places_found_by_a_prefetch_are_not_sought_again(gpu: str, monkeypatch: pytest.MonkeyPatch):
    """One launch finds those of all pending writes; and a write is forwarded in one, weight and state together."""
    sought: list[str] = []
    launched: list[str] = []
    forwarded: list[PendingWrite] = []
    kernel_handle, forward = driver.kernel_handle, PendingWrite.forward

    def watched(device: int, name: str) -> int:
        if name == "find_places":
            sought.append(threading.current_thread().name)
        if name.startswith("gather_") and threading.current_thread() is threading.main_thread():
            launched.append(name)
        return kernel_handle(device, name)

    def noted(write: PendingWrite, block: Block, places: Tensor | None = None) -> None:
        forwarded.append(write)
        forward(write, block, places)

    monkeypatch.setattr(driver, "kernel_handle", watched)
    monkeypatch.setattr(PendingWrite, "forward", noted)
    monkeypatch.setattr(pending, "LEAST_BYTES", 1 << 20)  # a write that leaves rows out seeks them
    model = embedding(gpu)
    train(model, ahead(model, batches(gpu)))
    sought.clear()
    launched.clear()
    forwarded.clear()
    train(model, ahead(model, batches(gpu)))
    steps = len(batches(gpu))
    assert [name for name in sought if not name.startswith("speedswap-in")] == []
    assert steps - 2 <= len(sought) <= steps
    assert 0 < len(launched) == len(forwarded)
