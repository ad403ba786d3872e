"""Launch the kernels that move, convert and fill rows, on a stream."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap.kernels.cuda import modules
from speedswap.kernels.cuda.launch import (
    COLUMNS_PER_LAUNCH,
    THREADS_PER_BLOCK,
    BlockPart,
    CompactPart,
    columns_argument,
    compact_columns_argument,
    convert_shape,
    fill_grid,
    int8_shape,
    launch_shape,
    round_grid,
)
from speedswap.kernels.cuda.streams import index_of
from speedswap.kernels.records import Part, Records, Stored

__all__ = ["HOST_MULTIPROCESSORS", "fill", "launch_kernel", "move", "multiprocessors", "round_rows"]

# Of a move of host memory, where nobody has measured how many keep the bus full.
HOST_MULTIPROCESSORS = 32


class _Stream(NamedTuple):
    """A stream of torch's, as CuPy's launch wants one: it reads ``ptr``."""

    ptr: int


@functools.cache
def multiprocessors(device: int) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def move(
    what: str,
    records: Records,
    ids: Tensor,
    parts: Sequence[Part],
    device: torch.device,
    stream: torch.cuda.Stream,
    *,
    packed: bool = False,
    places: Tensor | None = None,
    host_multiprocessors: int = HOST_MULTIPROCESSORS,
) -> None:
    """Queue a copy of columns between records and blocks.

    Args:
        what: ``gather`` or ``scatter``.
        records: in the GPU's memory, or in pinned memory.
        ids: int32 or int64, shape (n,), contiguous, on the GPU. If ``packed``, only a stochastic scatter reads them.
        parts: columns that are at least a byte wide, with contiguous blocks on the GPU.
        device: the GPU.
        stream: of that GPU.
        packed: whether the records lie in the order of the ids.
        places: which rows of the blocks they are, instead of one after the other: of the ids' dtype and shape,
            contiguous, on the GPU.
        host_multiprocessors: how many of the GPU's a move of host memory may take.
    """
    block_parts: list[BlockPart] = []
    compact_parts: dict[torch.dtype, list[CompactPart]] = {}
    for offset, block, stored in parts:
        width = block.nbytes // len(block)
        if stored is None:
            block_parts.append(BlockPart(offset, width, block.data_ptr(), width))
        else:
            part = CompactPart(offset, block.data_ptr(), width // 4, stored.key)
            compact_parts.setdefault(stored.dtype, []).append(part)
    host = records.device.type == "cpu"
    limit = multiprocessors(index_of(device))
    if host:
        limit = min(limit, host_multiprocessors)
    for dtype, converted in compact_parts.items():
        for start in range(0, len(converted), COLUMNS_PER_LAUNCH):
            some = converted[start : start + COLUMNS_PER_LAUNCH]
            _convert(what, dtype, records, ids, some, device, stream, packed, places, limit)
    for start in range(0, len(block_parts), COLUMNS_PER_LAUNCH):
        copied = block_parts[start : start + COLUMNS_PER_LAUNCH]
        shape = launch_shape(records.pointer, records.stride, len(ids), copied, multiprocessors=limit, host=host)
        launch_kernel(
            device,
            stream,
            f"{what}_w{shape.word_bytes}_i{8 * ids.element_size()}",
            shape.grid,
            shape.block,
            np.uint64(records.pointer),
            np.int64(records.stride // shape.word_bytes),
            np.uint64(ids.data_ptr()),
            np.int64(len(ids)),
            columns_argument(copied, shape.word_bytes),
            np.int32(shape.lanes),
            np.int32(packed),
            np.uint64(0 if places is None else places.data_ptr()),
        )


def _convert(
    what: str,
    dtype: torch.dtype,
    records: Records,
    ids: Tensor,
    parts: Sequence[CompactPart],
    device: torch.device,
    stream: torch.cuda.Stream,
    packed: bool,
    places: Tensor | None,
    limit: int,
) -> None:
    form = str(dtype).removeprefix("torch.")
    host = records.device.type == "cpu"
    if dtype is torch.int8:
        shape = int8_shape(len(ids), parts, multiprocessors=limit, host=host)
        name = f"{what}_{form}_i{8 * ids.element_size()}"
    else:
        shape = convert_shape(records.pointer, records.stride, len(ids), parts, multiprocessors=limit, host=host)
        name = f"{what}_{form}_w{shape.word_bytes}_i{8 * ids.element_size()}"
    launch_kernel(
        device,
        stream,
        name,
        shape.grid,
        shape.block,
        np.uint64(records.pointer),
        np.int64(records.stride),
        np.uint64(ids.data_ptr()),
        np.int64(len(ids)),
        compact_columns_argument(parts),
        np.int32(shape.lanes),
        np.int32(packed),
        np.uint64(0 if places is None else places.data_ptr()),
    )


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """:func:`speedswap.kernels.round_rows` for a block on a GPU, on torch's current stream."""
    ids = ids.to(block.device).contiguous()
    width = block.numel() // len(block)
    launch_kernel(
        block.device,
        torch.cuda.current_stream(block.device),
        f"round_{str(stored.dtype).removeprefix('torch.')}_i{8 * ids.element_size()}",
        round_grid(len(ids), width, multiprocessors=multiprocessors(index_of(block.device))),
        THREADS_PER_BLOCK,
        np.uint64(block.data_ptr()),
        np.int64(width),
        np.uint64(ids.data_ptr()),
        np.int64(len(ids)),
        np.int64(stored.key is not None),
        np.uint64(stored.key or 0),
    )


def fill(
    kind: str,
    device: torch.device,
    out: int,
    row_stride: int,
    first_row: int,
    num_rows: int,
    width: int,
    item_bytes: int,
    a: float,
    b: float,
    seed: int,
    column_key: int,
) -> None:
    """Queue a fill on torch's current stream; ``out`` is the address of the first row to fill, on the device."""
    if out % item_bytes or row_stride % item_bytes:
        raise ValueError(f"rows at {out:#x}, {row_stride} bytes apart, are not aligned to items of {item_bytes} bytes")
    launch_kernel(
        device,
        torch.cuda.current_stream(device),
        f"fill_{kind}_f{8 * item_bytes}",
        fill_grid(num_rows, width, 16 // item_bytes, multiprocessors=multiprocessors(index_of(device))),
        THREADS_PER_BLOCK,
        np.uint64(out),
        np.int64(row_stride),
        np.int64(first_row),
        np.int64(num_rows),
        np.int64(width),
        np.float64(a),
        np.float64(b),
        np.uint64(seed),
        np.uint64(column_key),
    )


def launch_kernel(
    device: torch.device, stream: torch.cuda.Stream, name: str, grid: int, block: int, *arguments: Any
) -> None:
    """Queue a kernel of ``csrc/rows.cuh``; the arguments are NumPy scalars of its parameters' very types."""
    kernel = _kernel(name)
    with modules.on_device(index_of(device)):
        kernel((grid,), (block,), arguments, stream=_Stream(stream.cuda_stream))


@functools.cache
def _kernel(name: str) -> Any:
    return modules.load().module.get_function(name)
