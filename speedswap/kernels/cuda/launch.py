"""Launch the kernels that move, convert and fill rows, on a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import modules
from speedswap.kernels.cuda.modules import index_of
from speedswap.kernels.cuda.shapes import (
    COLUMNS_PER_LAUNCH,
    NOT_HOT,
    PIECE,
    THREADS_PER_BLOCK,
    BlockPart,
    CompactPart,
    block_addresses,
    columns_argument,
    compact_columns_argument,
    convert_shape,
    copy_layout,
    grid_and_threads,
    grid_of,
    int8_shape,
    launch_shape,
)
from speedswap.kernels.records import Part, Records, Stored

What = Literal["gather", "scatter"]

_T = TypeVar("_T")

# For a move of host memory: enough to saturate the bus (an H100's takes 8), and few: what they have under way fills
# queues that the computation shares. At most a quarter of a GPU's, so that moves in both directions at once, at a high
# priority, leave half of them to the computation.
HOST_MULTIPROCESSORS = 16


@functools.cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


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
            name = f"{what}_{dtype_name(dtype)}"
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
    index, is_host = index_of(device) if device.index is None else device.index, records.device.type == "cpu"
    limit = host_limit(multiprocessors(index)) if is_host else multiprocessors(index)
    count = ids.shape[0]
    for kernel, grid, threads_per_block, stride, columns, lanes, *_ in plan(what, records, count, parts, limit):
        launch_kernel(
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
    is_host = records.device.type == "cpu"
    limit = host_limit(multiprocessors(device)) if is_host else multiprocessors(device)
    grid, threads = grid_and_threads(count * lanes, limit, is_host)
    hot = NOT_HOT if records.hot is None else records.hot.argument(sum(width for _, width in columns))
    rows = records.pointer, records.stride // word_bytes, ids.data_ptr(), count
    kernel = kernel_handle(device, f"{what}_w{word_bytes}")
    shifted = [shift // word_bytes for shift in shifts] if shifts else []
    _C.launch_move(device, kernel, grid, threads, stream.cuda_stream, rows, layout, blocks, shifted, hot, lanes)


@functools.cache
def host_limit(multiprocessors: int) -> int:
    """Return the most multiprocessors that a move of host memory takes of a GPU's, which is at least one.

    >>> [host_limit(132), host_limit(40), host_limit(2)]
    [16, 10, 1]
    """
    return max(1, min(HOST_MULTIPROCESSORS, multiprocessors // 4))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the kernels' names have it."""
    return str(dtype).removeprefix("torch.")


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """Queue :func:`speedswap.kernels.round_rows` for a block on a GPU, on torch's current stream."""
    ids = ids.to(block.device, torch.int64).contiguous()
    width = block.numel() // len(block)
    launch_threads(
        f"round_{dtype_name(stored.dtype)}", block.device, len(ids) * -(-width // PIECE), block.data_ptr(), width,
        ids.data_ptr(), len(ids), stored.key is not None, stored.key or 0,
    )  # fmt: skip


def fill(kind: str, into: Tensor, first_row: int, a: float, b: float, seed: int, column_key: int) -> None:
    """Queue a fill of consecutive rows on torch's current stream."""
    size, width = into.itemsize, into[0].numel()
    if into.data_ptr() % size:
        raise ValueError(f"rows at {into.data_ptr():#x} are not aligned to items of {size} bytes")
    launch_threads(
        f"fill_{kind}_f{8 * size}", into.device, len(into) * -(-width // (16 // size)), into.data_ptr(),
        into.stride(0) * size, first_row, len(into), width, float(a), float(b), seed, column_key,
    )  # fmt: skip


def launch_threads(name: str, device: torch.device, threads: int, *arguments: int | float | bytes) -> None:
    """Queue a kernel with this many threads, or fewer where the GPU has no room, on torch's current stream.

    Nothing is queued if there are none. ``arguments`` are as for :func:`launch_kernel`.
    """
    if threads:
        index = device.index
        grid, stream = grid_of(threads, multiprocessors(index)), torch._C._cuda_getCurrentRawStream(index)
        _C.launch(index, kernel_handle(index, name), grid, THREADS_PER_BLOCK, stream, arguments)


def launch_kernel(
    device: torch.device,
    stream: torch.cuda.Stream,
    name: str,
    grid: int,
    threads_per_block: int,
    *arguments: int | float | bytes,
) -> None:
    """Queue a kernel of ``csrc/rows.cuh``.

    Args:
        device: the GPU, with its number.
        stream: a stream of that GPU.
        name: the kernel's.
        grid, threads_per_block: the number of thread blocks, and of threads in each.
        arguments: the kernel's, in order: integers, floats for parameters of float64, and structures.
    """
    index = device.index
    _C.launch(index, kernel_handle(index, name), grid, threads_per_block, stream.cuda_stream, arguments)


@functools.cache
def kernel_handle(device: int, name: str) -> int:
    """Return the driver's handle of a kernel of ``csrc/rows.cuh`` on a GPU."""
    with modules.on_device(device):
        return int(modules.load().module.get_function(name).kernel.ptr)
