"""The CUDA kernels' own arithmetic, run by the host: every shape the launcher picks, watched by the sanitizers."""

from __future__ import annotations

import functools
import mmap
import operator
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_build import build, compiler
from host_library import HERE, HostKernels, bags_argument
from hypothesis import given
from hypothesis import strategies as st

from speedswap.kernels.cuda.shapes import (
    BAGS,
    COLUMNS_PER_LAUNCH,
    BlockPart,
    CompactPart,
    columns_argument,
    compact_columns_argument,
    convert_shape,
    copy_layout,
    idle_argument,
    launch_shape,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: set CXX or install g++")


RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(build())


def test_one_row_of_two_columns_lands_where_the_columns_say(kernels: HostKernels):
    """A tiny case to read: record 1 of 2, four bytes of one column, two of the other."""
    records = np.arange(16, dtype=np.uint8)
    wide, narrow = np.zeros(4, np.uint8), np.zeros(2, np.uint8)
    parts = [BlockPart(0, 4, wide.ctypes.data, 4), BlockPart(6, 2, narrow.ctypes.data, 2)]
    columns = columns_argument(parts, 1)
    kernels.move("gather_w1", 1, 32, records.ctypes.data, 8, np.array([1]), columns, 4)
    assert wide.tolist() == [8, 9, 10, 11]
    assert narrow.tolist() == [14, 15]


@pytest.mark.parametrize("word", [16, 4, 1])
@pytest.mark.parametrize("packed, placed", [(True, False), (False, True), (True, True)])
def test_records_in_order_and_rows_elsewhere(kernels: HostKernels, word: int, packed: bool, placed: bool):
    """Packed records are taken one after the other, whatever the ids say; rows go to their places in larger blocks."""
    generator = np.random.default_rng(word)
    num_rows, room, widths = 70, 100, [5 * word, 40 * word]
    stride = sum(widths)
    records = generator.integers(0, 256, (num_rows if packed else 200, stride), np.uint8)
    ids = np.full(num_rows, -(10**6)) if packed else generator.permutation(200)[:num_rows]
    places = generator.permutation(room)[:num_rows] if placed else None
    taken, there = slice(None) if packed else ids, places if placed else slice(num_rows)
    blocks = [np.zeros((room, width), np.uint8) for width in widths]
    parts = [
        BlockPart(offset, width, block.ctypes.data, width)
        for offset, width, block in zip((0, widths[0]), widths, blocks, strict=True)
    ]
    columns = columns_argument(parts, word)
    arguments = (2, 64, records.ctypes.data, stride // word, ids, columns, 32, packed, places)
    kernels.move(f"gather_w{word}", *arguments)
    wide = np.zeros((room, stride), np.uint8)
    wide[there] = records[taken]
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), wide)
    for block in blocks:
        block[:] = generator.integers(0, 256, block.shape, np.uint8)
    expected = records.copy()
    expected[taken] = np.concatenate(blocks, axis=1)[there]
    kernels.move(f"scatter_w{word}", *arguments)
    np.testing.assert_array_equal(records, expected)


