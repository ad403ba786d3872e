"""Memory for results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap import _C

__all__ = ["empty"]

# From here on torch's memory is new from the system each time.
_LARGE_BYTES = 1 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialized tensor; on the CPU, where it is large, in memory that earlier results have given back.

    Memory that is new from the system is provided page by page as it is first written: for the rows of a batch that
    takes several times as long as writing them. Such a tensor is like any other, but for ``resize_``, which cannot make
    it larger.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: the CPU by default.
    """
    device = torch.device(device or "cpu")
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(_C.Buffer(nbytes), dtype=torch.uint8).view(dtype).view(tuple(shape))
