"""Find losses that are not what a splitter takes them for, from a few samples, before a batch is split.

The loss of a few samples together is compared with their losses in parts, weighed as micro-batches are. Where the two
differ by more than rounding can explain, the losses of more such parts tell why. Where anything else can make them
differ (random numbers, batch statistics, a function that gives another result each time), nothing is said.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from speedswap.batching.functions import name_of
from speedswap.batching.nested import Batch
from speedswap.batching.oom import forget, is_out_of_memory, release_cached_memory
from speedswap.batching.splitting.few_samples import few_samples
from speedswap.batching.splitting.trial_call import Collective, Observed, no_trace
from speedswap.errors import BatchError, CoupledLossError, SpeedswapError

__all__ = ["LossToCheck", "find_mistake"]

_log = logging.getLogger("speedswap")

SAMPLES = 8

# Kernels of another batch size round otherwise, layer after layer, so a difference of a few machine epsilons proves
# nothing, nor does one below 1e-3 whatever the precision. What is looked for is larger.
_LEAST_DIFFERENCE = 1e-3
_EPSILONS_OF_LOSS = 8
_EPSILONS_OF_LARGEST = 2  # where the loss is the small difference of large values


class LossToCheck(NamedTuple):
    """A loss function and what a splitter has been told of it.

    Attributes:
        function: called with the arguments of a micro-batch and their number of samples; returns a checked loss.
        loss_fn: what the user calls it.
        reduction: as of a splitter.
        normalizer: likewise.
    """

    function: Callable[[tuple[Any, ...], dict[str, Any], int], Tensor]
    loss_fn: Callable[..., Any]
    reduction: Literal["mean", "sum", "none"]
    normalizer: Callable[..., Tensor | float] | None


def find_mistake(loss: LossToCheck, batch: Batch, size: int, modules: Sequence[nn.Module]) -> SpeedswapError | None:
    """Compare the loss of a few samples with those of their parts.

    Args:
        loss: what is checked.
        batch: where the samples come from.
        size: of a micro-batch; fewer samples are taken where that is small.
        modules: those whose buffers the function may change.

    Returns:
        An error that says what is wrong and what to do, or None where nothing is, or nothing is certain.
    """
    count = min(batch.size, SAMPLES, max(2, size))
    while count >= 2:
        failure: Exception | None = None
        try:
            with no_trace(modules, count) as observed:
                return _Comparison(loss, batch, count, observed).mistake()
        except Collective:
            return None
        except Exception as error:
            failure = error  # the interpreter lets go of its frames only after this block
        if not is_out_of_memory(failure):
            _log.debug("the loss function was not checked, as it fails for %d samples: %r", count, failure)
            return None
        forget(failure)
        release_cached_memory()
        count //= 2
    return None


class _Comparison:
    """Losses of a few samples together and apart."""

    def __init__(self, loss: LossToCheck, batch: Batch, count: int, observed: Observed) -> None:
        self._loss = loss
        self._batch = batch
        self._observed = observed
        samples = few_samples(batch, count)
        first = max(1, (count - 1) // 2)  # unequal parts, or what both count equally would not show
        second = first + max(1, (count - first) // 2)
        self._parts = [part for part in (samples[:first], samples[first:second], samples[second:]) if part]
        self._known: dict[tuple[int, ...], Tensor] = {}

    def mistake(self) -> SpeedswapError | None:
        everything = tuple(range(len(self._parts)))
        apart = [(0,), everything[1:]]
        whole = self._of(everything)
        if not self._observed.is_certain or not bool(whole.isfinite().all()):
            return None
        weights = self._weights(apart)
        if weights is None:
            return None
        parts = [self._of(one) if weight else torch.zeros(()) for one, weight in zip(apart, weights, strict=True)]
        if self._loss.reduction == "none":
            expected = torch.cat(parts)
        else:
            expected = sum((part * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros(()))
        difference = _distance(whole, expected)
        if difference <= self._tolerance() or not self._observed.is_certain:
            return None
        if self._changes() > difference / 100:
            return None
        why = "couples" if self._loss.reduction == "none" else self._why()
        return self._error(why, whole, expected) if self._observed.is_certain else None

    def _changes(self) -> float:
        """By how much a loss differs when it is computed again, as of a function that keeps a state of its own."""
        return max(_distance(self._evaluate(parts), loss) for parts, loss in self._known.items())

    def _of(self, parts: tuple[int, ...]) -> Tensor:
        if parts not in self._known:
            self._known[parts] = self._evaluate(parts)
        return self._known[parts]

    def _evaluate(self, parts: tuple[int, ...]) -> Tensor:
        """The loss of some parts together, in float64 on the CPU."""
        args, kwargs = self._take(parts)
        return self._loss.function(args, kwargs, self._count(parts)).detach().double().cpu()

    def _take(self, parts: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._batch.take([index for part in parts for index in self._parts[part]])

    def _count(self, parts: tuple[int, ...]) -> int:
        return sum(len(self._parts[part]) for part in parts)

    def _weights(self, apart: Sequence[tuple[int, ...]]) -> list[float] | None:
        """What a splitter would weigh each by; None where they count nothing at all."""
        if self._loss.reduction != "mean":
            return [1.0] * len(apart)
        if self._loss.normalizer is None:
            counts = [float(self._count(one)) for one in apart]
        else:
            taken = [self._take(one) for one in apart]
            counts = [float(self._loss.normalizer(*args, **kwargs)) for args, kwargs in taken]
        total = sum(counts)
        if not 0 < total < math.inf or min(counts) < 0:  # counts that are none are refused when the batch is weighed
            return None
        return [count / total for count in counts]

    def _tolerance(self) -> float:
        """The difference up to which two losses may be the same one, differently rounded."""
        eps = self._observed.eps
        values = torch.cat([loss.reshape(-1) for loss in self._known.values()])
        values = values[values.isfinite()].abs()
        size = float(values.max()) if len(values) else 0.0
        of_loss = max(_LEAST_DIFFERENCE, _EPSILONS_OF_LOSS * eps) * size
        return of_loss + _EPSILONS_OF_LARGEST * eps * self._observed.largest

    def _why(self) -> str:
        """The kind of mistake, from the losses of all parts and of what can be put together from them."""
        places = range(len(self._parts))
        subsets = [subset for count in range(1, len(places) + 1) for subset in itertools.combinations(places, count)]
        losses = {subset: float(self._of(subset)) for subset in subsets}
        tolerance = self._tolerance()
        counts = [float(self._count((place,))) for place in places]

        def are_means(weights: Sequence[float]) -> bool:
            together = [one for one in subsets if len(one) > 1 and any(weights[place] for place in one)]
            return all(abs(_mean(losses, weights, one) - losses[one]) <= tolerance for one in together)

        if self._loss.reduction == "mean":
            sums = all(abs(sum(losses[place,] for place in one) - losses[one]) <= tolerance for one in subsets)
            if sums:
                return "sums"
        elif are_means(counts):
            return "means"
        elif self._has_constant(losses, tolerance):
            return "constant"
        weights = _weights_of_mean(losses, len(places))
        return "averages" if weights is not None and are_means(weights) else "couples"

    def _has_constant(self, losses: dict[tuple[int, ...], float], tolerance: float) -> bool:
        """Whether the losses are sums with the same number added to each."""
        extra = [
            (sum(losses[place,] for place in one) - loss) / (len(one) - 1)
            for one, loss in losses.items()
            if len(one) > 1
        ]
        return len(extra) > 1 and max(extra) - min(extra) <= tolerance

    def _error(self, why: str, whole: Tensor, expected: Tensor) -> SpeedswapError:
        first = len(self._parts[0])
        rest = sum(map(len, self._parts)) - first
        name = name_of(self._loss.loss_fn)
        if whole.dim():
            seen = f"the losses of {first + rest} samples are others together than in parts of {first} and {rest}"
        else:
            seen = (
                f"{first + rest} samples have the loss {float(whole):.6g} together, but parts of {first} and {rest} of "
                f"them add up to {float(expected):.6g}, weighed as micro-batches are"
            )
        told = f"{seen}; {self._remedy(why)}, or turn this check off with check=False"
        if why == "couples":
            return CoupledLossError(f"loss_fn {name} couples the samples of a batch: {told}")
        return BatchError(f"loss_fn {name} {self._verdict(why)}: {told}")

    def _verdict(self, why: str) -> str:
        if why == "sums":
            return "adds up its samples, where a mean was declared"
        if why == "means":
            return "averages over its samples, where a sum was declared"
        if why == "constant":
            return "adds a term that is no sample's, which each micro-batch would add again"
        if self._loss.normalizer is not None:
            return "averages over something other than what normalizer counts"
        return "averages over something other than samples, such as targets that are not ignored, or class weights"

    def _remedy(self, why: str) -> str:
        if why == "couples":
            return (
                "if it compares them with each other, as contrastive losses do, give encoder and loss to "
                "backward_coupled and declare the loss with speedswap.coupled; if it adds up means over different "
                "things, split it into one call for each"
            )
        if why == "sums":
            return 'construct the splitter with reduction="sum"'
        if why == "means":
            return 'construct the splitter with reduction="mean"'
        if why == "constant":
            return "differentiate that term apart, once a batch"
        counting = "a normalizer that counts it, e.g. normalizer=lambda x, y: (y != -100).sum()"
        if self._loss.reduction == "sum":
            return f'construct the splitter with reduction="mean" and {counting}'
        return f"construct the splitter with {counting}"


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where one is not finite, except where both are not."""
    if found.shape != expected.shape:
        return math.inf
    difference = (found - expected).abs()[found.isfinite()]
    return float(difference.nan_to_num(math.inf).max()) if len(difference) else 0.0


