"""The costs of a training step on a GPU besides the bytes: waits of the host, and the order of streams."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import simulated_gpu
import simulated_gpu.device
import torch
from pinned_places import PINNED
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap import kernels
from speedswap.errors import LostUpdateError
from speedswap.kernels import Transfer, Transfers
from speedswap.kernels.cuda.driver import side_stream
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Block, Commit, prefetch
from speedswap.tables.pending import Gathered, PendingTransfers, Prefetch

ROWS, DIM, TABLES = 40, 4, 3

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
    "adam-capturable": lambda parameters: torch.optim.Adam(parameters, lr=0.1, capturable=True),
}


@pytest.fixture
def gpu(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one: SPEEDSWAP_TEST_DEVICE=simulated")
    return device


@contextlib.contextmanager
def waits() -> Iterator[Callable[[], int | None]]:
    """Fail where torch makes the host wait; how often the package did, where that can be counted."""
    before = torch.cuda.get_sync_debug_mode()
    gc.collect()  # another test's table, given back in between, would wait for the device
    with simulated_gpu.counted() if simulated_gpu.is_on() else contextlib.nullcontext() as counts:
        torch.cuda.set_sync_debug_mode("error")
        gc.disable()
        try:
            yield lambda: len(counts.round_trips) if counts is not None else None
        finally:
            gc.enable()
            torch.cuda.set_sync_debug_mode(before)


def models(**arguments: Any) -> list[TableModule]:
    arguments = {"storage": speedswap.Pinned("zero_copy"), "device": "cuda", **arguments}
    return [read_often(speedswap.Embedding(ROWS, DIM, seed=i, **arguments)) for i in range(TABLES)]


def read_often(module: TableModule) -> TableModule:
    """Return a module whose table has its memory, as after a step; until then initial values are computed."""
    for _ in range(2):
        module.table.gather(torch.arange(ROWS, device="cuda"))
    return module


def batches(count: int, size: int = 12) -> list[Tensor]:
    drawn = torch.randint(ROWS, (count, TABLES, size), generator=torch.Generator().manual_seed(1))
    return list(drawn.cuda())


def step(tables: Sequence[TableModule], optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    torch.stack([table(ids).square().sum() for table, ids in zip(tables, batch, strict=True)]).sum().backward()
    optimizer.step()


def ids_of(i: int) -> Callable[[Tensor], Tensor]:
    return lambda batch: batch[i]


@pytest.mark.parametrize("arguments", [{}, {"padding_idx": 3}, {"state_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_step_waits_for_the_numbers_of_rows_alone(
    ahead: bool, name: str, arguments: dict[str, Any], gpu: str
) -> None:
    """Once for each lookup in the plain loop; with lookahead once for all tables, in a separate thread."""
    tables = models(**arguments)
    optimizer = OPTIMIZERS[name]([table.weight for table in tables])
    source = batches(9)
    keys = {table: ids_of(i) for i, table in enumerate(tables)}
    loop = iter(speedswap.lookahead(source, keys) if ahead else source)
    for _ in range(4):
        step(tables, optimizer, next(loop))
    kernels.finish_transfers()
    with waits() as so_far:
        for _ in range(3):
            step(tables, optimizer, next(loop))
        kernels.finish_transfers()
    assert so_far() in (None, 3 if ahead else 3 * TABLES)


def test_gradients_add_up_without_waiting_for_more(gpu: str) -> None:
    """A second lookup before the step waits for its rows, and for the count of both lookups' rows together."""
    tables = models()
    optimizer = OPTIMIZERS["adam"]([table.weight for table in tables])
    for first, second in zip(batches(4), batches(4, size=7), strict=True):
        with waits() as so_far:
            optimizer.zero_grad()
            for batch in (first, second):
                torch.stack([table(ids).sum() for table, ids in zip(tables, batch, strict=True)]).sum().backward()
        assert so_far() in (None, 3 * TABLES)
        optimizer.step()


def test_rows_changed_outside_are_an_error_that_is_not_waited_for(gpu: str) -> None:
    items = models()[0]
    ids = torch.tensor([1, 2], device=gpu)
    items(ids).sum().backward()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():  # as C++ does
        items.weight.add_(1)
    with waits(), pytest.raises(LostUpdateError, match="changed on the device without the optimizer's hooks"):
        items(ids)
    items(ids)  # said once


