"""Memory for results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap import _C

__all__ = ["empty"]

# From here on torch's memory is new from the system each time; on a GPU it comes from blocks of its own.
_LARGE_BYTES = 1 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialized tensor; where it is large, in memory that earlier results have given back.

    On the CPU, memory that is new from the system is provided page by page as it is first written: for the rows of a
    batch that takes several times as long as writing them. Such a tensor is like any other, but for ``resize_``, which
    cannot make it larger. On a GPU, torch keeps what was given back, but batches differ a little in their rows, and so
    hardly one would fit where another was: there is room for up to an eighth more rows, and sizes repeat.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: the CPU by default.
    """
    device = torch.device(device or "cpu")
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" and nbytes >= _LARGE_BYTES:
        return torch.empty((_rounded(shape[0]), *shape[1:]), dtype=dtype, device=device)[: shape[0]]
    if device.type != "cpu" or nbytes < _LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(_C.Buffer(nbytes), dtype=torch.uint8).view(dtype).view(tuple(shape))


def _rounded(count: int) -> int:
    """The count, rounded up to one of eight steps from each power of two to the next."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