def _mean(losses: dict[tuple[int, ...], float], weights: Sequence[float], subset: tuple[int, ...]) -> float:
    """The weighted mean of some parts' losses; those that count nothing may be anything, NaN as well."""
    total = sum(weights[place] for place in subset)
    return sum(weights[place] * losses[place,] for place in subset if weights[place]) / total


def _weights_of_mean(losses: dict[tuple[int, ...], float], count: int) -> list[float] | None:
    """Weights by which the losses of subsets would be means of the parts' losses; None if they cannot be.

    For each subset S, the sum over its parts i of w_i (L_i - L_S) is 0: the weights are the singular vector of the
    least singular value. Parts whose loss is not finite count nothing.
    """
    finite = [place for place in range(count) if math.isfinite(losses[place,])]
    if not finite:
        return None
    weights = [0.0] * count
    if len(finite) == 1:
        weights[finite[0]] = 1.0
        return weights
    rows = [
        [losses[place,] - loss if place in subset else 0.0 for place in finite]
        for subset, loss in losses.items()
        if len(subset) > 1 and all(place in finite for place in subset)
    ]
    vector = torch.linalg.svd(torch.tensor(rows, dtype=torch.float64)).Vh[-1]
    vector = vector / vector.sum()
    if not bool(vector.isfinite().all()) or float(vector.min()) < -0.01:
        return None
    for place, weight in zip(finite, vector.clamp(min=0).tolist(), strict=True):
        weights[place] = weight
    return weights