def trained(ahead: bool, name: str, batches: Sequence[Tensor], **arguments: Any) -> list[Tensor]:
    tables = models(**arguments)
    optimizer = OPTIMIZERS[name]([table.weight for table in tables])
    keys = {table: ids_of(i) for i, table in enumerate(tables)}
    for batch in speedswap.lookahead(batches, keys) if ahead else batches:
        step(tables, optimizer, batch)
    return [table.table.read(column=column) for table in tables for column in table.table.columns]


@pytest.mark.parametrize("way", ["zero_copy", "staged out", "staged", "split"])
@pytest.mark.parametrize("order", [*simulated_gpu.device.POLICIES, "random-1", "random-2"])
def test_several_tables_in_any_order_of_the_streams(order: str, way: str, gpu: str) -> None:
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU has an order of its own")
    source = batches(8)
    with simulated_gpu.policy("eager"):
        plain = trained(False, "adam", source, storage=PINNED[way])
    name, _, seed = order.partition("-")
    with simulated_gpu.policy(name, int(seed or 0)):
        ours = trained(True, "adam", source, storage=PINNED[way])
    for column, expected in zip(ours, plain, strict=True):
        assert torch.equal(column, expected)


def test_the_first_lookup_does_not_wait_for_the_last_table(gpu: str) -> None:
    """Each result has a separate event: work queued after it may still be pending."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU is quicker than the test")
    with simulated_gpu.policy("late"):
        numbers = [torch.zeros(4, device=gpu) for _ in range(2)]

        def fill(tensor: Tensor) -> Callable[[], Tensor]:
            def add() -> Tensor:
                for _ in range(9):
                    tensor.add_(1)
                return tensor

            return add

        transfers, (soon, late) = Transfers("in"), (Transfer[Tensor](), Transfer[Tensor]())
        for transfer, tensor in zip((soon, late), numbers, strict=True):
            transfers.add(transfer, lambda tensor=tensor: fill(tensor), torch.device(gpu), inputs=[tensor])
        transfers.start()
        kernels.finish_transfers()
        assert soon.result().tolist() == [9, 9, 9, 9]
        assert not late.done()
        assert late.result().tolist() == [9, 9, 9, 9]
        assert late.done()


@pytest.mark.parametrize("of_ids", ["cpu", "cuda"])
def test_rows_of_ids_in_host_memory_do_not_wait_for_the_computation(of_ids: str, gpu: str) -> None:
    """Ids on the GPU are part of what is queued, and wait for it."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU is quicker than the test")
    with simulated_gpu.policy("late"):
        table = models()[0].table
        ids = batches(1)[0][0].to(of_ids)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        computed = torch.cuda.current_stream().record_event()
        (prefetched,) = prefetch([(table, ids, torch.device(gpu))])
        kernels.finish_transfers()
        assert computed.query() is (of_ids == "cuda")
        with table.lock:
            found = prefetched.take()
        assert found is not None
        assert torch.equal(found[0].weight[found[1]].cpu(), table.read()[ids.cpu()])


def test_a_prefetch_waits_for_rows_to_forward_that_no_prefetch_found(gpu: str) -> None:
    """The stream that makes them may be behind."""
    if not simulated_gpu.is_on():
        pytest.skip("a real GPU is quicker than the test")
    with simulated_gpu.policy("late"):
        table, ids = models()[0].table, torch.arange(9)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        rows, values = ids.to(gpu, non_blocking=True), torch.ones(9, DIM, device=gpu)
        computed = torch.cuda.current_stream().record_event()
        with Commit() as commit:
            table.give_back(Block(rows, {}), {"weight": values}, commit)
        (prefetched,) = prefetch([(table, ids + 3, torch.device(gpu))])
        kernels.finish_transfers()
        side_stream(0, "ids in").synchronize()
        assert computed.query()
        del prefetched


def test_ids_out_of_range_of_one_table_do_not_stop_the_others(gpu: str) -> None:
    tables = models()
    good, bad = batches(2)
    bad[1, 3] = ROWS
    loop = speedswap.lookahead([good, bad], {table: ids_of(i) for i, table in enumerate(tables)})
    steps = iter(loop)
    next(steps)
    batch = next(steps)
    assert torch.equal(tables[0](batch[0]).cpu(), tables[0].table.read()[batch[0].cpu()])
    with pytest.raises(speedswap.errors.IdError, match=rf"ids\[3\] is {ROWS}, but table"):
        tables[1](batch[1])
    assert torch.equal(tables[2](batch[2]).cpu(), tables[2].table.read()[batch[2].cpu()])


