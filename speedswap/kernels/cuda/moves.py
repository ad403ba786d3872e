"""Move rows between records and blocks by kernels, converting and rounding them on the way."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import driver
from speedswap.kernels.cuda.driver import index_of
from speedswap.kernels.cuda.shapes import (
    COLUMNS_PER_LAUNCH,
    NOT_HOT,
    PIECE,
    BlockPart,
    CompactPart,
    block_addresses,
    columns_argument,
    compact_columns_argument,
    convert_shape,
    copy_layout,
    grid_and_threads,
    int8_shape,
    launch_shape,
)
from speedswap.kernels.records import Part, Records, Stored, What

_T = TypeVar("_T")


class Planned(NamedTuple):
    """One launch of a move: the kernel's name, grid and thread blocks, and the arguments that describe the columns.

    ``stride`` is that of the records in the kernel's words, ``columns`` its structure, and ``row_bytes`` those of each
    column's block.
    """

    kernel: str
    grid: int
    threads_per_block: int
    stride: int
    columns: bytes
    lanes: int
    row_bytes: Sequence[int]
    compact: bool

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the place of each block's address within ``columns``, and the block's bytes per row."""
        return zip(block_addresses(len(self.row_bytes), compact=self.compact), self.row_bytes, strict=True)


def plan(what: What, records: Records, count: int, parts: Sequence[Part], multiprocessors: int) -> Iterator[Planned]:
    """Yield the launches that copy columns between records and blocks: one per format, word and eight columns.

    Columns that are copied as they are join the first launch that converts others to or from 2-byte values, if both may
    be moved in words of 16 bytes: then it is the only one to access the records.

    Args:
        what: the direction.
        records: in the GPU's memory, or in pinned memory.
        count: rows to move.
        parts: columns that are at least a byte wide, with contiguous blocks on the GPU.
        multiprocessors: the most that the move may take.

    Raises:
        ValueError: a converted column is not aligned to its values, or an int8 one to its scale: no GPU can read it.
    """
    host = records.device.type == "cpu"
    copied: list[tuple[int, int]] = []  # offsets and widths
    blocks: list[int] = []
    converted: dict[torch.dtype, list[CompactPart]] = {}
    moved = 0
    for part in parts:
        width = part.block.nbytes // part.block.shape[0] if part.stored is None else part.width
        moved += width
        if part.stored is None:
            copied += ((part.offset, width),)
            blocks += (part.block.data_ptr(),)
        else:
            _require_aligned(records, part.offset, part.stored.dtype)
            compact = CompactPart(part.offset, part.block.data_ptr(), part.block_row_bytes // 4, part.stored.key)
            converted.setdefault(part.stored.dtype, []).append(compact)
    for dtype in converted:
        for some in by_launch(converted[dtype]):
            name = f"{what}_{driver.dtype_name(dtype)}"
            if dtype is torch.int8:
                shape = int8_shape(count, some, multiprocessors=multiprocessors, host=host)
            else:
                shaped = functools.partial(
                    convert_shape, records.pointer, records.stride, count, multiprocessors=multiprocessors, host=host
                )
                joined = _joined(some, copied, blocks)
                shape = shaped(joined or some)
                if joined and shape.word_bytes == 16:
                    some, copied, blocks = joined, [], []
                elif joined:
                    shape = shaped(some)
                name = f"{name}_w{shape.word_bytes}"
            hot, moved = NOT_HOT if records.hot is None else records.hot.argument(moved), 0
            yield Planned(
                name, shape.grid, shape.threads_per_block, records.stride, compact_columns_argument(some, hot),
                shape.lanes, [4 * each.width for each in some], True,
            )  # fmt: skip
    columns = [BlockPart(offset, width, at, width) for (offset, width), at in zip(copied, blocks, strict=True)]
    for group in by_launch(columns):
        shape = launch_shape(records.pointer, records.stride, count, group, multiprocessors=multiprocessors, host=host)
        hot, moved = NOT_HOT if records.hot is None else records.hot.argument(moved), 0
        yield Planned(
            f"{what}_w{shape.word_bytes}", shape.grid, shape.threads_per_block, records.stride // shape.word_bytes,
            columns_argument(group, shape.word_bytes, hot), shape.lanes, [part.width for part in group], False,
        )  # fmt: skip


def _require_aligned(records: Records, offset: int, dtype: torch.dtype) -> None:
    item_bytes = torch.float32.itemsize if dtype is torch.int8 else dtype.itemsize
    if (records.pointer | records.stride | offset) % item_bytes:
        raise ValueError(
            f"a column of {dtype} begins {offset} bytes into records at {records.pointer:#x}, {records.stride} bytes "
            f"apart; a GPU reads it at multiples of {item_bytes} bytes: choose offset and stride so"
        )


def _joined(
    converted: Sequence[CompactPart], copied: Sequence[tuple[int, int]], blocks: Sequence[int]
) -> Sequence[CompactPart]:
    """Return the columns of a launch that converts some and copies others, by offset; none if it cannot be."""
    if not copied or len(converted) + len(copied) > COLUMNS_PER_LAUNCH or any(width % 16 for _, width in copied):
        return []
    columns = zip(copied, blocks, strict=True)
    return sorted([*converted, *(CompactPart(offset, at, width // 4, None, True) for (offset, width), at in columns)])


def by_launch(columns: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the columns of each launch."""
    for start in range(0, len(columns), COLUMNS_PER_LAUNCH):
        yield columns[start : start + COLUMNS_PER_LAUNCH]


def move(
    what: What,
    records: Records,
    ids: Tensor,
    parts: Sequence[Part],
    device: torch.device,
    stream: torch.cuda.Stream,
) -> None:
    """Queue a copy of columns between records and blocks.

    Args:
        what: the direction.
        records: in the GPU's memory, or in pinned memory.
        ids: int64, shape (n,), contiguous, on the GPU.
        parts: columns that are at least a byte wide, with contiguous blocks on the GPU.
        device: the GPU.
        stream: a stream of that GPU.
    """
    index = index_of(device) if device.index is None else device.index
    count, limit = ids.shape[0], records.multiprocessors_of(index)
    for kernel, grid, threads_per_block, stride, columns, lanes, *_ in plan(what, records, count, parts, limit):
        driver.launch_kernel(
            device, stream, kernel, grid, threads_per_block, records.pointer, stride, ids.data_ptr(), count, columns,
            lanes, 0, 0,
        )  # fmt: skip


def copy(
    what: What,
    records: Records,
    ids: Tensor,
    columns: Sequence[tuple[int, int]],
    blocks: list[int],
    device: int,
    stream: torch.cuda.Stream,
    shifts: Sequence[int] = (),
) -> None:
    """Queue a :func:`move` that takes one launch, with as little work on the host as possible.

    Args:
        what, records, ids, stream: as for :func:`move`.
        columns: a tuple of each column's offset and width, in bytes: 1 to 8 that are copied as they are.
        blocks: the addresses of their blocks.
        device: the GPU's number.
        shifts: how far behind these offsets the columns are, in bytes, which differ from move to move.
    """
    count, places = ids.shape[0], records.pointer
    for number in (*blocks, *shifts):
        places |= number
    word_bytes, lanes, layout = copy_layout(records.stride, columns, places % 16)
    limit = records.multiprocessors_of(device)
    grid, threads = grid_and_threads(count * lanes, limit, records.device.type == "cpu")
    hot = NOT_HOT if records.hot is None else records.hot.argument(sum(width for _, width in columns))
    rows = records.pointer, records.stride // word_bytes, ids.data_ptr(), count
    kernel = driver.kernel_handle(device, f"{what}_w{word_bytes}")
    shifted = [shift // word_bytes for shift in shifts] if shifts else []
    _C.launch_move(device, kernel, grid, threads, stream.cuda_stream, rows, layout, blocks, shifted, hot, lanes)


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """Queue :func:`speedswap.kernels.round_rows` for a block on a GPU, on torch's current stream."""
    ids = ids.to(block.device, torch.int64).contiguous()
    width = block.numel() // len(block)
    driver.launch_threads(
        f"round_{driver.dtype_name(stored.dtype)}", block.device, len(ids) * -(-width // PIECE), block.data_ptr(),
        width, ids.data_ptr(), len(ids), stored.key is not None, stored.key or 0,
    )  # fmt: skip
