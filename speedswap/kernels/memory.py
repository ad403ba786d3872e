"""Memory for results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap import _C

__all__ = ["empty"]

# Below this a result has too few pages for their size to count.
_HUGE_BYTES = 4 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialized tensor; on the CPU in huge pages where it is large and the system gives them.

    A large result is new memory each time, and the system provides ordinary pages one by one as they are first
    written: for the rows of a batch that can take several times as long as writing them.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: the CPU by default.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device or "cpu")
    if tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_BYTES:
        _C.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
