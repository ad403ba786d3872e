"""Means of metrics over a data loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from speedswap.batching.nested import Batch
from speedswap.compat.infinitybatch.batches import moved
from speedswap.compat.infinitybatch.codes import InfinityBatchError
from speedswap.compat.infinitybatch.criteria import reduction_of

__all__ = ["in_evaluation_mode", "means"]


def means(
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    batches: Iterable[tuple[Any, Any]],
    outputs_of: Callable[[Any], Any],
    device: torch.device,
) -> dict[str, float]:
    """Each metric's mean over all batches, weighted by samples, or by what a criterion's own mean is over.

    Args:
        metrics: by name, called with outputs and targets of a batch.
        batches: inputs and targets.
        outputs_of: gives the outputs of a batch's inputs, on the device.
        device: where the metrics are computed.

    Raises:
        InfinityBatchError: there are no batches.
    """
    reductions = {name: reduction_of(metric) for name, metric in metrics.items()}
    sums, weights = dict.fromkeys(metrics, 0.0), dict.fromkeys(metrics, 0.0)
    for inputs, targets in batches:
        outputs, targets = outputs_of(inputs), moved(targets, device)
        size = float(Batch((inputs,)).size)
        for name, metric in metrics.items():
            known, value = reductions[name], float(metric(outputs, targets))
            weight = size if known is None or known.normalizer is None else float(known.normalizer(inputs, targets))
            if weight:
                is_sum = known is not None and known.reduction == "sum"
                sums[name] += value if is_sum else value * weight
                weights[name] += weight
    if not any(weights.values()):
        raise InfinityBatchError("the data loader gave no batches to evaluate")
    return {name: sums[name] / weights[name] if weights[name] else math.nan for name in metrics}


@contextmanager
def in_evaluation_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Models in evaluation mode inside; afterwards each of their modules is in the mode that it was in."""
    models = list(models)
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
