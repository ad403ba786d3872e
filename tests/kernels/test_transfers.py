"""Transfers by the background thread of the CPU loops."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from children import run_script
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from speedswap import kernels
from speedswap.kernels import FoundBlocks, Part, Records, Stored, Transfer, Transfers, WantedColumn
from speedswap.kernels import transfers as transfer_module

ascending = st.lists(st.integers(0, 30), unique=True, max_size=20).map(sorted)


def records_over(table: Tensor) -> Records:
    return Records(table.data_ptr(), table.stride(0) * table.element_size(), len(table), table.device, False, table)


def wanted(table: Tensor, first: int, stop: int) -> WantedColumn:
    size = table.element_size()
    return WantedColumn(first * size, (stop - first,), table.dtype)


Moves = list[tuple[Records, list[WantedColumn]]]


def prefetch(ids: Tensor, num_rows: int, moves: Moves) -> Transfer[FoundBlocks | None]:
    transfer: Transfer[FoundBlocks | None] = Transfer()
    kernels.prefetch_on_cpu(transfer, ids, num_rows, moves, lambda found: found)
    return transfer


def test_prefetched_rows() -> None:
    table = torch.arange(12.0).view(4, 3)
    job = prefetch(torch.tensor([[3, 0], [3, 1]]), 4, [(records_over(table), [wanted(table, 1, 3)])])
    found = job.result()
    assert found is not None
    assert found.rows.tolist() == [0, 1, 3]
    assert found.local.tolist() == [[2, 0], [2, 1]]
    assert found.blocks[0].tolist() == [[1, 2], [4, 5], [10, 11]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_lookups_of_any_size_in_several_records(count: int, dtype: torch.dtype) -> None:
    first, second = torch.randn(900, 8), torch.randn(900, 3, dtype=torch.float64)
    ids = torch.randint(900, (count,), dtype=dtype)
    moves = [
        (records_over(first), [wanted(first, 0, 5), wanted(first, 5, 8)]),
        (records_over(second), [wanted(second, 0, 3)]),
    ]
    found = prefetch(ids, 900, moves).result()
    rows, local = np.unique(ids.numpy(), return_inverse=True)
    assert found is not None
    assert np.array_equal(found.rows.numpy(), rows)
    assert np.array_equal(found.local.numpy(), local)
    for block, values in zip(found.blocks, [first[:, :5], first[:, 5:], second], strict=True):
        assert torch.equal(block, values[found.rows])


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_id_out_of_range_gives_no_rows(bad: int) -> None:
    table = torch.randn(4, 2)
    job = prefetch(torch.tensor([1, bad]), 4, [(records_over(table), [wanted(table, 0, 2)])])
    assert job.result() is None


def test_the_ids_may_change_once_they_were_given() -> None:
    table = torch.randn(1000, 2)
    ids = torch.arange(1000)
    job = prefetch(ids, 1000, [(records_over(table), [wanted(table, 0, 2)])])
    ids.fill_(-1)
    found = job.result()
    assert found is not None
    assert torch.equal(found.blocks[0], table)


def test_transfers_run_in_the_order_in_which_they_were_given() -> None:
    table = torch.zeros(2000, 64)
    rows = torch.arange(2000)
    seen = []
    for turn in range(1, 20):
        values = torch.full((2000, 64), float(turn))
        kernels.scatter_on_cpu(Transfer(), rows, [(records_over(table), [Part(0, values)])])
        seen.append(prefetch(rows, 2000, [(records_over(table), [wanted(table, 0, 64)])]))
    for turn, job in enumerate(seen, start=1):
        found = job.result()
        assert found is not None
        assert bool((found.blocks[0] == turn).all())


def test_results_keep_their_memory_for_themselves() -> None:
    """Memory is used again only when nothing refers to it any more."""
    table = torch.randn(300, 16)
    kept = []
    for seed in range(40):
        ids = torch.randint(300, (200,), generator=torch.Generator().manual_seed(seed))
        found = prefetch(ids, 300, [(records_over(table), [wanted(table, 0, 16)])]).result()
        assert found is not None
        if seed % 3 == 0:
            kept.append((ids, found))
    for ids, found in kept:
        assert torch.equal(found.rows[found.local], ids)
        assert torch.equal(found.blocks[0], table[found.rows])


def test_rows_are_forwarded() -> None:
    written = torch.tensor([[1.0], [2.0], [3.0]])
    gathered = torch.zeros(4, 1)
    kernels.forward(torch.tensor([2, 5, 9]), [written], torch.tensor([0, 2, 9, 11]), [gathered])
    assert gathered.flatten().tolist() == [0, 1, 3, 0]


@given(from_rows=ascending, to_rows=ascending, width=st.integers(1, 20))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", [None, 99])
def test_forwarded_rows_are_as_if_scattered_and_gathered(
    from_rows: list[int], to_rows: list[int], width: int, dtype: torch.dtype, key: int | None
) -> None:
    stored = Stored(dtype, key)
    memory = torch.randn(101, width).to(dtype)
    table = Records(memory.data_ptr(), 2 * width, 101, memory.device, False, memory)
    source, written = torch.randn(len(from_rows), width), torch.tensor(from_rows, dtype=torch.int64)
    wanted = torch.tensor(to_rows, dtype=torch.int64)
    early, late = torch.empty(2, len(to_rows), width)
    kernels.gather_records(table, wanted, [Part(0, early, stored)])
    kernels.scatter_records(table, written, [Part(0, source, stored)])
    kernels.gather_records(table, wanted, [Part(0, late, stored)])
    kernels.forward(written, [source], wanted, [early], [stored])
    assert torch.equal(early, late)


@given(from_rows=ascending, to_rows=ascending, width=st.integers(1, 5))
def test_only_shared_rows_are_forwarded(from_rows: list[int], to_rows: list[int], width: int) -> None:
    sources = [torch.randn(len(from_rows), width), torch.randn(len(from_rows), dtype=torch.float64)]
    targets = [torch.randn(len(to_rows), width), torch.randn(len(to_rows), dtype=torch.float64)]
    expected = [target.clone() for target in targets]
    for place, row in enumerate(to_rows):
        if row in from_rows:
            for source, target in zip(sources, expected, strict=True):
                target[place] = source[from_rows.index(row)]
    kernels.forward(
        torch.tensor(from_rows, dtype=torch.int64), sources, torch.tensor(to_rows, dtype=torch.int64), targets
    )
    for target, values in zip(targets, expected, strict=True):
        assert torch.equal(target, values)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    program = """
    import os, torch
    from speedswap import kernels
    from speedswap.kernels import Records, Transfer, WantedColumn

    table = torch.randn(100, 4)
    def look():
        records = Records(table.data_ptr(), 16, 100, table.device, False, table)
        transfer, moves = Transfer(), [(records, [WantedColumn(0, (4,), torch.float32)])]
        kernels.prefetch_on_cpu(transfer, torch.arange(100), 100, moves, lambda found: found)
        return transfer

    before = look()
    assert torch.equal(before.result().blocks[0], table)
    child = os.fork()
    if child == 0:
        assert torch.equal(look().result().blocks[0], table)
        kernels.finish_transfers()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(look().result().blocks[0], table)
    """
    done = run_script(program)
    assert done.returncode == 0, done.stderr


def test_transfers_run_once_whoever_starts_them() -> None:
    """Threads that wait for transfers that were added but not started start each of them once."""
    for _ in range(30):
        transfers, runs = Transfers("out"), []
        pending: list[Transfer[None]] = [Transfer() for _ in range(20)]
        for number, transfer in enumerate(pending):
            work = partial(runs.append, number)
            transfers.add(transfer, lambda work=work: work, torch.device("cpu"))
        assert not any(transfer.done() for transfer in pending)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(Transfer.result, pending))
        assert sorted(runs) == list(range(20))


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails_at", [1, 2])
def test_transfers_that_could_not_be_started_are_started_by_those_who_wait(
    error: BaseException, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device, each of them once, also those whose thread had taken them when the start was interrupted."""
    transfers, runs, calls = Transfers("out"), [], []
    pending: list[Transfer[None]] = [Transfer() for _ in range(6)]
    for number, transfer in enumerate(pending):
        work = partial(runs.append, number)
        transfers.add(transfer, lambda work=work: work, torch.device(["cpu", "meta"][number % 2]))

    class Thread(transfer_module._DirectionThread):
        def do(self, *job: Any) -> None:
            calls.append(1)
            if len(calls) != fails_at:
                return super().do(*job)
            if isinstance(error, KeyboardInterrupt):
                super().do(*job)
            raise error

    thread = Thread("out")
    monkeypatch.setattr(transfer_module, "_thread", lambda direction: thread)
    with pytest.raises(type(error)):
        transfers.start()
    for transfer in pending:
        transfer.result()
    thread.end()
    assert sorted(runs) == list(range(6))


