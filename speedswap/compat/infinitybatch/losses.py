"""Losses: steps on a batch, how criteria are reduced over samples, and means of metrics over a data loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speedswap.batching.nested import Batch
from speedswap.compat.infinitybatch.codes import InfinityBatchError
from speedswap.compat.infinitybatch.components import moved


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
    kind = type(criterion)
    if kind in _OVER_ELEMENTS or kind in _OVER_TARGETS:
        if criterion.reduction != "mean":
            return ("sum", None) if criterion.reduction == "sum" else None
        if kind in _OVER_TARGETS:
            return "mean", _targets_counter(criterion.weight, criterion.ignore_index)
        return None if getattr(criterion, "weight", None) is not None else ("mean", None)
    if any(criterion is function for function in _ELEMENT_FUNCTIONS):
        return "mean", None
    if any(criterion is function for function in _TARGET_FUNCTIONS):
        return "mean", _targets_counter(None, -100)
    return None


def _targets_counter(weight: Tensor | None, ignored: int) -> Normalizer:
    """Return a function that counts the targets that are not ignored, by the weights of their classes."""

    def count(inputs: Any, targets: Tensor) -> Tensor | float:
        if targets.is_floating_point():  # probabilities of classes: the mean is over samples
            return len(targets)
        valid = targets[targets != ignored]
        return valid.numel() if weight is None else weight.to(valid.device)[valid].sum()

    return count


def means(
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    batches: Iterable[tuple[Any, Any]],
    outputs_of: Callable[[Any], Any],
    device: torch.device,
) -> dict[str, float]:
    """Return each metric's mean over all batches, weighted by samples, or by the count of a criterion's own mean.

    Args:
        metrics: functions of the outputs and targets of a batch, by name.
        batches: inputs and targets.
        outputs_of: returns the outputs of a batch's inputs, on the device.
        device: the device that the metrics are computed on.

    Raises:
        InfinityBatchError: there are no batches.
    """
    reductions = {name: reduction_of(metric) for name, metric in metrics.items()}
    sums, weights = dict.fromkeys(metrics, 0.0), dict.fromkeys(metrics, 0.0)
    for inputs, targets in batches:
        outputs, targets = outputs_of(inputs), moved(targets, device)
        size = float(Batch((inputs,)).size)
        for name, metric in metrics.items():
            kind, normalizer = reductions[name] or ("mean", None)
            value = float(metric(outputs, targets))
            weight = size if normalizer is None else float(normalizer(inputs, targets))
            if weight:
                sums[name] += value if kind == "sum" else value * weight
                weights[name] += weight
    if not any(weights.values()):
        raise InfinityBatchError("the data loader gave no batches to evaluate")
    return {name: sums[name] / weights[name] if weights[name] else math.nan for name in metrics}