def test_a_view_of_the_prefetched_ids_needs_no_comparison(gpu: str) -> None:
    table = models()[0]
    source = [torch.randint(ROWS, (2, 6), generator=torch.Generator().manual_seed(i)).to(gpu) for i in range(3)]
    for batch in speedswap.lookahead(source, {table: lambda batch: batch[1]}):
        with waits():
            found = table(batch[1])
        assert torch.equal(found.cpu(), table.table.read()[batch[1].cpu()])
    for batch in speedswap.lookahead(source, {table: lambda batch: batch[0]}):
        batch[0].copy_(batch[1])
        with torch.no_grad():
            found = table(batch[0])
        assert torch.equal(found.cpu(), table.table.read()[batch[1].cpu()])


def test_blocks_of_a_gpu_come_in_few_sizes(gpu: str) -> None:
    sizes = set()
    for count in range(16_000, 32_001, 97):
        block = kernels.empty((count, 32), torch.float32, gpu)
        assert block.is_contiguous()
        assert block.shape == (count, 32)
        held = block.untyped_storage().nbytes()
        assert block.nbytes <= held <= block.nbytes * 9 / 8
        sizes.add(held)
    assert len(sizes) <= 10


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padding_in_bags_is_not_counted_by_the_host(mode: str, gpu: str) -> None:
    pinned = speedswap.Pinned("zero_copy")
    table = read_often(speedswap.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=3, storage=pinned, seed=1))
    ids = torch.tensor([[3, 1, 3], [3, 3, 3], [2, 7, 7]])
    expected = torch.nn.functional.embedding_bag(ids, table.table.read(), mode=mode, padding_idx=3)
    near = ids.to(gpu)
    table(near)
    with waits() as so_far:
        found = table(near)
    assert so_far() in (None, 1)
    torch.testing.assert_close(found.cpu(), expected)


def started(
    transfer: Transfer[Any], direction: str, gpu: str, work: Callable[[], Any], inputs: Sequence[Tensor]
) -> None:
    """Start a transfer that does some work."""
    transfers = Transfers(direction)
    transfers.add(transfer, lambda: work, torch.device(gpu), inputs=inputs)
    transfers.start()


@pytest.mark.parametrize("order", simulated_gpu.device.POLICIES)
def test_inputs_of_a_transfer_stay_until_it_has_read_them(order: str, gpu: str) -> None:
    table = speedswap.Table.create(ROWS, DIM, storage=speedswap.Pinned("zero_copy"))
    table.write(0, torch.zeros(1, DIM))  # takes the memory
    (group,) = table.store.groups
    rows = torch.arange(ROWS, device=gpu)
    with simulated_gpu.policy(order) if simulated_gpu.is_on() else contextlib.nullcontext():
        box = [torch.ones(ROWS, DIM, device=gpu)]
        write: Transfer[None] = Transfer()

        def scatter() -> None:
            kernels.scatter_records(group.records, rows, [kernels.Part(0, box.pop())])

        started(write, "out", gpu, scatter, [*box])
        kernels.finish_transfers()
        torch.full((ROWS, DIM), 7.0, device=gpu)
        write.result()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(table.read(), torch.ones(ROWS, DIM))


@pytest.mark.parametrize("order", simulated_gpu.device.POLICIES)
def test_prefetched_rows_stay_until_they_were_used(order: str, gpu: str) -> None:
    table = speedswap.Table.create(ROWS, DIM, storage=speedswap.Pinned("zero_copy"))
    table.write(0, torch.zeros(1, DIM))  # takes the memory
    (group,) = table.store.groups
    rows = torch.arange(ROWS, device=gpu)

    def gather() -> Gathered:
        return Gathered((Block(rows.clone(), {"weight": torch.ones(ROWS, DIM, device=gpu)}), rows.clone()))

    def others() -> None:
        for _ in range(4):
            torch.full((ROWS, DIM), 7.0, device=gpu)

    with simulated_gpu.policy(order) if simulated_gpu.is_on() else contextlib.nullcontext():
        prefetch = Prefetch(PendingTransfers(), [])
        started(prefetch, "in", gpu, gather, [])
        found = prefetch.take()
        assert found is not None
        kernels.scatter_records(group.records, rows, [kernels.Part(0, found[0].weight)])
        del found, prefetch
        started(Transfer(), "in", gpu, others, [])
        kernels.finish_transfers()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(table.read(), torch.ones(ROWS, DIM))
