"""Three ways between host memory and a GPU.

zero_copy: a kernel reads or writes pinned memory directly, over the bus.
staged: CPU threads gather into pinned buffers, and the copy engine transfers those (staging.py); for any host memory.
split: the first rows go by zero_copy, and at the same time the others staged.

``auto`` is zero_copy for pinned memory. Other memory is always staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda import launch
from speedswap.kernels.cuda.launch import HOST_MULTIPROCESSORS
from speedswap.kernels.cuda.modules import index_of, side_stream
from speedswap.kernels.cuda.staging import ring, rows_of
from speedswap.kernels.records import Part, Records

__all__ = ["WAYS", "Way", "gather", "move", "scatter"]


class Way(NamedTuple):
    """The split of rows between a kernel and staging.

    A kernel moves a ``share`` of the rows directly: 1 is zero_copy, 0 is staged, anything between is split. The kernel
    takes at most ``multiprocessors`` of the GPU's.
    """

    share: float
    multiprocessors: int = HOST_MULTIPROCESSORS


WAYS = {"auto": Way(1.0), "zero_copy": Way(1.0), "staged": Way(0.0), "split": Way(0.5)}


def move(what: launch.What, records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns between records and blocks if either is on a GPU; see :mod:`speedswap.kernels.records`."""
    parts = [part._replace(block=part.block.detach()) for part in parts if part.block.nbytes]
    if not parts:
        return
    blocks_on = parts[0].block.device
    if records.device.type == "cpu":
        way = WAYS[records.engine if records.pinned else "staged"]
        _move(what, way, records, ids, parts, blocks_on)
        return
    near = parts  # with blocks beside the records
    if blocks_on != torch.device("cuda", index_of(records.device)):
        copied = torch.empty_like if what == "gather" else Tensor.to
        near = [part._replace(block=copied(part.block, device=records.device)) for part in parts]
    ids, stream = ids.to(records.device, torch.int64).contiguous(), torch.cuda.current_stream(records.device)
    _launch(what, records, ids, near, records.device, stream)
    if near is not parts and what == "gather":
        for part, source in zip(parts, near, strict=True):
            part.block.copy_(source.block)


def gather(way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    """Fill blocks on a GPU with host records, on torch's current stream.

    Args:
        way: for pageable records, that of ``staged``.
        records: in host memory.
        ids: integers, shape (n,), n > 0, on the CPU or the GPU; -1 skips a row.
        parts: columns that are at least a byte wide, with blocks on the GPU.
        device: the GPU.
    """
    _move("gather", way, records, ids, parts, device)


def scatter(way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    """Write blocks on a GPU to host records, after the work queued on torch's current stream.

    Kernels are queued on that stream; staged rows are written when this returns. Arguments as for :func:`gather`; ids
    are unique and not negative.
    """
    _move("scatter", way, records, ids, parts, device)


def _move(
    what: launch.What, way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device
) -> None:
    ids = ids.to(torch.int64).contiguous()
    direct = round(way.share * len(ids))
    if direct < len(ids) and records.fence is not None:
        records.fence.wait(reads=what == "scatter", forwarded=_forwarded(records, device))
    stream, ready = torch.cuda.current_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(stream)  # staged rows wait for the work queued so far, not for the rows that go directly
    if direct:
        near, some = ids[:direct].to(device), rows_of(parts, slice(0, direct))
        _launch(what, records, near, some, device, stream, way.multiprocessors)
    if direct < len(ids):
        staged = ring(index_of(device), "in" if what == "gather" else "out")
        turn = staged.gather if what == "gather" else staged.scatter
        turn(records, ids[direct:], rows_of(parts, slice(direct, len(ids))), ready)


def _launch(
    what: launch.What,
    records: Records,
    ids: Tensor,
    parts: Sequence[Part],
    device: torch.device,
    stream: torch.cuda.Stream,
    host_multiprocessors: int = HOST_MULTIPROCESSORS,
) -> None:
    """Queue kernels that read or write the records, in order with those of other streams."""
    fence, writes = records.fence, what == "scatter"
    if fence is not None:
        fence.order(stream, writes=writes, forwarded=_forwarded(records, device))
    launch.move(what, records, ids, parts, device, stream, host_multiprocessors=host_multiprocessors)
    if fence is not None and not records.ahead:
        fence.queued(stream, writes=writes)


def _forwarded(records: Records, device: torch.device) -> torch.cuda.Stream | None:
    return side_stream(index_of(device), "rows out") if records.ahead else None
