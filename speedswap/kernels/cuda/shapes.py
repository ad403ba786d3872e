"""The shape of a kernel launch: word, threads and grid. Pure arithmetic without torch, so that tests can sweep it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

# As in csrc/rows.cuh and csrc/bags.cuh.
COLUMNS_PER_LAUNCH = 8
CHUNK = 64
PIECE = 8
_COPIED = 2  # the rounding of a column that is copied
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
_COLUMNS = struct.Struct(f"{_BEFORE_COLUMNS + _COLUMN_NUMBERS * COLUMNS_PER_LAUNCH}q")
_COMPACT_COLUMNS = struct.Struct(f"{_BEFORE_COLUMNS + _COMPACT_NUMBERS * COLUMNS_PER_LAUNCH}Q")
BAGS = tuple(
    "rows local offsets factors counts is_mean out grad places scales taken order starts partial "
    "entries num_bags samples features num_rows width row_bytes grad_stride shift means whole".split()
)

# As in csrc/rows.cuh.
MOST_IDLE_COLUMNS = 4
_NO_IDLE = dict.fromkeys("last steps num_columns num_rows width now before bends".split(), 0)

# As in csrc/lookups.cuh.
KEYS_PER_THREAD = 16
RANGES = 1024
BATCHES_PER_LAUNCH = 8
_BATCHES = struct.Struct(f"{1 + 3 * BATCHES_PER_LAUNCH}q")


class BlockPart(NamedTuple):
    """A column in bytes: offset in a record, width, address of its block, and distance between the block's rows."""

    offset: int
    width: int
    block: int
    block_stride: int


BlockNumbers = tuple[int, int, int, int]  # those of a BlockPart


class CompactPart(NamedTuple):
    """A column of a converting move: offset in a record, address of its block, and 4-byte values per row of that.

    ``key`` is that of stochastic rounding; ``copied`` means that records hold the values as they are.
    """

    offset: int
    block: int
    width: int
    key: int | None
    copied: bool = False


class Shape(NamedTuple):
    """Launch parameters of a move: bytes per word, threads per row, thread blocks, and threads per block."""

    word_bytes: int
    lanes: int
    grid: int
    threads_per_block: int


def launch_shape(
    records: int, stride: int, num_rows: int, parts: Sequence[BlockNumbers], *, multiprocessors: int, host: bool
) -> Shape:
    """Choose the shape in which ``num_rows`` rows are gathered or scattered.

    Args:
        records: address of the first record.
        stride: bytes from a record to the next.
        num_rows: at least 1.
        parts: 1 to 8 columns, each at least a byte wide, as :class:`BlockPart` describes them.
        multiprocessors: the most of the GPU's multiprocessors that the move may take.
        host: True if the records are in host memory.

    Returns:
        The largest word that divides every address, stride, offset and width; a power of two of lanes, up to a warp,
        that covers a row's words; and a grid that covers the rows, as far as the limits above allow.
    """
    everything, width = records | stride, 0
    for offset, part_width, block, block_stride in parts:
        everything |= offset | part_width | block | block_stride
        width += part_width
    word_bytes = 16 if everything % 16 == 0 else 4 if everything % 4 == 0 else 1  # of WORDS
    words = width // word_bytes
    lanes = 32 if words > 16 else 1 << (words - 1).bit_length()
    return Shape(word_bytes, lanes, *grid_and_threads(num_rows * lanes, multiprocessors, host))


def convert_shape(
    records: int, stride: int, num_rows: int, parts: Sequence[CompactPart], *, multiprocessors: int, host: bool
) -> Shape:
    """Choose the shape in which columns of 2-byte values are converted; arguments as for :func:`launch_shape`.

    Returns:
        Words of 16 bytes where every piece is whole and aligned, else of 2, in which no column is copied; and lanes
        that cover a row's pieces.
    """
    everything = records | stride
    for part in parts:
        everything |= part.offset | (4 if part.copied else 2) * part.width | part.block
    pieces = sum(_pieces(part) for part in parts)
    lanes = min(32, 1 << (pieces - 1).bit_length())
    return Shape(16 if everything % 16 == 0 else 2, lanes, *grid_and_threads(num_rows * lanes, multiprocessors, host))


def int8_shape(num_rows: int, parts: Sequence[CompactPart], *, multiprocessors: int, host: bool) -> Shape:
    """Choose the shape in which columns of int8 with a scale are converted: lanes that cover the widest row."""
    lanes = min(32, 1 << (max(part.width for part in parts) - 1).bit_length())
    return Shape(1, lanes, *grid_and_threads(num_rows * lanes, multiprocessors, host))


