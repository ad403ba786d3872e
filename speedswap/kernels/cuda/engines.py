"""Three ways between host memory and a GPU.

zero_copy: a kernel reads or writes pinned memory by itself, over the bus.
staged: the CPU's threads gather into pinned buffers, the copy engine carries those (staging.py); for any host memory.
split: the first rows go the one way while the others go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.cuda.launches import HOST_MULTIPROCESSORS, move
from speedswap.kernels.cuda.staging import ring, rows_of
from speedswap.kernels.cuda.streams import index_of
from speedswap.kernels.records import Part, Records

__all__ = ["STAGED", "ZERO_COPY", "Way", "gather", "scatter"]


class Way(NamedTuple):
    """How rows go.

    ``share`` is the part of them that a kernel moves directly: 1 is zero_copy, 0 is staged, what is between is split.
    The kernel takes at most ``multiprocessors`` of the GPU's.
    """

    share: float
    multiprocessors: int = HOST_MULTIPROCESSORS

    @property
    def engine(self) -> str:
        return "zero_copy" if self.share == 1 else "staged" if self.share == 0 else "split"


ZERO_COPY = Way(1.0)
STAGED = Way(0.0)


def gather(way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    """Fill blocks on a GPU with host records, on torch's current stream.

    Args:
        way: for pageable records, :data:`STAGED`.
        records: in host memory.
        ids: int32 or int64, shape (n,), n > 0, contiguous, on the CPU or the GPU; -1 passes a row over.
        parts: columns that are at least a byte wide, with blocks on the GPU.
        device: the GPU.
    """
    _move("gather", way, records, ids, parts, device)


def scatter(way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    """Write blocks on a GPU to host records, after what is queued on torch's current stream.

    What a kernel writes is queued on that stream; what is staged is written when this returns. Arguments as for
    :func:`gather`; the ids are unique, and none is negative.
    """
    _move("scatter", way, records, ids, parts, device)


def _move(what: str, way: Way, records: Records, ids: Tensor, parts: Sequence[Part], device: torch.device) -> None:
    direct = round(way.share * len(ids))
    if direct < len(ids) and records.fence is not None:
        records.fence.wait(reads=False)
    stream, ready = torch.cuda.current_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(stream)  # what is staged waits for what is queued so far, and not for what goes directly
    if direct:
        near, some = ids[:direct].to(device), rows_of(parts, slice(0, direct))
        move(what, records, near, some, device, stream, host_multiprocessors=way.multiprocessors)
        if records.fence is not None:
            records.fence.queued(stream, writes=what == "scatter")
    if direct < len(ids):
        staged = ring(index_of(device), "in" if what == "gather" else "out")
        turn = staged.gather if what == "gather" else staged.scatter
        turn(records, ids[direct:], rows_of(parts, slice(direct, len(ids))), ready)
