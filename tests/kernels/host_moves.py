"""Runs the gather and scatter kernels on the host in every shape that the launcher picks, against NumPy.

A separate program, because the address sanitizer must be loaded before Python: ``host_moves.py LIBRARY`` needs NumPy
alone and is run by test_cuda_on_host.py. Arrays are exactly as long as they must be, so that the sanitizer sees every
access outside them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import compact_reference as reference  # noqa: E402
from host_library import HostKernels  # noqa: E402
from host_lookups import check_lookups  # noqa: E402

# By its path: the package around it would bring torch, which the sanitizer would watch too.
_SHAPES = Path(importlib.util.find_spec("speedswap").origin).parent / "kernels" / "cuda" / "shapes.py"
_spec = importlib.util.spec_from_file_location("shapes", _SHAPES)
shapes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shapes)

POISON = 0xA5
ALIGNMENTS = (16, 8, 4, 2, 1)  # of addresses, strides and widths: words are of 16, 4 or 1 bytes


def misaligned(nbytes: int, offset: int) -> np.ndarray:
    """Return random bytes that start ``offset`` past a multiple of 16 and end with their memory."""
    view = np.empty(offset + nbytes, np.uint8)[offset:]
    assert view.ctypes.data % 16 == offset % 16
    view[:] = RNG.integers(0, 256, nbytes, np.uint8)
    return view


RNG = np.random.default_rng(3)


class Layout:
    """Records with some columns in them, and a block for each column."""

    def __init__(self, num_records: int, widths: list[int], offsets: list[int], stride: int, offset: int) -> None:
        self.widths, self.offsets, self.stride = widths, offsets, stride
        # The last record ends with its last column, as that of a table may end with its file.
        nbytes = (num_records - 1) * stride + max(o + w for o, w in zip(offsets, widths, strict=True))
        self.records = misaligned(nbytes, offset)
        self.num_records = num_records

    def blocks(self, num_rows: int, offset: int) -> list[np.ndarray]:
        blocks = [misaligned(num_rows * width, offset) for width in self.widths]
        for block in blocks:
            block[:] = POISON
        return [block.reshape(num_rows, width) for block, width in zip(blocks, self.widths, strict=True)]

    def column(self, column: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(
            self.records[self.offsets[column] :], (self.num_records, self.widths[column]), (self.stride, 1)
        )


def layouts() -> Iterator[tuple[Layout, int]]:
    # One column of every width up to two warps of words, in each alignment.
    for word in ALIGNMENTS:
        for words in [*range(1, 36), 63, 64, 65, 127, 128, 129, 200]:
            width = words * word
            yield Layout(9, [width], [0], width + word * (words % 3), 0 if word == 16 else word), 0
    # Several columns, with and without gaps, up to as many as a launch takes.
    for columns in range(2, shapes.COLUMNS_PER_LAUNCH + 1):
        for word in ALIGNMENTS:
            for gap in (0, word, 3 * word):
                widths = [word * int(RNG.integers(1, 40)) for _ in range(columns)]
                offsets = [sum(widths[:c]) + c * gap for c in range(columns)]
                yield Layout(9, widths, offsets, offsets[-1] + widths[-1] + gap, 0), 0 if word == 16 else word
    # Rows that start inside a 128-byte line, in every place of it.
    for inside in range(0, 128, 16):
        yield Layout(9, [1024], [inside], 1280, 0), 0


def check(kernels: HostKernels, layout: Layout, num_rows: int, block_offset: int, host: bool) -> tuple:
    ids = RNG.permutation(layout.num_records)[:num_rows]
    if num_rows > layout.num_records:
        ids = RNG.integers(0, layout.num_records, num_rows)
    gathered = layout.blocks(num_rows, block_offset)
    parts = [
        shapes.BlockPart(offset, width, block.ctypes.data, width)
        for offset, width, block in zip(layout.offsets, layout.widths, gathered, strict=True)
    ]
    address = layout.records.ctypes.data
    shape = shapes.launch_shape(address, layout.stride, num_rows, parts, multiprocessors=1, host=host)
    columns = shapes.columns_argument(parts, shape.word_bytes)
    words_per_record = layout.stride // shape.word_bytes
    before = layout.records.copy()

    def move(what: str) -> None:
        name = f"{what}_w{shape.word_bytes}"
        kernels.move(name, shape.grid, shape.threads_per_block, address, words_per_record, ids, columns, shape.lanes)

    move("gather")
    for column, block in enumerate(gathered):
        np.testing.assert_array_equal(block, layout.column(column)[ids], err_msg=f"gather {shape} {parts}")
    np.testing.assert_array_equal(layout.records, before, err_msg=f"gather wrote to records {shape} {parts}")
    if len(np.unique(ids)) == len(ids):
        for column, block in enumerate(gathered):
            block[:] = RNG.integers(0, 256, block.shape, np.uint8)
            expected = layout.column(column).copy()
            expected[ids] = block
            before_column = Layout.__new__(Layout)
            before_column.__dict__ = {**layout.__dict__, "records": before}
            before_column.column(column)[:] = expected
        move("scatter")
        np.testing.assert_array_equal(layout.records, before, err_msg=f"scatter {shape} {parts}")
    return shape.word_bytes, shape.lanes, min(shape.grid, 3)


# ---- columns that are converted -------------------------------------------------------------------------------------


class CompactLayout:
    """Records with some columns of one form, and others that are copied, and their expected contents."""

    def __init__(self, form: str, widths: list[int], gap: int, offset: int, copied: Sequence[int] = ()) -> None:
        self.form, self.widths, self.copied = form, widths, copied
        self.row_bytes = [4 + width if form == "int8" else 2 * width for width in widths]
        for column in copied:
            self.row_bytes[column] = 4 * widths[column]
        multiple = 16 if gap % 16 == 0 else 4 if form == "int8" else 2
        self.offsets, end = [], offset
        for nbytes in self.row_bytes:
            self.offsets.append(end)
            end = -(-(end + nbytes + gap) // multiple) * multiple
        self.stride = end

    def narrow(self, column: int, values: np.ndarray, ids: np.ndarray, key: int | None) -> np.ndarray:
        if column in self.copied:
            return values.view(np.uint8).copy()
        if self.form == "int8":
            scale, integers = reference.int8_rows(values)
            return np.concatenate([scale.view(np.uint8), integers.view(np.uint8)], axis=1)
        return reference.narrow(self.form, values, key, ids).view(np.uint8)

    def widen(self, column: int, stored: np.ndarray) -> np.ndarray:
        if column in self.copied:
            return stored.view(np.float32)
        if self.form == "int8":
            scale = np.ascontiguousarray(stored[:, :4]).view(np.float32)
            return scale * np.ascontiguousarray(stored[:, 4:]).view(np.int8).astype(np.float32)
        return reference.widen(self.form, np.ascontiguousarray(stored).view(np.uint16))


def check_compact(kernels: HostKernels, layout: CompactLayout, num_rows: int, host: bool) -> tuple:
    num_records = 2 * num_rows
    records = misaligned(num_records * layout.stride, 0)
    ids = RNG.permutation(num_records)[:num_rows]
    scale = np.float32(10.0) ** RNG.integers(-9, 6, (num_rows, 1)).astype(np.float32)
    blocks = [RNG.standard_normal((num_rows, width)).astype(np.float32) * scale for width in layout.widths]
    keys = [None if layout.form == "int8" or column % 2 else 2**63 + column for column in range(len(blocks))]
    parts = [
        shapes.CompactPart(offset, block.ctypes.data, block.shape[1], key, column in layout.copied)
        for column, (offset, block, key) in enumerate(zip(layout.offsets, blocks, keys, strict=True))
    ]
    if layout.copied:
        RNG.shuffle(parts)
    address = records.ctypes.data
    if layout.form == "int8":
        shape = shapes.int8_shape(num_rows, parts, multiprocessors=1, host=host)
        name = "int8"
    else:
        shape = shapes.convert_shape(address, layout.stride, num_rows, parts, multiprocessors=1, host=host)
        name = f"{layout.form}_w{shape.word_bytes}"
    columns = shapes.compact_columns_argument(parts)
    expected = records.copy().reshape(num_records, layout.stride)
    held = [layout.narrow(column, blocks[column], ids, key) for column, key in enumerate(keys)]
    for offset, rows in zip(layout.offsets, held, strict=True):
        expected[ids, offset : offset + rows.shape[1]] = rows
    kernels.convert(
        f"scatter_{name}", shape.grid, shape.threads_per_block, address, layout.stride, ids, columns, shape.lanes
    )
    np.testing.assert_array_equal(records.reshape(expected.shape), expected, err_msg=f"scatter_{name} {parts}")
    for column, (block, rows, key) in enumerate(zip(blocks, held, keys, strict=True)):
        if layout.form != "int8" and column not in layout.copied:
            grid = shapes.grid_of(num_rows * -(-block.shape[1] // shapes.PIECE), 1)
            rounded = block.copy()
            kernels.round(f"round_{layout.form}", grid, shape.threads_per_block, rounded, ids, key)
            widened = layout.widen(column, rows)
            np.testing.assert_array_equal(rounded.view(np.uint32), widened.view(np.uint32), err_msg=name)
        block[:] = np.nan
    kernels.convert(
        f"gather_{name}", shape.grid, shape.threads_per_block, address, layout.stride, ids, columns, shape.lanes
    )
    for column, (block, rows) in enumerate(zip(blocks, held, strict=True)):
        widened = layout.widen(column, rows)
        np.testing.assert_array_equal(block.view(np.uint32), widened.view(np.uint32), err_msg=name)
    np.testing.assert_array_equal(records.reshape(expected.shape), expected, err_msg=f"gather_{name} wrote to records")
    return layout.form, shape.word_bytes, shape.lanes


def check_conversions(kernels: HostKernels) -> set[tuple]:
    seen = set()
    for form in ("float16", "bfloat16", "int8"):
        for case, width in enumerate([*range(1, 20), 31, 32, 33, 64, 100, 128, 129, 264, 520]):
            for gap, offset in ((0, 0), (16, 16), (4, 4)):
                layout = CompactLayout(form, [width], gap, offset)
                seen.add(check_compact(kernels, layout, 1 + case % 9, bool(case % 3)))
        for count in range(2, shapes.COLUMNS_PER_LAUNCH + 1):
            for multiple in (1, 8):
                widths = [multiple * int(RNG.integers(1, 20)) for _ in range(count)]
                seen.add(check_compact(kernels, CompactLayout(form, widths, 0, 0), 7, False))
        seen.add(check_compact(kernels, CompactLayout(form, [24], 0, 0), 3000, False))
    for form in ("float16", "bfloat16"):
        for count in range(2, shapes.COLUMNS_PER_LAUNCH + 1):
            for gap, offset, widest in ((0, 0, 4), (16, 48, 20), (0, 16, 60)):
                copied = RNG.permutation(count)[: int(RNG.integers(1, count))].tolist()
                widths = [(4 if column in copied else 8) * int(RNG.integers(1, widest)) for column in range(count)]
                layout = CompactLayout(form, widths, gap, offset, copied)
                assert check_compact(kernels, layout, 9, bool(count % 2))[1] == 16
        check_compact(kernels, CompactLayout(form, [128, 128, 128], 0, 0, [0]), 2000, True)
    return seen


def main() -> None:
    kernels = HostKernels(Path(sys.argv[1]))
    check_lookups(kernels, shapes)
    conversions = check_conversions(kernels)
    for form in ("float16", "bfloat16"):
        assert {(form, word, lanes) for word in (2, 16) for lanes in (1, 2, 4, 8, 16, 32)} <= conversions
    assert {("int8", 1, lanes) for lanes in (1, 2, 4, 8, 16, 32)} <= conversions
    seen = set()
    for case, (layout, block_offset) in enumerate(layouts()):
        seen.add(check(kernels, layout, 1 + case % 9, block_offset, bool(case % 3)))
    # More rows than threads: each sub-warp walks several rows.
    for word in shapes.WORDS:
        for words in (1, 2, 3, 5, 9, 17, 33):
            layout = Layout(50, [words * word], [0], words * word, 0 if word == 16 else word)
            for num_rows, host in ((300, False), (5000, False), (40_000 // words, True)):
                seen.add(check(kernels, layout, num_rows, 0, host))
    wanted = {(word, lanes) for word in shapes.WORDS for lanes in (1, 2, 4, 8, 16, 32)}
    missing = wanted - {shape[:2] for shape in seen}
    assert not missing, missing
    assert {shape[2] for shape in seen} == {1, 2, 3}, seen
    print(f"{case + 1} layouts, {len(seen)} kinds of shape")


if __name__ == "__main__":
    main()
