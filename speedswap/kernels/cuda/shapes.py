"""The shape of a kernel launch: word, threads and grid. Pure arithmetic without torch, so that tests can sweep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

_HOT = np.dtype([("words", "u8"), ("arena", "u8"), ("state", "u8"), ("row_bytes", "i8"), ("counts", "i8")])
_COLUMN = np.dtype([("first", "i8"), ("offset", "i8"), ("block", "i8"), ("block_stride", "i8")])
_COLUMNS = np.dtype([("count", "i8"), ("words", "i8"), ("hot", _HOT), ("column", _COLUMN, (COLUMNS_PER_LAUNCH,))])
_COMPACT_COLUMN = np.dtype(
    [("first", "i8"), ("offset", "i8"), ("block", "i8"), ("width", "i8"), ("stochastic", "i8"), ("key", "u8")]
)
_COMPACT_COLUMNS = np.dtype(
    [("count", "i8"), ("pieces", "i8"), ("hot", _HOT), ("column", _COMPACT_COLUMN, (COLUMNS_PER_LAUNCH,))]
)
_BAGS = (
    "rows local offsets factors counts is_mean out grad places scales taken order starts partial "
    "entries num_bags samples features num_rows width row_bytes grad_stride shift means whole"
).split()

# As in csrc/rows.cuh.
MOST_IDLE_COLUMNS = 4
_IDLE = np.dtype(
    [("columns", "u8", (MOST_IDLE_COLUMNS,))]
    + [(name, "i8") for name in "last steps num_columns num_rows width now before bends".split()]
)

# As in csrc/lookups.cuh.
KEYS_PER_THREAD = 16
BATCHES_PER_LAUNCH = 8
_FEATURE = "ids narrow per_bag stride inner_stride base limit outside offsets narrow_offsets closed"
FEATURE = np.dtype([(name, "i8") for name in _FEATURE.split()])
_BATCH = np.dtype([(name, "i8") for name in ("rows", "num_rows", "places")])
BATCHES = np.dtype([("count", "i8"), ("batch", _BATCH, (BATCHES_PER_LAUNCH,))])


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
    everything = records | stride
    for part in parts:
        everything |= part.offset | part.width | part.block | part.block_stride
    word_bytes = next(word for word in WORDS if everything % word == 0)
    words = sum(part.width for part in parts) // word_bytes
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


def columns_argument(parts: Sequence[BlockPart], word_bytes: int) -> npt.NDArray[np.void]:
    """Return the kernels' ``Columns``, in words, as an array of one structure, which CuPy passes by value."""
    argument = np.zeros(1, _COLUMNS)
    first = 0
    for column, part in enumerate(parts):
        width = part.width // word_bytes
        argument["column"][0, column] = (first, part.offset // word_bytes, part.block, part.block_stride // word_bytes)
        first += width
    argument["count"] = len(parts)
    argument["words"] = first
    return argument


def compact_columns_argument(parts: Sequence[CompactPart]) -> npt.NDArray[np.void]:
    """Return the kernels' ``CompactColumns``, as an array of one structure."""
    argument = np.zeros(1, _COMPACT_COLUMNS)
    first = 0
    for column, part in enumerate(parts):
        stochastic = part.key is not None
        argument["column"][0, column] = (first, part.offset, part.block, part.width, stochastic, part.key or 0)
        first += _pieces(part)
    argument["count"] = len(parts)
    argument["pieces"] = first
    return argument


def bags_argument(**values: int) -> npt.NDArray[np.void]:
    """Return the kernels' ``Bags``, as an array of one structure; what is not given is 0."""
    values["shift"] = (values["features"] - 1).bit_length()
    return np.array([values.get(name, 0) for name in _BAGS], np.int64).view(f"V{8 * len(_BAGS)}")


def idle_argument(columns: Sequence[int], **values: int) -> npt.NDArray[np.void]:
    """Return the kernels' ``IdleBlock``, as an array of one structure; ``columns`` are addresses."""
    argument = np.zeros(1, _IDLE)
    argument["columns"][0, : len(columns)] = columns
    argument["num_columns"] = len(columns)
    for name, value in values.items():
        argument[name] = value
    return argument


def block_addresses(argument: npt.NDArray[np.void]) -> list[int]:
    """Return the places of the blocks' addresses, in bytes, within an argument of either kind."""
    blocks = argument["column"]["block"][0]
    first = blocks.ctypes.data - argument.ctypes.data
    return [first + number * blocks.strides[0] for number in range(int(argument["count"][0]))]


def _pieces(part: CompactPart) -> int:
    return -(-part.width // PIECE)
