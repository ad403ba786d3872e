"""Which losses are sums or means over samples, so that parts of a batch can be differentiated one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Reduction", "reduction_of"]


class Reduction(NamedTuple):
    """What a splitter has to know of a loss.

    Attributes:
        reduction: as of :class:`speedswap.BatchSplitter`.
        normalizer: likewise; called with inputs and targets.
    """

    reduction: Literal["mean", "sum"]
    normalizer: Callable[[Any, Any], Tensor | float] | None = None


# Their means are over elements, of which each sample has equally many.
_OVER_ELEMENTS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
)
_OVER_TARGETS = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENT_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
_TARGET_FUNCTIONS = (F.cross_entropy, F.nll_loss)


def reduction_of(criterion: Any) -> Reduction | None:
    """How a criterion of torch's own is reduced; None for others, and where that depends on more than samples.

    >>> reduction_of(nn.MSELoss(reduction="sum")).reduction
    'sum'
    >>> reduction_of(lambda outputs, targets: outputs.std()) is None
    True
    """
    kind = type(criterion)
    if kind in _OVER_ELEMENTS or kind in _OVER_TARGETS:
        if criterion.reduction == "sum":
            return Reduction("sum")
        if criterion.reduction == "none":
            return None
        if kind in _OVER_TARGETS:
            return Reduction("mean", _targets_counter(criterion.weight, criterion.ignore_index))
        return None if getattr(criterion, "weight", None) is not None else Reduction("mean")
    if any(criterion is function for function in _ELEMENT_FUNCTIONS):
        return Reduction("mean")
    if any(criterion is function for function in _TARGET_FUNCTIONS):
        return Reduction("mean", _targets_counter(None, -100))
    return None


def _targets_counter(weight: Tensor | None, ignored: int) -> Callable[[Any, Tensor], Tensor | float]:
    """Counts the targets that are not ignored, by the weights of their classes."""

    def count(inputs: Any, targets: Tensor) -> Tensor | float:
        if targets.is_floating_point():  # probabilities of classes: the mean is over samples
            return len(targets)
        valid = targets[targets != ignored]
        return valid.numel() if weight is None else weight.to(valid.device)[valid].sum()

    return count
