"""The shape of a kernel launch: word, threads and grid. Pure arithmetic without torch, so that tests can sweep it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

# As in csrc/rows.cuh and csrc/bags.cuh.
COLUMNS_PER_LAUNCH = 8
CHUNK = 64
PIECE = 8
WORDS = (16, 4, 1)

THREADS_PER_BLOCK = 256
# Enough to fill any GPU: 2048 for each of its multiprocessors.
THREADS_PER_MULTIPROCESSOR = 2048
# Moves of host memory wait for the bus, and must leave the GPU to others. At most two thread blocks of the greatest
# size fit on a multiprocessor, and a grid takes no more multiprocessors than it has thread blocks.
HOST_THREADS_PER_BLOCK = 1024

# Numbers of 8 bytes in front of the columns of a move: their number, their words or pieces, and the cache of hot rows.
_BEFORE_COLUMNS = 7
NOT_HOT = (0, 0, 0, 0, 0)
_COLUMN_NUMBERS, _COMPACT_NUMBERS = 4, 6  # per column, and the third of them is the block's address
_NO_BAGS = dict.fromkeys(
    "rows local offsets factors counts is_mean out grad places scales taken order starts partial "
    "entries num_bags samples features num_rows width row_bytes grad_stride shift means whole".split(),
    0,
)

# As in csrc/rows.cuh.
MOST_IDLE_COLUMNS = 4
_NO_IDLE = dict.fromkeys("last steps num_columns num_rows width now before bends".split(), 0)

# As in csrc/lookups.cuh.
KEYS_PER_THREAD = 16
BATCHES_PER_LAUNCH = 8
_BATCH_NUMBERS = 3


class BlockPart(NamedTuple):
    """A column in bytes: offset in a record, width, address of its block, and distance between the block's rows."""

    offset: int
    width: int
    block: int
    block_stride: int


class CompactPart(NamedTuple):
    """A converted column: offset in a record, address of its block, values per row, and key of stochastic rounding."""

    offset: int
    block: int
    width: int
    key: int | None


class Shape(NamedTuple):
    """Launch parameters of a move: bytes per word, threads per row, thread blocks, and threads per block."""

    word_bytes: int
    lanes: int
    grid: int
    threads_per_block: int


def launch_shape(
    records: int, stride: int, num_rows: int, parts: Sequence[BlockPart], *, multiprocessors: int, host: bool
) -> Shape:
    """Choose the shape in which ``num_rows`` rows are gathered or scattered.

    Args:
        records: address of the first record.
        stride: bytes from a record to the next.
        num_rows: at least 1.
        parts: 1 to 8 columns, each at least a byte wide.
        multiprocessors: the most of the GPU's multiprocessors that the move may take.
        host: True if the records are in host memory.

    Returns:
        The largest word that divides every address, stride, offset and width; a power of two of lanes, up to a warp,
        that covers a row's words; and a grid that covers the rows, as far as the limits above allow.
    """
    everything, width = records | stride, 0
    for part in parts:
        everything |= part.offset | part.width | part.block | part.block_stride
        width += part.width
    word_bytes = next(word for word in WORDS if everything % word == 0)
    words = width // word_bytes
    lanes = min(32, 1 << (words - 1).bit_length())
    return Shape(word_bytes, lanes, *_grid_and_threads(num_rows * lanes, multiprocessors, host))


def convert_shape(
    records: int, stride: int, num_rows: int, parts: Sequence[CompactPart], *, multiprocessors: int, host: bool
) -> Shape:
    """Choose the shape in which columns of 2-byte values are converted; arguments as for :func:`launch_shape`.

    Returns:
        Words of 16 bytes where every piece of 8 values is whole and aligned, else of 2; and lanes that cover a row's
        pieces.
    """
    everything = records | stride
    for part in parts:
        everything |= part.offset | 2 * part.width | part.block
    pieces = sum(_pieces(part) for part in parts)
    lanes = min(32, 1 << (pieces - 1).bit_length())
    return Shape(16 if everything % 16 == 0 else 2, lanes, *_grid_and_threads(num_rows * lanes, multiprocessors, host))


