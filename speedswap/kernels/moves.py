"""Copy columns between records and blocks: which way the bytes go from here to there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speedswap import _C
from speedswap.kernels.records import Part, Records
from speedswap.kernels.threads import get_num_threads

__all__ = ["engine_parts", "gather_records", "scatter_records"]


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns out of records: row ``i`` of each block becomes that column of record ``ids[i]``.

    Host records and blocks: the CPU engine. CUDA records, or pinned records with CUDA blocks: a kernel on torch's
    current stream. Pageable records with CUDA blocks: gathered by the CPU into pinned memory, and copied from there
    on torch's current stream.

    Args:
        records: where from.
        ids: int32 or int64, shape (n,), on any device, already checked to be in range.
        parts: the columns; blocks have n rows and are all on one device.
    """
    if len(ids) == 0 or not parts:
        return
    if records.device.type == "cpu" and parts[0].block.device.type == "cpu":
        ids = ids.cpu().contiguous()
        _C.gather(
            records.pointer, records.stride, ids.data_ptr(), ids.element_size(), len(ids), engine_parts(parts),
            get_num_threads(),
        )  # fmt: skip
        return
    from speedswap.kernels import cuda

    cuda.gather_records(records, ids, parts)


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns into records: that column of record ``ids[i]`` becomes row ``i`` of each block.

    The ways are those of :func:`gather_records`. With pageable records and CUDA blocks this returns when the records
    are written; with pinned ones the write is queued on torch's current stream.

    Args:
        records: where to.
        ids: int32 or int64, shape (n,), on any device, already checked to be in range and unique.
        parts: the columns; blocks have n rows and are all on one device.
    """
    if len(ids) == 0 or not parts:
        return
    if records.device.type == "cpu" and parts[0].block.device.type == "cpu":
        ids = ids.cpu().contiguous()
        _C.scatter(
            records.pointer, records.stride, ids.data_ptr(), ids.element_size(), len(ids), engine_parts(parts),
            get_num_threads(),
        )  # fmt: skip
        return
    from speedswap.kernels import cuda

    cuda.scatter_records(records, ids, parts)


def engine_parts(parts: Sequence[Part]) -> list[tuple[int, int, int, int]]:
    """The parts as the engine takes them."""
    taken = []
    for offset, block in parts:
        width = block.nbytes // len(block)
        taken.append((offset, width, block.data_ptr(), width))
    return taken
