"""Copy columns between records and blocks: within host memory here, to and from a GPU by ``cuda/engines.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda import engines, moves
from speedswap.kernels.host import LARGE_BYTES, address, as_ids, empty, get_num_threads, ids_at, threads_for
from speedswap.kernels.records import Part, Records, Stored, WantedColumn, What, cpu_parts

_CPU = torch.device("cpu")


def gather_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns out of records: row ``i`` of each block becomes that column of record ``ids[i]``.

    Host records and blocks: the CPU loops. CUDA records: a kernel on torch's current stream. Host records with CUDA
    blocks: one of the engines of ``kernels/cuda/engines.py``, on torch's current stream.

    Args:
        records: the source.
        ids: integers, shape (n,), on any device, already checked to be in range; int64 is not copied. With CUDA blocks
            an id of -1 skips a row, which is unchanged.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("gather", records, ids, parts)


def gather_on_cpu(records: Records, ids: Tensor, columns: Mapping[str, WantedColumn]) -> dict[str, Tensor]:
    """Return a batch's rows of columns, by name, within host memory; ids are as for :func:`gather_records`."""
    pointer, ids = ids_at(ids)
    count, blocks = ids.shape[0], {}
    for name in columns:
        shape, dtype = columns[name].row_shape, columns[name].dtype
        is_small = count * columns[name].row_bytes < LARGE_BYTES
        blocks[name] = ids.new_empty(count, *shape, dtype=dtype) if is_small else empty((count, *shape), dtype, _CPU)
    if count:
        parts = [columns[name].part(blocks[name].data_ptr() or address(blocks[name])) for name in columns]
        _C.gather(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))
    return blocks


def scatter_block(
    records: Records, ids: Tensor, columns: Mapping[str, WantedColumn], blocks: Mapping[str, Tensor]
) -> None:
    """Copy a batch's rows of columns, in their stored dtype, within host memory.

    Args:
        records: the target.
        ids: as for :func:`scatter_records`, at least one.
        columns: columns without stochastic rounding.
        blocks: the columns' rows by name, each in one piece.
    """
    pointer, ids = ids_at(ids)
    count = ids.shape[0]
    parts = [columns[name].part(blocks[name].data_ptr()) for name in columns]
    _C.scatter(records.pointer, records.stride, pointer, count, parts, threads_for(count * records.stride))


def scatter_records(records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    """Copy columns into records: that column of record ``ids[i]`` becomes row ``i`` of each block.

    As :func:`gather_records`, in the other direction. With host records and CUDA blocks, staged rows are written when
    this returns; rows that a kernel writes are queued on torch's current stream.

    Args:
        records: the target.
        ids: integers, shape (n,), on any device, already checked to be in range and unique.
        parts: the columns; blocks have n rows and are all on one device.
    """
    _move("scatter", records, ids, parts)


def _move(what: What, records: Records, ids: Tensor, parts: Sequence[Part]) -> None:
    count = ids.shape[0]
    if not count or not parts:
        return
    if records.device.type == "cpu" and parts[0].block.device.type == "cpu":
        ids = as_ids(ids)
        loop = _C.gather if what == "gather" else _C.scatter
        loop(records.pointer, records.stride, ids.data_ptr(), count, cpu_parts(parts), get_num_threads())
        return
    engines.move(what, records, ids, parts)


def round_rows(block: Tensor, ids: Tensor, stored: Stored) -> None:
    """Round each row of a block, in place, to the values that would be read back after scattering it.

    After ``scatter_records(records, ids, [Part(offset, block, stored)])`` a gather of the same ids returns exactly this
    block, so that rows can be forwarded without going through the records. Rounding twice changes nothing.

    Args:
        block: float32, contiguous, shape (n, ...), on any device.
        ids: integers, shape (n,), on any device: the records' numbers, which stochastic rounding depends on.
        stored: float16 or bfloat16, and the rounding.

    Raises:
        TypeError: the block is not float32, or stored as int8, whose rows training does not write.

    >>> block = torch.tensor([[1.0, 1.001]])
    >>> round_rows(block, torch.tensor([0]), Stored(torch.bfloat16))
    >>> block
    tensor([[1., 1.]])
    """
    if block.dtype != torch.float32 or stored.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"block is {block.dtype} and stored is {stored.dtype}; float32 rows are rounded, to float16 or bfloat16"
        )
    if block.numel() == 0:
        return
    if block.device.type == "cpu":
        ids = as_ids(ids)
        _C.round_rows(ids.data_ptr(), len(ids), cpu_parts([Part(0, block, stored)])[0], get_num_threads())
        return
    moves.round_rows(block, ids, stored)


def rounding_key(seed: int, column_key: int, write: int) -> int:
    """Return the random stream of one write of a column, for :class:`Stored`; streams are independent.

    Args:
        seed, column_key: as for :func:`speedswap.kernels.fill_uniform`, 0 to 2**64 - 1.
        write: the write's number, 0 to 2**64 - 1.
    """
    return int(_C.rounding_key(seed, column_key, write))