def test_negative_ids_are_skipped(kernels: HostKernels):
    """Neither their rows nor any record is touched."""
    records = RNG.integers(0, 256, (40, 32), np.uint8)
    ids = np.where(np.arange(20) % 3, RNG.permutation(40)[:20], -1)
    block = np.full((20, 32), 9, np.uint8)
    columns = columns_argument([BlockPart(0, 32, block.ctypes.data, 32)], 16)
    arguments = (1, 64, records.ctypes.data, 2, ids, columns, 2)
    expected = np.where((ids < 0)[:, None], np.uint8(9), records[ids])
    kernels.move("gather_w16", *arguments)
    np.testing.assert_array_equal(block, expected)
    block[:] = RNG.integers(0, 256, block.shape, np.uint8)
    expected = records.copy()
    expected[ids[ids >= 0]] = block[ids >= 0]
    kernels.move("scatter_w16", *arguments)
    np.testing.assert_array_equal(records, expected)


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("width", [16, 13])
def test_compact_records_in_order_and_rows_elsewhere(kernels: HostKernels, form: str, width: int):
    """The same bytes as in the records' own order; what stochastic rounding draws depends on the ids all the same."""
    generator = np.random.default_rng(width)
    num_rows, room = 50, 80
    stride = 64
    key = None if form == "int8" else 77
    name = form if form == "int8" else f"{form}_w{16 if width % 8 == 0 else 2}"
    ids, places = (generator.permutation(room)[:num_rows] for _ in range(2))
    rows = generator.standard_normal((num_rows, width)).astype(np.float32)
    block = np.zeros((room, width), np.float32)
    block[places] = rows
    records, packed = np.zeros((room, stride), np.uint8), np.zeros((num_rows, stride), np.uint8)
    plain = compact_columns_argument([CompactPart(0, rows.ctypes.data, width, key)])
    placed = compact_columns_argument([CompactPart(0, block.ctypes.data, width, key)])
    kernels.convert(f"scatter_{name}", 2, 64, records.ctypes.data, stride, ids, plain, 2)
    kernels.convert(f"scatter_{name}", 2, 64, packed.ctypes.data, stride, ids, placed, 2, True, places)
    np.testing.assert_array_equal(packed, records[ids])
    assert packed.any()
    kernels.convert(f"gather_{name}", 2, 64, records.ctypes.data, stride, ids, plain, 2)
    block[:] = np.nan
    nowhere = np.full(num_rows, -(10**6))
    kernels.convert(f"gather_{name}", 2, 64, packed.ctypes.data, stride, nowhere, placed, 2, True, places)
    np.testing.assert_array_equal(block[places], rows)
    assert np.isnan(block).sum() == (room - num_rows) * width
    before = records.copy()
    rows[:] = np.nan
    kernels.convert(f"gather_{name}", 2, 64, records.ctypes.data, stride, nowhere, plain, 2)
    kernels.convert(f"scatter_{name}", 2, 64, records.ctypes.data, stride, nowhere, plain, 2)
    assert np.isnan(rows).all()
    np.testing.assert_array_equal(records, before)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_column_that_is_copied_and_one_that_is_converted_take_one_launch(kernels: HostKernels, lanes: int):
    """A tiny case to read: the second of two records, four floats as they are and then eight as bfloat16."""
    records = np.zeros((2, 32), np.uint8)
    plain, compact = np.arange(4, dtype=np.float32)[None] + 0.1, np.arange(8, dtype=np.float32)[None]
    parts = [CompactPart(16, compact.ctypes.data, 8, None), CompactPart(0, plain.ctypes.data, 4, None, True)]
    arguments = (1, 4, records.ctypes.data, 32, np.array([1]), compact_columns_argument(parts), lanes)
    kernels.convert("scatter_bfloat16_w16", *arguments)
    assert not records[0].any()
    assert records[1, :16].view(np.float32).tolist() == plain[0].tolist()
    assert records[1, 16:].view(np.uint16).tolist() == (compact[0].view(np.uint32) >> 16).tolist()
    expected = plain.copy(), compact.copy()
    plain[:], compact[:] = np.nan, np.nan
    kernels.convert("gather_bfloat16_w16", *arguments)
    assert np.array_equal(plain, expected[0])
    assert np.array_equal(compact, expected[1])


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return build(sanitize=True)


