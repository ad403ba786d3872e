"""Which samples of a batch tell most about a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedswap.batching.nested import Batch

__all__ = ["few_samples"]

_MOST_ELEMENTS = 2**20  # of a tensor that is looked through for them


def few_samples(batch: Batch, count: int) -> list[int]:
    """Choose samples that differ in what a loss may average over.

    Of the tensor that looks most like ignored targets, a mask, or targets, in this order, the samples with the least
    mean come first and those with the greatest last; so samples whose targets are ignored are among them, and apart
    from others.

    Returns:
        Different indices, as many as asked for; spread over the batch where no tensor holds integers.

    >>> few_samples(Batch((torch.randn(6, 2), torch.tensor([3, 1, -100, 2, 2, 0]))), 4)
    [2, 5, 4, 0]
    """
    found, best = None, 0
    for column in batch.columns():
        tensor = _as_tensor(column)
        rank = 0 if tensor is None else _rank(tensor)
        if rank and rank >= best:  # of equals the last: targets come after inputs
            found, best = tensor, rank
    if found is None:
        return [index * batch.size // count for index in range(count)]
    means = found.reshape(batch.size, -1).double().mean(1)
    order = means.argsort(stable=True).tolist()
    least = count // 2
    return [*order[:least], *order[batch.size - (count - least) :]]


def _as_tensor(column: Any) -> Tensor | None:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        column = torch.from_numpy(column)
    if not isinstance(column, Tensor) or column.layout != torch.strided or column.is_complex():
        return None
    return column.detach() if 0 < column.numel() <= _MOST_ELEMENTS else None


def _rank(tensor: Tensor) -> int:
    """How much a tensor looks like what decides over which samples count."""
    if tensor.dtype == torch.bool:
        return 2
    if tensor.is_floating_point():
        is_mask = bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())
        return 2 if is_mask else 0
    return 3 if bool((tensor < 0).any()) else 1
