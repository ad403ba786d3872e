"""gather_records and scatter_records: several columns of a record in one pass, wherever records and blocks are."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import pytest
import simulated_gpu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.kernels import Part, Records, Shares, gather_records, records, scatter_records
from speedswap.kernels.cuda import pinning


class Memory:
    """Records of random bytes somewhere: on the CPU (pageable), pinned, or on a GPU."""

    def __init__(self, num_rows: int, stride: int, where: str) -> None:
        self.num_rows, self.stride, self.where = num_rows, stride, where
        mapping = mmap.mmap(-1, num_rows * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.bytes.random_(0, 256)
        if where == "cuda":
            self.bytes = self.bytes.cuda()
        if where == "pinned":
            pointer = self.bytes.data_ptr()
            assert pinning.pin(pointer, num_rows * stride) is None
            weakref.finalize(self, pinning.unpin, pointer, num_rows * stride, os.getpid(), mapping)

    def records(self) -> Records:
        pinned = self.where == "pinned"
        return Records(self.bytes.data_ptr(), self.stride, self.num_rows, self.bytes.device, pinned, self.bytes)

    def numpy(self) -> np.ndarray:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.bytes.cpu().numpy().reshape(self.num_rows, self.stride).copy()


@pytest.mark.parametrize(
    ("wanted", "of_gpu", "taken"), [(16, 132, 16), (4, 132, 4), (16, 20, 5), (4, 20, 4), (8, 3, 1)]
)
def test_a_kernel_over_host_memory_takes_few_multiprocessors(
    wanted: int, of_gpu: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are wanted, and at most a quarter of the GPU's."""
    monkeypatch.setattr(records, "multiprocessors", lambda device: of_gpu)
    near = Memory(10, 16, "cpu").records()._replace(shares=Shares(multiprocessors=wanted))
    assert near.multiprocessors_of(0) == taken
    assert near._replace(device=torch.device("cuda")).multiprocessors_of(0) == of_gpu


@pytest.fixture(params=["cpu", *(["cuda", "pinned"] if torch.cuda.is_available() else [])])
def where(request: pytest.FixtureRequest) -> str:
    """The records' device."""
    return str(request.param)


def check(memory: Memory, columns: list[tuple[int, int]], ids: torch.Tensor, device: str, dtype=torch.uint8) -> None:
    """Gather and scatter (offset, width) columns, against NumPy."""
    order = ids.tolist()
    before = memory.numpy()
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    parts = [
        Part(offset, torch.full((len(order), width), 0x5A, dtype=torch.uint8).view(dtype).to(device))
        for offset, width in columns
    ]
    gather_records(memory.records(), ids, parts)
    for part, (offset, width) in zip(parts, columns, strict=True):
        assert part.block.shape == (len(order), width // item_bytes)
        np.testing.assert_array_equal(
            part.block.cpu().view(torch.uint8).numpy(), before[order, offset : offset + width]
        )  # fmt: skip
    np.testing.assert_array_equal(memory.numpy(), before)
    if len(set(order)) < len(order):
        return
    for part, (offset, width) in zip(parts, columns, strict=True):
        fresh = torch.randint(0, 256, (len(order), width), dtype=torch.uint8)
        part.block.view(torch.uint8).copy_(fresh)
        before[order, offset : offset + width] = fresh.numpy()
    scatter_records(memory.records(), ids, parts)
    np.testing.assert_array_equal(memory.numpy(), before)


@pytest.mark.cuda_kernels
def test_two_columns_of_two_records(device: str):
    """A weight of two floats and a step count of one; the records have four bytes to spare."""
    values = torch.tensor([[1.0, 2.0, 10.0, -1.0], [3.0, 4.0, 20.0, -1.0], [5.0, 6.0, 30.0, -1.0]])
    records = Records(values.data_ptr(), 16, 3, values.device, False, values)
    weight, step = torch.zeros(2, 2, device=device), torch.zeros(2, 1, device=device)
    ids = torch.tensor([2, 0])
    gather_records(records, ids, [Part(0, weight), Part(8, step)])
    assert weight.tolist() == [[5.0, 6.0], [1.0, 2.0]]
    assert step.tolist() == [[30.0], [10.0]]
    scatter_records(records, ids, [Part(0, -weight), Part(8, step + 1)])
    assert values.tolist() == [[-1.0, -2.0, 11.0, -1.0], [3.0, 4.0, 20.0, -1.0], [-5.0, -6.0, 31.0, -1.0]]


COLUMNS = {
    "one": [(0, 512)],
    "Adam": [(0, 512), (512, 512), (1024, 512)],
    "odd": [(0, 7), (7, 1), (8, 33), (50, 100)],
    "gaps": [(16, 64), (128, 64), (256, 4)],
    "out of order": [(256, 16), (0, 48), (64, 8)],
    "nine": [(32 * c, 24) for c in range(9)],
    "an empty one": [(0, 16), (16, 0), (16, 32)],
    "long": [(0, 4096), (4096, 20)],
}


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS.keys())
def test_columns(where: str, device: str, columns: list[tuple[int, int]], ids_dtype: torch.dtype):
    stride = max(offset + width for offset, width in columns)
    for spare in (0, 12, 64):
        memory = Memory(300, stride + spare, where)
        check(memory, columns, torch.randperm(300)[:100].to(device, ids_dtype), device)
        check(memory, columns, torch.randint(0, 300, (77,)).to(ids_dtype), device)