def run_sanitized(program: str, library: Path) -> str:
    """Return what a program prints that runs kernels under the address and undefined-behaviour sanitizers."""
    runtime = subprocess.run(
        [str(compiler()), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(library)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_shape_moves_every_byte_and_no_other(sanitized: Path):
    """All layouts of host_moves.py."""
    assert "layouts" in run_sanitized("host_moves.py", sanitized)


def test_bags_and_their_gradients_are_numpys_to_the_bit_in_every_launch(sanitized: Path):
    """All cases of host_bags.py."""
    assert "360 cases of bags" in run_sanitized("host_bags.py", sanitized)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("launch", [(1, 1), (3, 32), (2, 1024)])
def test_rows_take_the_steps_that_they_have_missed_in_every_launch(kernels: HostKernels, bits: int, launch):
    """A momentum that fades by half in a step, and moves the weight by itself over the root of the squares and eps."""
    rng, (rows, width, steps) = np.random.default_rng(1), (13, 5, 3)
    weight, momentum, squares = columns = [rng.random((rows, width)).astype(f"f{bits // 8}") for _ in range(3)]
    before = [each.copy() for each in columns]
    last = rng.integers(6, 11, rows).astype(np.int32)  # of steps 8, 9 and 10; some rows lack earlier ones too
    numbers = np.zeros((steps, 9 + 33))
    for step in range(steps):
        numbers[step, [0, 4, 8]] = 1, 0.5 ** (2 - step), 1
        numbers[step, [9, -1]] = 1 - 0.5 ** (2 - step), 0.25
    argument = idle_argument(
        [each.ctypes.data for each in columns], last=last.ctypes.data, steps=numbers.ctypes.data, num_rows=rows,
        width=width, now=2, before=8, bends=1,
    )  # fmt: skip
    kernels.idle(bits, *launch, argument)
    left = (0.5 ** (2 - np.clip(last - 8, 0, 2)))[:, None]
    np.testing.assert_allclose(momentum, before[1] * left, rtol=1e-6)
    np.testing.assert_allclose(weight, before[0] - before[1] * (1 - left) / (np.sqrt(before[2]) + 0.25), rtol=1e-5)
    assert np.array_equal(squares, before[2])


# ---- more than 2^32 of everything ------------------------------------------------------------------------------------

FAR = 2**32 + 6


def sparse(count: int, dtype: type = np.int64) -> np.ndarray:
    """Return zeros of which only the pages that are written to take memory."""
    nbytes = count * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # Linux's, which mmap names from Python 3.13 on
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype)


def run_far(kernels: HostKernels, name: str, thread: int, arrays: dict[str, np.ndarray], **numbers: int) -> None:
    """Run one thread of a launch with more threads than pieces of work."""
    argument = bags_argument(BAGS, **{each: array.ctypes.data for each, array in arrays.items()}, **numbers)
    kernels.bags(name, 2**31 - 1, 1024, argument, thread)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse memory")
def test_bags_rows_entries_and_samples_may_be_more_than_32_bits_count(kernels: HostKernels):
    """The last bag of two features, of two entries, all in the last places of arrays of more than 2^32 items."""
    samples, entries, width = FAR, FAR + 2, 4
    arrays = {
        "rows": sparse(FAR * width, np.float32), "local": sparse(entries), "offsets": sparse(2 * samples + 1),
        "out": sparse(2 * samples * width, np.float32), "places": sparse(entries),
    }  # fmt: skip
    arrays["rows"][-2 * width :] = np.arange(2 * width)
    arrays["local"][-2:] = FAR - 2, FAR - 1
    arrays["offsets"][-2:] = entries - 2, entries
    numbers = {"features": 2, "width": width, "entries": entries}
    run_far(kernels, "pool_float32", 2 * samples - 1, arrays, **numbers, num_bags=2 * samples, samples=samples, whole=1)
    assert arrays["out"][-2 * width :].tolist() == [0, 0, 0, 0, 4, 6, 8, 10]
    assert arrays["places"][-3:].tolist() == [0, *[2 * (samples - 1) + 1] * 2]

    arrays["grad"] = arrays["out"]
    arrays["out"] = sparse(entries, np.float32)
    run_far(kernels, "dot_bags_float32", entries - 1, arrays, **numbers, grad_stride=2 * width, whole=1)
    assert arrays["out"][-2:].tolist() == [0, 4 * 4 + 5 * 6 + 6 * 8 + 7 * 10]


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse memory")
@pytest.mark.parametrize("placed", [False, True])
def test_gradients_may_be_of_more_entries_than_32_bits_count(kernels: HostKernels, placed: bool):
    """Of the last row, which has the last 100 entries: in two chunks, in the last two windows."""
    windows, width = FAR // 64 + 2, 4
    first = (windows - 2) * 64
    entries, row = first + 100, FAR
    arrays = {
        "order": sparse(entries), "local": sparse(entries), "starts": sparse(row + 2),
        "grad": sparse(entries * width, np.float32), "partial": sparse(2 * windows * width, np.float32),
        "out": sparse((row + 1) * width, np.float32),
    }  # fmt: skip
    mine = np.arange(first, entries)
    arrays["order"][first:], arrays["local"][first:] = mine, row
    arrays["grad"][first * width :] = np.arange(100 * width)
    if placed:
        arrays["places"] = sparse(entries)
        arrays["places"][first:] = mine[::-1]
    numbers = {"features": 1, "width": width, "entries": entries, "num_rows": row + 1, "grad_stride": width, "whole": 1}
    for which in (row, row + 1):
        run_far(kernels, "find_starts", which, arrays, **numbers, row_bytes=4 * width)
    assert arrays["starts"][-2:].tolist() == [first, entries]
    for window in (windows - 2, windows - 1):
        run_far(kernels, "sum_chunks_float32", window, arrays, **numbers)
    run_far(kernels, "join_chunks_float32", windows - 1, arrays, **numbers)
    expected = np.arange(100 * width, dtype=np.float32).reshape(100, width).sum(0)  # exact
    assert arrays["out"][-2 * width :].tolist() == [0] * width + expected.tolist()


@pytest.mark.parametrize("grid, block", [(1, 1), (1, 32), (3, 64), (2, 1024)])
@pytest.mark.parametrize("row_bytes", [16, 64, 512])
def test_plain_copies_copy_every_word_once(kernels: HostKernels, grid: int, block: int, row_bytes: int):
    """The bandwidth ceiling is measured by kernels that are correct themselves."""
    table = RNG.integers(0, 256, (50, row_bytes), np.uint8)
    copy = np.zeros_like(table)
    kernels.bandwidth_copy(grid, block, table[:41], copy)
    np.testing.assert_array_equal(copy[:41], table[:41])
    assert not copy[41:].any()
    rows = RNG.permutation(50)[:33]
    values = np.zeros((33, row_bytes), np.uint8)
    kernels.bandwidth_rows(True, grid, block, table, rows, values)
    np.testing.assert_array_equal(values, table[rows])
    expected = table.copy()
    expected[rows] = values = RNG.integers(0, 256, values.shape, np.uint8)
    kernels.bandwidth_rows(False, grid, block, table, rows, values)
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("grid, block", [(1, 1), (1, 32), (3, 64), (7, 256)])
@pytest.mark.parametrize("num_rows, width", [(1, 1), (5, 3), (4, 8), (33, 7), (2, 130)])
@pytest.mark.parametrize("item", ["f32", "f64"])
def test_fill_writes_every_item_in_any_shape(
    kernels: HostKernels, grid: int, block: int, num_rows: int, width: int, item: str
):
    """Any grid gives what one thread gives, and nothing is left as it was."""
    dtype = {"f32": np.float32, "f64": np.float64}[item]
    once, again = np.full((num_rows, width), np.nan, dtype), np.full((num_rows, width), np.nan, dtype)
    kernels.fill(f"fill_normal_{item}", 1, 1, once, 5, 0.0, 1.0, 1, 2)
    kernels.fill(f"fill_normal_{item}", grid, block, again, 5, 0.0, 1.0, 1, 2)
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(again, once)


@given(
    records=st.integers(0, 2**20),
    stride=st.integers(1, 9000),
    num_rows=st.integers(1, 2**40),
    columns=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 9000), st.integers(0, 2**20)),
        min_size=1,
        max_size=COLUMNS_PER_LAUNCH,
    ),
    multiprocessors=st.integers(1, 200),
    host=st.booleans(),
)
def test_launch_shape_keeps_its_promises(records, stride, num_rows, columns, multiprocessors, host):
    parts = [BlockPart(offset, width, block, width) for offset, width, block in columns]
    shape = launch_shape(records, stride, num_rows, parts, multiprocessors=multiprocessors, host=host)
    numbers = [records, stride, *(number for part in parts for number in part)]
    assert all(number % shape.word_bytes == 0 for number in numbers)
    wider = {16: None, 4: 16, 1: 4}[shape.word_bytes]
    assert wider is None or any(number % wider for number in numbers)
    words = sum(part.width for part in parts) // shape.word_bytes
    assert shape.lanes in (1, 2, 4, 8, 16, 32)
    assert shape.lanes >= min(words, 32)
    assert shape.lanes == 1 or shape.lanes < 2 * words
    assert shape.threads_per_block % shape.lanes == 0
    assert shape.threads_per_block % 32 == 0
    limit = (1024 if host else 2048) * multiprocessors
    assert (
        min(num_rows * shape.lanes, limit)
        <= shape.grid * shape.threads_per_block
        <= max(limit, shape.threads_per_block)
    )
    assert not host or shape.grid <= multiprocessors
    assert shape.grid < 2**31


