"""One optimizer step on a batch: its loss, and which optimizers take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

__all__ = ["Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """One of the steps that are taken on each batch, where there are several models, criteria or optimizers.

    Attributes:
        loss: called with the models, the criteria (both as InfinityBatch has them: one, a list, or by name), and inputs
            and targets of a micro-batch on the forward device; returns its loss. One that compares samples with each
            other, or is reduced otherwise than ``reduction`` and ``normalizer`` say, is refused on its first batch.
        optimizers: the names, or the places in the list, of the optimizers that step; None for all.
        reduction: what ``loss`` does with its samples, as of :class:`speedswap.BatchSplitter`.
        normalizer: what its mean is over, called with inputs and targets; samples by default.
    """

    loss: Callable[[Any, Any, Any, Any], Tensor]
    optimizers: Iterable[Any] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    normalizer: Callable[[Any, Any], Tensor | float] | None = None
