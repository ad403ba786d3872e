"""The two memories that rows move between, in the kernels' own terms: pointers, strides and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels.fence import Fence

__all__ = ["ENGINES", "Part", "Records", "Stored", "engine_part", "engine_parts", "stored_bytes"]

# auto: whichever is fastest here, by measurement. The others are in kernels/cuda/engines.py.
ENGINES = ("auto", "zero_copy", "staged", "split")

# As in csrc/rows_cpu.h.
FORMS = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
SCALE_BYTES = 4


class Records(NamedTuple):
    """``num_rows`` records in one piece of memory, ``stride`` bytes apart.

    ``pinned`` says that host memory is registered with CUDA, so that the GPU may read and write it. ``owner`` is
    whatever keeps the memory alive. ``engine`` is the way between host memory and a GPU (:data:`ENGINES`). ``fence``
    is where what GPUs do with pinned memory is noted, and waited for before the CPU touches it; None where the caller
    sees to that.
    """

    pointer: int
    stride: int
    num_rows: int
    device: torch.device
    pinned: bool
    owner: object
    engine: str = "auto"
    fence: Fence | None = None


class Stored(NamedTuple):
    """How records hold a column in fewer bytes than its float32 block.

    ``dtype`` is float16, bfloat16, or int8: then a row is its scale, a float32, and its integers. ``key`` is None to
    round to nearest, ties to even. Else rounding is stochastic: to either neighbour, so that the mean is the value, by
    the random stream of that key (:func:`speedswap.kernels.rounding_key`); not for int8.
    """

    dtype: torch.dtype
    key: int | None = None


class Part(NamedTuple):
    """One column: ``offset`` bytes into each record, and the block that holds its rows.

    ``block`` is contiguous, shape (n, ...); the bytes of one of its rows are the column's width, unless it is stored
    otherwise: then the block is float32, and converted on the way.
    """

    offset: int
    block: Tensor
    stored: Stored | None = None


def stored_bytes(dtype: torch.dtype, items: int) -> int:
    """Bytes of a row of ``items`` as a record holds it, where its block is float32."""
    return items * dtype.itemsize + (SCALE_BYTES if dtype is torch.int8 else 0)


Copied = tuple[int, int, int, int]
Converted = tuple[int, int, int, int, int, bool, int]


def engine_parts(parts: Sequence[Part]) -> list[Copied | Converted]:
    """Parts with blocks in host memory as the CPU engine takes them; the blocks may be given as bytes."""
    return [
        engine_part(offset, block.data_ptr(), block.nbytes // len(block), stored) for offset, block, stored in parts
    ]


def engine_part(offset: int, block: int, row_bytes: int, stored: Stored | None) -> Copied | Converted:
    """A column as the CPU engine takes it.

    Args:
        offset: in a record.
        block: address of the block.
        row_bytes: of a row in the block.
        stored: how records hold it.
    """
    if stored is None:
        return offset, row_bytes, block, row_bytes
    width = stored_bytes(stored.dtype, row_bytes // torch.float32.itemsize)
    return offset, width, block, row_bytes, FORMS[stored.dtype], stored.key is not None, stored.key or 0