@pytest.mark.parametrize("unit", [16, 4, 1])
@pytest.mark.parametrize("count", [1, 3, COLUMNS_PER_LAUNCH])
def test_a_layout_is_the_argument_without_addresses(count: int, unit: int):
    records, stride = 1 << 20, 4096 * unit
    parts = [BlockPart(32 * unit * i, unit * (i + 1), unit * (100 + i), unit * (i + 1)) for i in range(count)]
    blocks = [part.block for part in parts]
    word_bytes, lanes, layout = copy_layout(
        stride, tuple(part[:2] for part in parts), functools.reduce(operator.or_, blocks, records) % 16
    )
    shape = launch_shape(records, stride, 10, parts, multiprocessors=132, host=False)
    assert (word_bytes, lanes) == shape[:2]
    assert word_bytes == unit
    assert layout == columns_argument([part._replace(block=0) for part in parts], word_bytes)


@pytest.mark.parametrize("aligned, word", [(8, 4), (4, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("which", range(6))
def test_every_number_limits_the_word(which: int, aligned: int, word: int):
    """One address, stride, offset or width that is a multiple of less is enough."""
    numbers = [4096, 512, 64, 128, 8192, 256]
    numbers[which] += aligned
    records, stride, offset, width, block, block_stride = numbers
    parts = [BlockPart(0, 64, 1 << 20, 64), BlockPart(offset, width, block, block_stride)]
    assert launch_shape(records, stride, 10, parts, multiprocessors=132, host=False).word_bytes == word
    assert launch_shape(4096, 512, 10, parts[:1], multiprocessors=132, host=False).word_bytes == 16


@given(
    records=st.integers(0, 2**20),
    stride=st.integers(2, 9000),
    num_rows=st.integers(1, 2**40),
    columns=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 2**20), st.integers(1, 3000), st.just(None), st.booleans()),
        min_size=1,
        max_size=COLUMNS_PER_LAUNCH,
    ),
    multiprocessors=st.integers(1, 200),
    host=st.booleans(),
)
def test_convert_shape_keeps_its_promises(records, stride, num_rows, columns, multiprocessors, host):
    parts = [CompactPart(*column) for column in columns]
    shape = convert_shape(records, stride, num_rows, parts, multiprocessors=multiprocessors, host=host)
    whole = all(part.width % (4 if part.copied else 8) == 0 for part in parts)
    aligned = all(number % 16 == 0 for part in parts for number in (records, stride, part.offset, part.block))
    assert shape.word_bytes == (16 if whole and aligned else 2)
    argument = compact_columns_argument(parts)
    pieces = int.from_bytes(argument[8:16], "little")
    assert pieces == sum(-(-part.width // (4 if part.copied else 8)) for part in parts)
    assert min(pieces, 32) <= shape.lanes < 2 * pieces + 1
    assert shape.threads_per_block % shape.lanes == 0
    limit = (1024 if host else 2048) * multiprocessors
    assert (
        min(num_rows * shape.lanes, limit)
        <= shape.grid * shape.threads_per_block
        <= max(limit, shape.threads_per_block)
    )


def test_more_than_a_warp_of_words_takes_whole_warps():
    part = BlockPart(0, 512, 4096, 512)
    assert launch_shape(0, 512, 1000, [part], multiprocessors=132, host=False) == (16, 32, 125, 256)
    assert launch_shape(0, 512, 10**9, [part], multiprocessors=132, host=False).grid == 132 * 8
    assert launch_shape(0, 512, 10**9, [part], multiprocessors=32, host=True) == (16, 32, 32, 1024)
    assert launch_shape(0, 516, 1000, [part], multiprocessors=132, host=False).word_bytes == 4