def int8_shape(num_rows: int, parts: Sequence[CompactPart], *, multiprocessors: int, host: bool) -> Shape:
    """Choose the shape in which columns of int8 with a scale are converted: lanes that cover the widest row."""
    lanes = min(32, 1 << (max(part.width for part in parts) - 1).bit_length())
    return Shape(1, lanes, *_grid_and_threads(num_rows * lanes, multiprocessors, host))


def group_grid(num_rows: int, width: int, items_per_group: int, *, multiprocessors: int) -> int:
    """Return the grid for ``num_rows`` rows of ``width`` items: one thread per group of items, up to the limit."""
    groups = num_rows * -(-width // items_per_group)
    return _grid(groups, THREADS_PER_MULTIPROCESSOR * multiprocessors)


def _grid_and_threads(threads: int, multiprocessors: int, host: bool) -> tuple[int, int]:
    if host:
        return min(-(-threads // HOST_THREADS_PER_BLOCK), multiprocessors), HOST_THREADS_PER_BLOCK
    return _grid(threads, THREADS_PER_MULTIPROCESSOR * multiprocessors), THREADS_PER_BLOCK


def _grid(threads: int, limit: int) -> int:
    return -(-min(threads, limit) // THREADS_PER_BLOCK)


def columns_argument(parts: Sequence[BlockPart], word_bytes: int, hot: Sequence[int] = NOT_HOT) -> bytes:
    """Return the kernels' ``Columns``, in words; ``hot`` is their ``Hot``."""
    numbers: list[int] = []
    first = 0
    for offset, width, block, block_stride in parts:
        numbers += first, offset // word_bytes, block, block_stride // word_bytes
        first += width // word_bytes
    return _structure("q", [len(parts), first, *hot], numbers, _COLUMN_NUMBERS, COLUMNS_PER_LAUNCH)


def compact_columns_argument(parts: Sequence[CompactPart], hot: Sequence[int] = NOT_HOT) -> bytes:
    """Return the kernels' ``CompactColumns``; ``hot`` is their ``Hot``."""
    numbers: list[int] = []
    first = 0
    for part in parts:
        numbers += first, part.offset, part.block, part.width, part.key is not None, part.key or 0
        first += _pieces(part)
    return _structure("Q", [len(parts), first, *hot], numbers, _COMPACT_NUMBERS, COLUMNS_PER_LAUNCH)


def batches_argument(batches: Sequence[tuple[int, int, int]]) -> bytes:
    """Return the kernels' ``Batches``: of each the address of its rows, their number, and where their places go."""
    return _structure("q", [len(batches)], [*chain(*batches)], _BATCH_NUMBERS, BATCHES_PER_LAUNCH)


def bags_argument(**values: int) -> bytes:
    """Return the kernels' ``Bags``; what is not given is 0."""
    values["shift"] = (values["features"] - 1).bit_length()
    return struct.pack(f"{len(_NO_BAGS)}q", *{**_NO_BAGS, **values}.values())


def idle_argument(columns: Sequence[int], **values: int) -> bytes:
    """Return the kernels' ``IdleBlock``; ``columns`` are addresses."""
    numbers = {**_NO_IDLE, "num_columns": len(columns), **values}
    addresses = [*columns, *[0] * (MOST_IDLE_COLUMNS - len(columns))]
    return struct.pack(f"{MOST_IDLE_COLUMNS + len(_NO_IDLE)}q", *addresses, *numbers.values())


def _structure(kind: str, before: Sequence[int], numbers: Sequence[int], per_item: int, most: int) -> bytes:
    """Return numbers of 8 bytes, and zeros for as many more items as there may be."""
    given = struct.pack(f"{len(before) + len(numbers)}{kind}", *before, *numbers)
    return given.ljust(8 * (len(before) + per_item * most), b"\0")


def block_addresses(count: int, *, compact: bool) -> range:
    """Return the places of the addresses of ``count`` blocks, in bytes, within an argument of either kind."""
    per_column = _COMPACT_NUMBERS if compact else _COLUMN_NUMBERS
    first = _BEFORE_COLUMNS + 2
    return range(8 * first, 8 * (first + count * per_column), 8 * per_column)


def _pieces(part: CompactPart) -> int:
    return -(-part.width // PIECE)
