"""Every way between host memory and a GPU, against NumPy; on a GPU, or on the simulated one."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import simulated_gpu
import torch
from engine_tables import WAYS, Table, ascending, blocks

from speedswap.kernels import Part, Stored, rounding_key, scatter_records
from speedswap.kernels.cuda import engines

ADAM = [(0, 64), (64, 64), (128, 64)]


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> float:
    return request.param


COLUMNS = {
    "one": [(0, 512)],
    "Adam": ADAM,
    "odd": [(0, 7), (8, 33), (50, 100)],
    "one of three": [(64, 64)],
    "nine": [(32 * c, 24) for c in range(9)],
    "wider than a buffer": [(16, 6000)],
}


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS.keys())
@pytest.mark.usefixtures("small_buffers")
def test_every_way_moves_every_byte_and_no_other(gpu, way: float, columns: list[tuple[int, int]], ids_on: str):
    stride = max(offset + width for offset, width in columns) + 12
    for num_rows, count in ((3, 1), (700, 500)):
        table = Table(num_rows, stride)
        for dtype in (torch.int32, torch.int64):
            ids = ascending(num_rows, count)
            parts = blocks(columns, count, gpu)
            engines.move_between("gather", way, table.records, ids.to(ids_on, dtype), parts, gpu)
            for part, (offset, width) in zip(parts, columns, strict=True):
                np.testing.assert_array_equal(
                    part.block.cpu().numpy(), table.expected[ids.numpy(), offset : offset + width]
                )
                fresh = torch.randint(0, 256, (count, width), dtype=torch.uint8)
                part.block.copy_(fresh)
                table.expected[ids.numpy(), offset : offset + width] = fresh.numpy()
            engines.move_between("scatter", way, table.records, ids.to(ids_on, dtype), parts, gpu)
            np.testing.assert_array_equal(table.now(), table.expected)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_gather_passes_negative_ids_over(gpu, way: float, ids_on: str, dtype: torch.dtype):
    """Their rows stay unchanged."""
    table, ids = Table(700, 192), ascending(700, 500)
    kept = torch.rand(500) < 0.6
    wanted = torch.where(kept, ids, -1).to(ids_on, dtype)
    parts = blocks(ADAM, 500, gpu)
    for part in parts:
        part.block.fill_(5)
    engines.move_between("gather", way, table.records, wanted, parts, gpu)
    expected = np.full((500, 192), 5, np.uint8)
    expected[kept.numpy()] = table.expected[ids[kept].numpy()]
    np.testing.assert_array_equal(torch.cat([part.block.cpu() for part in parts], 1).numpy(), expected)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
def test_nothing_is_gathered_where_every_id_is_negative(gpu, way: float):
    table, parts = Table(5, 64), blocks([(0, 64)], 3, gpu)
    engines.move_between("gather", way, table.records, torch.full((3,), -1, device=gpu), parts, gpu)
    assert not parts[0].block.any()


@pytest.mark.cuda_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.usefixtures("small_buffers")
def test_compact_columns_are_converted_as_the_cpu_does(gpu, way: float, dtype: torch.dtype):
    """The bits are those of the CPU loops, in both directions and with stochastic rounding."""
    count, key = 300, None if dtype is torch.int8 else rounding_key(1, 2, 3)
    row_bytes = 24 * dtype.itemsize + (4 if dtype is torch.int8 else 0)
    table, other = Table(400, 80), Table(400, 80)
    assert row_bytes <= 64
    ids = ascending(400, count)
    values, plain = torch.randn(count, 24), torch.randn(count, 4)
    scatter_records(other.records, ids, [Part(0, values, Stored(dtype, key)), Part(64, plain)])
    parts = [Part(0, values.to(gpu), Stored(dtype, key)), Part(64, plain.to(gpu))]
    engines.move_between("scatter", way, table.records, ids.to(gpu), parts, gpu)
    np.testing.assert_array_equal(table.now(), other.now())
    read = [Part(0, torch.zeros(count, 24, device=gpu), Stored(dtype)), Part(64, torch.zeros(count, 4, device=gpu))]
    engines.move_between("gather", way, table.records, ids.to(gpu), read, gpu)
    assert torch.equal(read[1].block.cpu(), plain)
    rounded = values if dtype is torch.int8 else values.to(dtype).float()
    assert torch.allclose(read[0].block.cpu(), rounded, rtol=0.02, atol=0.05)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
def test_moves_come_after_what_was_queued_before_them(gpu, way: float):
    """With no wait between the steps each gather sees the scatter before it, each scatter what was computed."""
    table, ids = Table(600, 64), ascending(600, 450).to(gpu)
    ones = torch.ones(450, 64, dtype=torch.uint8, device=gpu)
    for _ in range(6):
        parts = blocks([(0, 64)], 450, gpu)
        engines.move_between("gather", way, table.records, ids, parts, gpu)
        parts[0].block.add_(ones)
        engines.move_between("scatter", way, table.records, ids, parts, gpu)
        del parts
    table.expected[ids.cpu().numpy()] += 6
    np.testing.assert_array_equal(table.now(), table.expected)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
def test_the_cpu_waits_for_what_kernels_have_still_to_write(gpu):
    """Rows of a queued kernel are written before they are staged, and never afterwards."""
    table, ids = Table(600, 64), ascending(600, 450)
    near, old, new, read = ids.to(gpu), *(blocks([(0, 64)], 450, gpu) for _ in range(3))
    old[0].block.fill_(1)
    new[0].block.fill_(2)
    torch.cuda.synchronize()
    engines.move_between("scatter", WAYS["zero_copy"], table.records, near, old, gpu)
    engines.move_between("gather", WAYS["staged"], table.records, ids, read, gpu)
    engines.move_between("scatter", WAYS["zero_copy"], table.records, near, old, gpu)
    engines.move_between("scatter", WAYS["staged"], table.records, ids, new, gpu)
    assert (read[0].block == 1).all()
    table.expected[ids.numpy()] = 2
    np.testing.assert_array_equal(table.now(), table.expected)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
def test_ways_may_change_from_move_to_move(gpu):
    """Rows written one way are read by the next."""
    table, ids = Table(600, 64), ascending(600, 450).to(gpu)
    ones = torch.ones(450, 64, dtype=torch.uint8, device=gpu)
    ways = [WAYS[name] for name in ("zero_copy", "staged", "split", "staged", "zero_copy", "split", "zero_copy")]
    for out, into in itertools.pairwise(ways):
        parts = blocks([(0, 64)], 450, gpu)
        engines.move_between("gather", into, table.records, ids, parts, gpu)
        parts[0].block.add_(ones)
        engines.move_between("scatter", out, table.records, ids, parts, gpu)
    table.expected[ids.cpu().numpy()] += 6
    np.testing.assert_array_equal(table.now(), table.expected)


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
def test_both_directions_at_once(gpu, way: float):
    """One thread and stream gathers from one table while another scatters to a second table."""
    source, target = Table(900, 64), Table(900, 64)
    ids = ascending(900, 800)
    gathered = [blocks([(0, 64)], 800, gpu) for _ in range(4)]
    written = [torch.full((800, 64), turn, dtype=torch.uint8, device=gpu) for turn in range(4)]
    torch.cuda.synchronize()

    def into() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for parts in gathered:
                engines.move_between("gather", way, source.records, ids, parts, gpu)
            torch.cuda.current_stream().synchronize()

    def out() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for values in written:
                engines.move_between("scatter", way, target.records, ids, [Part(0, values)], gpu)

    threads = [threading.Thread(target=into), threading.Thread(target=out)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for parts in gathered:
        np.testing.assert_array_equal(parts[0].block.cpu().numpy(), source.expected[ids.numpy()])
    target.expected[ids.numpy()] = 3
    np.testing.assert_array_equal(target.now(), target.expected)


@pytest.mark.cuda_kernels
def test_nothing_is_allocated_after_the_first_moves(gpu, way: float):
    table, ids = Table(40_000, 64), ascending(40_000, 30_000).to(gpu)
    parts = blocks([(0, 64)], 30_000, gpu)

    def step() -> None:
        engines.move_between("gather", way, table.records, ids, parts, gpu)
        engines.move_between("scatter", way, table.records, ids, parts, gpu)

    step()
    before = torch.cuda.memory_stats(gpu)["allocation.all.allocated"]
    for _ in range(3):
        step()
    assert torch.cuda.memory_stats(gpu)["allocation.all.allocated"] == before


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers", "simulation")
def test_a_gather_that_passes_ids_over_waits_for_no_stream(gpu):
    """Copies from pageable memory would wait for pending kernels there."""
    table, ids = Table(700, 192), ascending(700, 500)
    wanted = torch.where(torch.rand(500) < 0.6, ids, -1)
    parts = blocks(ADAM, 500, gpu)
    for _ in range(2):  # memory for the places is allocated by the first
        with simulated_gpu.counted() as counts:
            engines.move_between("gather", WAYS["staged"], table.records, wanted, parts, gpu)
    assert {trip.what for trip in counts.round_trips} <= {"synchronize an event"}


def test_rows_that_go_directly_record_only_the_event_of_their_fence(gpu, monkeypatch: pytest.MonkeyPatch):
    """The event that staged rows wait for is recorded for them alone."""
    table, ids, parts = Table(50, 64), ascending(50, 10).to(gpu), blocks([(0, 64)], 10, gpu)
    recorded, record = [], torch.cuda.Event.record

    def counted(event: torch.cuda.Event, *stream: torch.cuda.Stream) -> None:
        recorded.append(event)
        record(event, *stream)

    monkeypatch.setattr(torch.cuda.Event, "record", counted)
    for what in ("gather", "scatter", "gather"):
        engines.move_between(what, 1.0, table.records, ids, parts, gpu)
    assert len(recorded) == 3
