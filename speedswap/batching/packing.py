"""A batch's samples divided into micro-batches: evenly, or packed by what they cost and are predicted to take."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from speedswap.batching.elastic import even_sizes
from speedswap.batching.memory import AllocatorGauge, LimitedMemory
from speedswap.batching.nested import Arguments, Batch, joined
from speedswap.errors import BatchError

_LEAST_SEEN = 3
_MARGIN = 1.05
# Powers of a sample's cost that its bytes grow with, likely ones first; attention grows with the square of the length.
_FORMS = sorted(
    (form for count in (1, 2, 3) for form in itertools.combinations(range(3), count)),
    key=lambda form: (1 not in form, len(form)),
)


class MemoryModel:
    """Bytes of a micro-batch of n samples of cost c: a constant, and n times a + b c + d c², none negative.

    One micro-batch of each order of magnitude in n and c is remembered, the latest.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._factors: Any = None

    def add(self, samples: int, cost: int, nbytes: int) -> None:
        """Learn what a micro-batch has taken."""
        self._seen[samples.bit_length(), cost.bit_length()] = samples, cost, nbytes
        if not (self._factors is not None and nbytes <= self._at(samples, cost) <= 1.2 * nbytes):
            self._fit()

    def _at(self, samples: int, cost: int) -> float:
        return float(self._factors[0] + samples * (self._factors[1:] @ [1, cost, cost * cost]))

    def _fit(self) -> None:
        if len(self._seen) < _LEAST_SEEN:
            return
        samples, costs, nbytes = np.array([*self._seen.values()], dtype=np.float64).T
        columns = np.stack([np.ones_like(samples), samples, samples * costs, samples * costs * costs], 1)
        weighed = columns / nbytes[:, None]  # relative errors count
        best = None
        for form in _FORMS:
            for chosen in ([0, *(power + 1 for power in form)], [power + 1 for power in form]):
                factors = np.zeros(4)
                factors[chosen] = np.linalg.lstsq(weighed[:, chosen], np.ones(len(weighed)), rcond=None)[0]
                error = round(float(np.abs(weighed @ factors - 1).max()), 2)
                if factors.min() >= 0 and (best is None or error < best[0]):
                    best = error, factors
        if best is not None and (best[1] > 0).any():
            self._factors = best[1]
            self._factors = best[1] * max(_MARGIN, 1 / (weighed @ best[1]).min())  # not below anything that was seen

    def most(self, cost: int, nbytes: int) -> int | None:
        """Return the most samples of one cost that fit; None while too little is known."""
        if self._factors is None:
            return None
        per_sample = self._at(1, cost) - self._factors[0]
        return int((nbytes - self._factors[0]) / per_sample) if per_sample > 0 else None

    def proven(self, nbytes: int) -> int:
        """Return the highest cost of a micro-batch that has taken half of the memory or more, and fitted; 0 if none."""
        return max((samples * cost for samples, cost, taken in self._seen.values() if 2 * taken >= nbytes), default=0)


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch.

    Attributes:
        index: its number, from 0.
        samples: those of the batch that are in it, at least one.
        size: their number; 0 for a pass that only other ranks need.
        cost: of the micro-batch, in the unit of the limit.
        escalates: whether it is one sample that does not fit as usual.
    """

    index: int
    samples: slice | list[int]
    size: int
    cost: int
    escalates: bool = False


class Alone(NamedTuple):
    """The samples that escalate where not all fit.

    Attributes:
        cost: the least of theirs.
        limit: on the micro-batches of the others.
    """

    cost: int = 1
    limit: int = 1


class SamplePacking:
    """The ways to divide one batch.

    A micro-batch costs as many times its costliest sample as it has samples, as if the others were padded to that one.
    Without costs, neighbouring samples are divided evenly, as views; with them, samples of similar cost share a
    micro-batch, and the costliest come first.

    Args:
        batch: the batch.
        costs: of each sample, positive; None where each costs 1.
        side_by_side: whether all ranks run the same passes.

    Attributes:
        batch: the same.
        is_selective: whether the costliest samples escalate without the others.
        whole: the cost of the batch as one micro-batch.
        order: the samples in the order of micro-batches, the costliest first; None where neighbours share one.
        alone: the samples that escalate, with a limit below 1.
        model: what micro-batches take; None where that is not known.
        nbytes: the memory for one.
    """

    def __init__(self, batch: Batch, costs: Sequence[int] | None = None, *, side_by_side: bool = False) -> None:
        self.batch = batch
        self.is_selective = costs is not None and not side_by_side
        self.whole = batch.size
        self.alone = Alone()
        self.model: MemoryModel | None = None
        self.nbytes = 0
        self.order: list[int] | None = None
        self._costs: list[int] | None = None
        if costs:
            self.order = sorted(range(batch.size), key=costs.__getitem__, reverse=True)
            self._costs = [costs[sample] for sample in self.order]
            self.whole = batch.size * self._costs[0]

    @property
    def is_even(self) -> bool:
        """True if the number of micro-batches follows from the number of samples."""
        return self._costs is None

    def escalating(self, limit: int) -> int:
        """Return the number of samples that escalate, each a micro-batch."""
        if limit > 0 or self._costs is None:
            return 0 if limit > 0 else self.batch.size
        return sum(cost >= self.alone.cost for cost in self._costs)

    def count(self, limit: int) -> int:
        """Return the least number of micro-batches of which none costs more than ``limit``, but for single samples."""
        if self._costs is None:
            return -(-self.batch.size // max(1, limit))
        first = self.escalating(limit)
        return first + len(self._packed(self._costs[first:], limit if limit > 0 else self.alone.limit))

    def parts(self, count: int, limit: int = 1) -> list[MicroBatch]:
        """Return the micro-batches, ``count`` of nearly equal cost; passes without samples where there are too few."""
        size = self.batch.size
        full = min(count, size)
        first = self.escalating(limit)
        if self._costs is None:
            sizes = even_sizes(size, full) if full else []
            costs = [1] * size
        else:
            sizes = [1] * first + self._balanced(self._costs[first:], full - first)
            costs = self._costs
        begins = itertools.accumulate(sizes, initial=0)
        parts = [
            MicroBatch(index, _chosen(self.order, begin, begin + length), length, length * costs[begin], index < first)
            for index, (length, begin) in enumerate(zip(sizes, begins, strict=False))
        ]
        empty = (MicroBatch(index, slice(size - 1, size), 0, 0, limit < 1) for index in range(full, count))
        return [*parts, *empty]

    def _packed(self, costs: list[int], limit: int, most: float = math.inf) -> list[int]:
        """Return the sizes of micro-batches as full as the limit allows, costliest samples first; of ``most`` + 1."""
        sizes: list[int] = []
        begin = 0
        while begin < len(costs) and len(sizes) <= most:
            fitting = limit // costs[begin]
            if self.model is not None:
                predicted = self.model.most(costs[begin], self.nbytes)
                fitting = fitting if predicted is None else min(fitting, predicted)
            sizes.append(min(max(1, fitting), len(costs) - begin))
            begin += sizes[-1]
        return sizes

    def _balanced(self, costs: list[int], count: int) -> list[int]:
        """Return the sizes of ``count`` micro-batches, the costliest of which costs as little as possible."""
        if not costs:
            return []
        limits = range(1, len(costs) * costs[0])
        place = bisect_left(limits, True, key=lambda limit: len(self._packed(costs, limit, count)) <= count)
        sizes = self._packed(costs, place + 1)
        while len(sizes) < count:
            place = sizes.index(max(sizes))
            sizes[place : place + 1] = even_sizes(sizes[place], 2)
        return sizes


def _chosen(order: list[int] | None, begin: int, end: int) -> slice | list[int]:
    """Return some samples, as a slice where they are neighbours or all."""
    if order is None or end - begin == len(order):
        return slice(begin, end)
    samples = order[begin:end]
    first = samples[0]
    return slice(first, first + len(samples)) if samples == list(range(first, first + len(samples))) else samples


def costs_of(batch: Batch, cost: Callable[..., Any] | None) -> list[int]:
    """Return what each sample costs: by a function of the batch's arguments, or its length without one.

    Raises:
        BatchError: no value of the batch has lengths, or the function does not return a number for each sample.
    """
    if cost is None:
        lengths = batch.lengths()
        if lengths is None:
            raise BatchError(
                "micro_batch_tokens counts tokens, and nothing in the batch has samples of different lengths; pass a "
                "jagged tensor, speedswap.batching.Padded(tensor, lengths) or PerSample(list), or give cost="
            )
        return [max(1, length) for length in lengths]
    args, kwargs = batch.take(slice(0, batch.size))
    with torch.no_grad():
        given = cost(*args, **kwargs)
    if given is None:
        raise BatchError(f"cost(…) returned None for {batch.size} samples; return one number for each, at least 0")
    found = torch.as_tensor(given).double()
    if found.shape != (batch.size,) or not bool(((found >= 0) & found.isfinite()).all()):
        raise BatchError(
            f"cost(…) returned {found.flatten()[:8].tolist()} of shape {tuple(found.shape)} for {batch.size} samples; "
            "return one number for each, at least 0"
        )
    return [max(1, math.ceil(number)) for number in found.tolist()]


@dataclass(eq=False)
class Parts:
    """The micro-batches of one attempt at a batch, and the one that is worked on.

    Attributes:
        packing: of the batch.
        each: the micro-batches.
        gauge: measures their memory; None where it is not needed.
        present: the one worked on; None before the first and after the last.
    """

    packing: SamplePacking
    each: list[MicroBatch]
    gauge: LimitedMemory | AllocatorGauge | None = None
    present: MicroBatch | None = field(default=None, init=False)

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each."""
        return [part.size for part in self.each]

    @property
    def order(self) -> list[int] | None:
        """The place of each sample among those of all micro-batches; None if that is its place in the batch."""
        order = self.packing.order
        if order is None or self.sizes[0] == len(order):
            return None
        return sorted(range(len(order)), key=order.__getitem__)

    def arguments(self, part: MicroBatch) -> Arguments:
        """Return the arguments of a function for one micro-batch."""
        return self.packing.batch.take(part.samples)

    def joined(self, results: Sequence[Any]) -> Any:
        """Join the results of all micro-batches that have samples, see :func:`~speedswap.batching.nested.joined`."""
        return joined(results, [size for size in self.sizes if size], self.order)

    def in_turn(self, parts: Iterable[MicroBatch] | None = None) -> Iterator[MicroBatch]:
        """Yield each micro-batch, by default of all, and note it as :attr:`present` meanwhile."""
        model, gauge = self.packing.model, self.gauge
        before: int | None = None
        for part in self.each if parts is None else parts:
            self.present = part
            if gauge is not None:
                gauge.reset_peak()
                before = gauge.peak_bytes if before is None else before
            yield part
            is_usual = part.size and not part.escalates  # the same sample takes less on a rung
            if model is not None and gauge is not None and before is not None and is_usual:
                model.add(part.size, part.cost // part.size, max(1, gauge.peak_bytes - before))
        self.present = None