def test_a_transfer_that_raises_fails_those_after_it_in_its_job() -> None:
    """They may read what it should have written; earlier ones keep their results."""
    transfers, pending = Transfers("in"), [Transfer[int]() for _ in range(3)]

    def fail() -> int:
        raise MemoryError("no room")

    for transfer, work in zip(pending, (lambda: 1, fail, lambda: 3), strict=True):
        transfers.add(transfer, lambda work=work: work, torch.device("cpu"))
    transfers.start()
    assert pending[0].result() == 1
    for transfer in pending[1:]:
        with pytest.raises(MemoryError, match="no room"):
            transfer.result()


def test_transfers_that_wait_for_no_gpu_run_in_the_callers_thread(gpu: str) -> None:
    """Others have a thread. Either way they are on their direction's stream, and the caller's is as before."""
    transfers, ran = Transfers("out"), {}
    pending: list[Transfer[None]] = [Transfer() for _ in range(2)]

    def note(waits: bool) -> None:
        ran[waits] = threading.current_thread().name, torch.cuda.current_stream().cuda_stream

    for transfer, waits in zip(pending, (True, False), strict=True):
        transfers.add(transfer, lambda waits=waits: partial(note, waits), torch.device(gpu), waits=waits)
    before = torch.cuda.current_stream().cuda_stream
    transfers.start()
    for transfer in pending:
        transfer.result()
    assert torch.cuda.current_stream().cuda_stream == before
    assert ran[True][0] == "speedswap-out"
    assert ran[False][0] == threading.current_thread().name
    assert ran[True][1] == ran[False][1] != before