def grid_of(threads: int, multiprocessors: int) -> int:
    """Return the grid for ``threads`` threads, up to the limit."""
    limit = THREADS_PER_MULTIPROCESSOR * multiprocessors
    return -(-(threads if threads < limit else limit) // THREADS_PER_BLOCK)


def grid_and_threads(threads: int, multiprocessors: int, host: bool) -> tuple[int, int]:
    """Return the grid and the threads per block for this many threads, in host memory or on the GPU."""
    if host:
        blocks = -(-threads // HOST_THREADS_PER_BLOCK)
        return blocks if blocks < multiprocessors else multiprocessors, HOST_THREADS_PER_BLOCK
    return grid_of(threads, multiprocessors), THREADS_PER_BLOCK


def columns_argument(parts: Sequence[BlockNumbers], word_bytes: int, hot: Sequence[int] = NOT_HOT) -> bytes:
    """Return the kernels' ``Columns``, in words; ``hot`` is their ``Hot``."""
    numbers: list[int] = []
    first = count = 0
    for offset, width, block, block_stride in parts:
        numbers += first, offset // word_bytes, block, block_stride // word_bytes
        first += width // word_bytes
        count += 1
    return _COLUMNS.pack(count, first, *hot, *numbers, *[0] * (_COLUMN_NUMBERS * (COLUMNS_PER_LAUNCH - count)))


@functools.lru_cache(maxsize=256)
def copy_layout(stride: int, columns: Sequence[tuple[int, int]], places: int) -> tuple[int, int, bytes]:
    """Describe a move of columns that are copied as they are, for any number of rows and without the blocks' addresses.

    Args:
        stride: bytes from a record to the next.
        columns: a tuple of 1 to 8 pairs: the offset in a record and the width of a column, in bytes. The rows of a
            block are contiguous.
        places: the bits, below 16, that are set in the address of the first record or of any block.

    Returns:
        Bytes per word and lanes, as of :func:`launch_shape`, and :func:`columns_argument` with addresses of 0.
    """
    parts = [(offset, width, 0, width) for offset, width in columns]
    word_bytes, lanes, *_ = launch_shape(places, stride, 1, parts, multiprocessors=1, host=False)
    return word_bytes, lanes, columns_argument(parts, word_bytes)


def compact_columns_argument(parts: Sequence[CompactPart], hot: Sequence[int] = NOT_HOT) -> bytes:
    """Return the kernels' ``CompactColumns``; ``hot`` is their ``Hot``."""
    numbers: list[int] = []
    first = count = 0
    for part in parts:
        rounding = _COPIED if part.copied else part.key is not None
        numbers += first, part.offset, part.block, part.width, rounding, part.key or 0
        first += _pieces(part)
        count += 1
    return _COMPACT_COLUMNS.pack(count, first, *hot, *numbers, *[0] * (_COMPACT_NUMBERS * (COLUMNS_PER_LAUNCH - count)))


def batches_argument(batches: Sequence[tuple[int, int, int]]) -> bytes:
    """Return the kernels' ``Batches``: of each the address of its rows, their number, and where their places go."""
    numbers = [number for batch in batches for number in batch]
    return _BATCHES.pack(len(batches), *numbers, *[0] * (_BATCHES.size // 8 - 1 - len(numbers)))


def idle_argument(columns: Sequence[int], **values: int) -> bytes:
    """Return the kernels' ``IdleBlock``; ``columns`` are addresses."""
    numbers = {**_NO_IDLE, "num_columns": len(columns), **values}
    addresses = [*columns, *[0] * (MOST_IDLE_COLUMNS - len(columns))]
    return struct.pack(f"{MOST_IDLE_COLUMNS + len(_NO_IDLE)}q", *addresses, *numbers.values())


def block_addresses(count: int, *, compact: bool) -> range:
    """Return the places of the addresses of ``count`` blocks, in bytes, within an argument of either kind."""
    per_column = _COMPACT_NUMBERS if compact else _COLUMN_NUMBERS
    first = _BEFORE_COLUMNS + 2
    return range(8 * first, 8 * (first + count * per_column), 8 * per_column)


def _pieces(part: CompactPart) -> int:
    return -(-part.width // (PIECE // 2 if part.copied else PIECE))
