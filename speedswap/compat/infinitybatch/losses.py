"""Losses: steps on a batch, and how criteria are reduced over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One of the steps on each batch, for training several models, criteria or optimizers.

    Attributes:
        loss: called with the models, the criteria (both as InfinityBatch has them: one, a list, or by name), and inputs
            and targets of a micro-batch on the forward device; returns its loss. A loss that compares samples with each
            other, or is reduced otherwise than ``reduction`` and ``normalizer`` say, is refused on its first batch.
        optimizers: names or positions of the optimizers that step; None for all.
        reduction: the reduction of ``loss`` over samples, as for :class:`speedswap.BatchSplitter`.
        normalizer: called with inputs and targets; returns the count that the mean is over, samples by default.
    """

    loss: Callable[[Any, Any, Any, Any], Tensor]
    optimizers: Iterable[Any] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    normalizer: Callable[[Any, Any], Tensor | float] | None = None


# Their means are over elements, and each sample has equally many.
_OVER_ELEMENTS = {
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss),
    *(nn.SoftMarginLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits),
}
_OVER_TARGETS = {nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss}
Normalizer = Callable[[Any, Any], Tensor | float]
Reduction = tuple[Literal["mean", "sum"], Normalizer | None]
"""The reduction of a loss and its normalizer, as for :class:`speedswap.BatchSplitter`."""


def reduction_of(criterion: Any) -> Reduction | None:
    """Return the reduction of one of torch's criteria; None for others, and if it depends on more than samples.

    >>> reduction_of(nn.MSELoss(reduction="sum"))
    ('sum', None)
    >>> reduction_of(lambda outputs, targets: outputs.std()) is None
    True
    """
    kind = criterion if isinstance(criterion, FunctionType) else type(criterion)
    if kind not in _OVER_ELEMENTS | _OVER_TARGETS:
        return None
    reduction, weight = getattr(criterion, "reduction", "mean"), getattr(criterion, "weight", None)
    if reduction == "mean" and kind in _OVER_TARGETS:
        return "mean", _targets_counter(weight, getattr(criterion, "ignore_index", -100))
    if reduction == "sum":
        return "sum", None
    return ("mean", None) if reduction == "mean" and weight is None else None


def _targets_counter(weight: Tensor | None, ignored: int) -> Normalizer:
    """Return a function that counts the targets that are not ignored, by the weights of their classes."""

    def count(inputs: Any, targets: Tensor) -> Tensor | float:
        if targets.is_floating_point():  # probabilities of classes: the mean is over samples
            return len(targets)
        valid = targets[targets != ignored]
        return valid.numel() if weight is None else weight.to(valid.device)[valid].sum()

    return count