@pytest.mark.skipif(not simulated_gpu.is_on(), reason="needs the simulated GPU: SPEEDSWAP_TEST_DEVICE=simulated")
def test_a_lookup_ahead_goes_on_while_a_graph_is_captured(gpu: str) -> None:
    """In torch's default mode, in which CUDA refuses unsafe calls of all threads that do not ask for them."""
    transfers, transfer = Transfers("in"), Transfer[list[int]]()
    ids = torch.tensor([3, 1, 3], device=gpu)

    def find() -> list[int]:
        simulated_gpu.call("capture", 1)
        try:
            ((rows, _),) = kernels.find_all([(ids, 5)])
        finally:
            simulated_gpu.call("capture", 0)
        return rows.tolist()  # type: ignore[no-any-return]

    transfers.add(transfer, lambda: find, torch.device(gpu))
    transfers.start()
    assert transfer.result() == [1, 3]


def test_what_goes_wrong_in_the_callers_thread_is_the_transfers_error(gpu: str) -> None:
    transfers, transfer = Transfers("out"), Transfer[None]()

    def fail() -> None:
        raise MemoryError("no room")

    transfers.add(transfer, lambda: fail, torch.device(gpu), waits=False)
    before = torch.cuda.current_stream().cuda_stream
    transfers.start()
    assert torch.cuda.current_stream().cuda_stream == before
    with pytest.raises(MemoryError, match="no room"):
        transfer.result()


@pytest.mark.usefixtures("usual_signals")
def test_an_interrupt_is_not_the_error_of_a_transfer_in_the_callers_thread(gpu: str) -> None:
    transfers, transfer = Transfers("out"), Transfer[int]()

    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        return 3

    transfers.add(transfer, lambda: interrupted, torch.device(gpu), waits=False)
    with pytest.raises(KeyboardInterrupt):
        transfers.start()
    assert transfer.result() == 3


def test_blocks_of_one_width_are_forwarded_in_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CPU does: columns of several widths, and places that are known or are not."""
    written, wanted = torch.tensor([2, 5, 9, 40]), torch.tensor([0, 2, 9, 11, 40])
    shapes = [(8,), (), (8,), (0,), (8,)]
    sources = [torch.randn(4, *shape) for shape in shapes]
    expected = [torch.randn(5, *shape) for shape in shapes]
    near = [block.to(device) for block in expected]
    kernels.forward(written, sources, wanted, expected)
    launched: list[str] = []
    if device == "cuda":
        from speedswap.kernels.cuda import driver

        real = driver.kernel_handle
        monkeypatch.setattr(
            driver,
            "kernel_handle",
            lambda device, name: (launched.append(name), real(device, name))[1],  # type: ignore[func-returns-value]
        )
    far, wanted_there = [block.to(device) for block in sources], wanted.to(device)
    places = kernels.places_among(written.to(device), wanted_there)
    for known in (None, places):
        again = [block.clone() for block in near]
        kernels.forward(written.to(device), far, wanted_there, again, places=known)
        for ours, theirs in zip(again, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
    moves = ["gather_w16", "gather_w4"]
    assert launched == (["find_places", "find_places", *moves * 2] if device == "cuda" else [])


def test_transfers_on_the_cpu_ask_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.stream(None) takes a GPU into use, some of its memory with it, and in a forked child it raises."""

    def asked(*_: object) -> None:
        raise AssertionError("a GPU was asked")

    for name in ("stream", "current_device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, asked)
    transfers, transfer = Transfers("in"), Transfer[int]()
    transfers.add(transfer, lambda: lambda: 3, torch.device("cpu"))
    assert transfer.result() == 3