@pytest.mark.sweep(1)
@pytest.mark.cuda_kernels
@pytest.mark.parametrize("columns", [COLUMNS["Adam"], COLUMNS["odd"], COLUMNS["gaps"]], ids=["Adam", "odd", "gaps"])
def test_more_than_the_cache_and_the_staging_buffers_hold(where: str, device: str, columns: list[tuple[int, int]]):
    stride = max(offset + width for offset, width in columns)
    nbytes = (24 << 20) if simulated_gpu.is_on() else 100_000_000  # its kernels move a byte at a time, past no cache
    memory = Memory(nbytes // stride, stride, where)
    check(memory, columns, torch.randperm(memory.num_rows)[: memory.num_rows * 2 // 3].to(device), device)


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool], ids=str)
def test_blocks_of_any_dtype_and_shape(where: str, device: str, dtype: torch.dtype):
    memory = Memory(50, 256, where)
    check(memory, [(0, 64), (64, 160)], torch.randperm(50)[:20], device, dtype)
    block = torch.zeros(20, 2, 4, 4, device=device)
    ids = torch.randperm(50)[:20]
    gather_records(memory.records(), ids, [Part(128, block)])
    np.testing.assert_array_equal(
        block.cpu().view(20, 32).view(torch.uint8).numpy(), memory.numpy()[ids.tolist(), 128:256]
    )  # fmt: skip


def test_no_ids_or_no_columns_do_nothing(where: str, device: str):
    memory = Memory(5, 16, where)
    before = memory.numpy()
    none = torch.empty(0, dtype=torch.int64)
    gather_records(memory.records(), none, [Part(0, torch.empty(0, 4, device=device))])
    scatter_records(memory.records(), none, [Part(0, torch.empty(0, 4, device=device))])
    gather_records(memory.records(), torch.tensor([1]), [])
    scatter_records(memory.records(), torch.tensor([1]), [])
    np.testing.assert_array_equal(memory.numpy(), before)


@settings(max_examples=80)
@given(data=st.data())
def test_any_columns(data: st.DataObject):
    columns, end = [], 0
    for _ in range(data.draw(st.integers(1, 10))):
        begin = end + data.draw(st.integers(0, 20))
        end = begin + data.draw(st.integers(1, 200))
        columns.append((begin, end - begin))
    num_rows = data.draw(st.integers(1, 200))
    count = data.draw(st.integers(1, num_rows))
    memory = Memory(num_rows, end + data.draw(st.integers(0, 70)), "cpu")
    check(memory, columns, torch.randperm(num_rows)[:count], "cpu")


@pytest.mark.cuda_kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_current_stream_is_the_one_that_moves():
    """A gather on a side stream waits for what that stream does, and for nothing on the default stream."""
    memory = Memory(2000, 512, "pinned")
    ids = torch.arange(0, 2000, 2, device="cuda")
    block = torch.zeros(1000, 128, device="cuda")
    gather_records(memory.records(), ids, [Part(0, block)])  # the first launch loads the kernel, and may wait
    block.zero_()
    torch.cuda.synchronize()
    side, busy = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    busy.record()
    with torch.cuda.stream(side):
        gather_records(memory.records(), ids, [Part(0, block)])
    side.synchronize()
    assert not busy.query()
    np.testing.assert_array_equal(block.cpu().view(torch.uint8).numpy(), memory.numpy()[::2])


@pytest.mark.cuda_kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_staging_waits_for_the_work_before_it():
    """Values that a stream is still computing are the ones that reach pageable records, gather after gather."""
    memory = Memory(60_000, 512, "cpu")
    ids = torch.randperm(60_000)
    block = torch.zeros(60_000, 128, device="cuda")
    for turn in range(5):
        gather_records(memory.records(), ids, [Part(0, block)])
        torch.cuda._sleep(20_000_000)
        block.fill_(turn)
        scatter_records(memory.records(), ids, [Part(0, block)])
        assert (memory.bytes.view(torch.float32) == turn).all()
        gather_records(memory.records(), ids, [Part(0, block.zero_())])
        assert (block == turn).all()
