"""Every way between host memory and a GPU, against NumPy; on a GPU, or on the simulated one."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
import simulated_gpu
import torch
from engine_tables import WAYS, Table, ascending, blocks

from speedswap.kernels import Part, Stored, gather_records, rounding_key, scatter_records
from speedswap.kernels.cuda import engines, moves
from speedswap.kernels.records import What

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
@pytest.mark.parametrize("stored", [None, Stored(torch.bfloat16), Stored(torch.bfloat16, rounding_key(1, 2, 3))])
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_a_scatter_passes_negative_ids_over(gpu, way: float, ids_on: str, stored: Stored | None):
    """Their records stay unchanged; the others are rounded by the random bits of these ids."""
    table, other, ids = Table(700, 80), Table(700, 80), ascending(700, 500)
    kept, values = torch.rand(500) < 0.6, torch.randn(500, 16)
    scatter_records(other.records, ids[kept], [Part(8, values[kept], stored)])
    parts = [Part(8, values.to(gpu), stored)]
    engines.move_between("scatter", way, table.records, torch.where(kept, ids, -1).to(ids_on), parts, gpu)
    np.testing.assert_array_equal(table.now(), other.now())


@pytest.mark.cuda_kernels
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("what", ["gather", "scatter"])
def test_nothing_moves_where_every_id_is_negative(gpu, way: float, what: What):
    table, parts = Table(5, 64), blocks([(0, 64)], 3, gpu)
    engines.move_between(what, way, table.records, torch.full((3,), -1, device=gpu), parts, gpu)
    assert not parts[0].block.any()
    np.testing.assert_array_equal(table.now(), table.expected)


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


HALF, SHORT, BYTE = torch.bfloat16, torch.float16, torch.int8

# Offsets, widths and stored types of columns, in records of 512 bytes; and the launches that a move takes.
MIXED = {
    "Adam": ([(0, 32, None), (128, 32, HALF), (192, 32, HALF)], 1),
    "any order": ([(64, 24, HALF), (304, 4, None), (112, 8, SHORT), (0, 16, None)], 2),
    "eight": ([(64 * c, 8, HALF if c % 3 else None) for c in range(8)], 1),
    "nine": ([(48 * c, 8, HALF if c else None) for c in range(9)], 2),
    "an offset": ([(4, 12, None), (64, 32, HALF)], 2),
    "a width": ([(0, 6, None), (64, 32, HALF)], 2),
    "half a piece": ([(0, 16, None), (64, 12, HALF)], 2),
    "int8": ([(0, 16, None), (64, 28, BYTE)], 2),
}


@pytest.mark.cuda_kernels
@pytest.mark.parametrize(("columns", "launches"), MIXED.values(), ids=MIXED.keys())
@pytest.mark.usefixtures("small_buffers")
def test_columns_copied_and_converted_take_one_launch_where_words_of_16_bytes_fit(gpu, way: float, columns, launches):
    """The bytes are those of the CPU loops."""
    table, other, ids = Table(400, 512), Table(400, 512), ascending(400, 300)
    stored = [None if dtype is None else Stored(dtype, None if dtype is BYTE else 7 + o) for o, _, dtype in columns]
    values = [torch.randn(300, width) for _, width, _ in columns]
    described = [*zip((offset for offset, _, _ in columns), values, stored, strict=True)]
    scatter_records(other.records, ids, [Part(*each) for each in described])
    near, read = ids.to(gpu), [Part(at, torch.zeros_like(block, device=gpu), held) for at, block, held in described]
    written = [Part(offset, block.to(gpu), held) for offset, block, held in described]
    with simulated_gpu.counted() if simulated_gpu.is_on() else contextlib.nullcontext() as counts:
        engines.move_between("scatter", way, table.records, near, written, gpu)
        engines.move_between("gather", way, table.records, near, read, gpu)
    np.testing.assert_array_equal(table.now(), other.now())
    expected = [Part(offset, torch.zeros_like(block), held) for offset, block, held in described]
    gather_records(other.records, ids, expected)
    for ours, theirs in zip(read, expected, strict=True):
        assert torch.equal(ours.block.cpu(), theirs.block)
    if counts is not None and way == WAYS["zero_copy"]:
        assert counts.launches == 2 * launches


@pytest.mark.cuda_kernels
def test_blocks_limit_what_one_launch_moves(gpu):
    """A copied column whose block begins between words of 16 bytes takes a launch of its own."""
    table, ids = Table(40, 512), ascending(40, 30).to(gpu)
    halves = Part(64, torch.randn(30, 8, device=gpu), Stored(HALF))
    for begin in (0, 1):
        block = torch.randn(30 * 16 + begin, device=gpu)[begin:].view(30, 16)
        launches = [*moves.plan("scatter", table.records, 30, [Part(0, block), halves], 4)]
        assert [each.kernel for each in launches] == ["scatter_bfloat16_w16", "scatter_w4"][: 1 + begin]
        engines.move_between("scatter", WAYS["zero_copy"], table.records, ids, [Part(0, block), halves], gpu)
        np.testing.assert_array_equal(table.now()[ids.cpu(), :64], block.cpu().numpy().view(np.uint8))


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
