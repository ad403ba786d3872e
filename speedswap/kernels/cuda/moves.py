"""Rows to, from and on a GPU: which way they go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap.kernels.cuda import choice, engines
from speedswap.kernels.cuda.launches import move
from speedswap.kernels.cuda.rates import Direction
from speedswap.kernels.cuda.staging import row_bytes
from speedswap.kernels.cuda.streams import index_of
from speedswap.kernels.records import Part, Records

__all__ = ["gather_records", "scatter_records"]


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """:func:`speedswap.kernels.gather_records` where records or blocks are on a GPU."""
    parts = _with_bytes(parts)
    if not parts:
        return
    blocks_on = parts[0].block.device
    if records.device.type != "cuda":
        way = _way(records, len(ids), parts, blocks_on, "in")
        engines.gather(way, records, ids.contiguous(), parts, blocks_on)
        return
    if blocks_on == torch.device("cuda", index_of(records.device)):
        _on_device("gather", records, ids, parts)
        return
    near = [
        part._replace(block=part.block.new_empty((len(ids), *part.block.shape[1:]), device=records.device))
        for part in parts
    ]
    _on_device("gather", records, ids, near)
    for part, source in zip(parts, near, strict=True):
        part.block.copy_(source.block)


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """:func:`speedswap.kernels.scatter_records` where records or blocks are on a GPU."""
    parts = _with_bytes(parts)
    if not parts:
        return
    if records.device.type != "cuda":
        way = _way(records, len(ids), parts, parts[0].block.device, "out")
        engines.scatter(way, records, ids.contiguous(), parts, parts[0].block.device)
        return
    near = [part._replace(block=part.block.to(records.device)) for part in parts]
    _on_device("scatter", records, ids, near)


def _way(
    records: Records, num_rows: int, parts: Sequence[Part], device: torch.device, direction: Direction
) -> engines.Way:
    if not records.pinned:
        return engines.STAGED
    return choice.way(records.engine, index_of(device), direction, num_rows, row_bytes(parts))


def _with_bytes(parts: Sequence[Part]) -> list[Part]:
    return [part._replace(block=part.block.detach()) for part in parts if part.block.nbytes]


def _on_device(what: str, records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    near = ids.to(records.device).contiguous()
    move(what, records, near, parts, records.device, torch.cuda.current_stream(records.device))
