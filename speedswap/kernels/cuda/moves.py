"""Rows to, from and on a GPU: which path, and the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap import _C
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
from speedswap.kernels.cuda.staging import Ring
from speedswap.kernels.records import Part, Records, Stored, engine_parts
from speedswap.kernels.threads import get_num_threads

__all__ = ["fill", "gather_records", "round_rows", "scatter_records"]


class _Stream(NamedTuple):
    """A stream of torch's, as CuPy's launch wants one: it reads ``ptr``."""

    ptr: int


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """:func:`speedswap.kernels.gather_records` where records or blocks are on a GPU."""
    blocks_on = parts[0].block.device
    if records.device.type == "cuda" and blocks_on != torch.device("cuda", _index(records.device)):
        near = [part._replace(block=torch.empty_like(part.block, device=records.device)) for part in parts]
        _move("gather", records, ids, near, records.device)
        for part, source in zip(parts, near, strict=True):
            part.block.detach().copy_(source.block)
    elif records.device.type == "cuda" or records.pinned:
        _move("gather", records, ids, parts, blocks_on)
    else:
        ids = ids.cpu().contiguous()
        with torch.cuda.device(blocks_on):
            _ring().to_device(len(ids), parts, lambda rows, staged: _on_host(_C.gather, records, ids[rows], staged))


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """:func:`speedswap.kernels.scatter_records` where records or blocks are on a GPU."""
    blocks_on = parts[0].block.device
    if records.device.type == "cuda":
        near = [part._replace(block=part.block.detach().to(records.device)) for part in parts]
        _move("scatter", records, ids, near, records.device)
    elif records.pinned:
        _move("scatter", records, ids, parts, blocks_on)
    else:
        ids = ids.cpu().contiguous()
        with torch.cuda.device(blocks_on):
            _ring().from_device(len(ids), parts, lambda rows, staged: _on_host(_C.scatter, records, ids[rows], staged))


def _on_host(engine: Any, records: Records, ids: Tensor, staged: Sequence[Part]) -> None:
    engine(
        records.pointer, records.stride, ids.data_ptr(), ids.element_size(), len(ids), engine_parts(staged),
        get_num_threads(),
    )  # fmt: skip


def _move(what: str, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    ids = ids.to(device).contiguous()
    block_parts: list[BlockPart] = []
    compact_parts: dict[torch.dtype, list[CompactPart]] = {}
    for offset, block, stored in parts:
        width = block.nbytes // len(block)
        if width and stored is None:
            block_parts.append(BlockPart(offset, width, block.data_ptr(), width))
        elif width and stored is not None:
            part = CompactPart(offset, block.data_ptr(), width // 4, stored.key)
            compact_parts.setdefault(stored.dtype, []).append(part)
    host = records.device.type == "cpu"
    for dtype, converted in compact_parts.items():
        for start in range(0, len(converted), COLUMNS_PER_LAUNCH):
            _convert(what, dtype, records, ids, converted[start : start + COLUMNS_PER_LAUNCH], device)
    for start in range(0, len(block_parts), COLUMNS_PER_LAUNCH):
        some = block_parts[start : start + COLUMNS_PER_LAUNCH]
        shape = launch_shape(
            records.pointer, records.stride, len(ids), some, multiprocessors=_multiprocessors(_index(device)), host=host
        )
        _launch(
            device,
            f"{what}_w{shape.word_bytes}_i{8 * ids.element_size()}",
            shape.grid,
            shape.block,
            np.uint64(records.pointer),
            np.int64(records.stride // shape.word_bytes),
            np.uint64(ids.data_ptr()),
            np.int64(len(ids)),
            columns_argument(some, shape.word_bytes),
            np.int32(shape.lanes),
        )


def _convert(
    what: str, dtype: torch.dtype, records: Records, ids: Tensor, parts: Sequence[CompactPart], device: torch.device
) -> None:
    form = str(dtype).removeprefix("torch.")
    host = records.device.type == "cpu"
    multiprocessors = _multiprocessors(_index(device))
    if dtype is torch.int8:
        shape = int8_shape(len(ids), parts, multiprocessors=multiprocessors, host=host)
        name = f"{what}_{form}_i{8 * ids.element_size()}"
    else:
        shape = convert_shape(
            records.pointer, records.stride, len(ids), parts, multiprocessors=multiprocessors, host=host
        )
        name = f"{what}_{form}_w{shape.word_bytes}_i{8 * ids.element_size()}"
    _launch(
        device,
        name,
        shape.grid,
        shape.block,
        np.uint64(records.pointer),
        np.int64(records.stride),
        np.uint64(ids.data_ptr()),
        np.int64(len(ids)),
        compact_columns_argument(parts),
        np.int32(shape.lanes),
    )


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """:func:`speedswap.kernels.round_rows` for a block on a GPU."""
    ids = ids.to(block.device).contiguous()
    width = block.numel() // len(block)
    _launch(
        block.device,
        f"round_{str(stored.dtype).removeprefix('torch.')}_i{8 * ids.element_size()}",
        round_grid(len(ids), width, multiprocessors=_multiprocessors(_index(block.device))),
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
    _launch(
        device,
        f"fill_{kind}_f{8 * item_bytes}",
        fill_grid(num_rows, width, 16 // item_bytes, multiprocessors=_multiprocessors(_index(device))),
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


def _launch(device: torch.device, name: str, grid: int, block: int, *arguments: Any) -> None:
    kernel = _kernel(name)
    stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
    with modules.on_device(_index(device)):
        kernel((grid,), (block,), arguments, stream=stream)


@functools.cache
def _kernel(name: str) -> Any:
    return modules.load().module.get_function(name)


@functools.cache
def _ring() -> Ring:
    return Ring()
