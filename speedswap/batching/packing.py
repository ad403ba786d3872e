"""A batch's samples divided into micro-batches: evenly, or packed by what they cost."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from speedswap.batching.elastic import even_sizes
from speedswap.batching.nested import Arguments, Batch, joined
from speedswap.errors import BatchError


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
        alone: the samples that escalate, with a limit below 1.
    """

    def __init__(self, batch: Batch, costs: Sequence[int] | None = None, *, side_by_side: bool = False) -> None:
        self.batch = batch
        self.is_selective = costs is not None and not side_by_side
        self.whole = batch.size
        self.alone = Alone()
        self._costs: list[int] | None = None
        if costs:
            self._order = sorted(range(batch.size), key=costs.__getitem__, reverse=True)
            self._costs = [costs[sample] for sample in self._order]
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
            costs, order = [1] * size, None
        else:
            sizes = [1] * first + self._balanced(self._costs[first:], full - first)
            costs, order = self._costs, self._order
        begins = itertools.accumulate(sizes, initial=0)
        parts = [
            MicroBatch(index, _chosen(order, begin, begin + length), length, length * costs[begin], index < first)
            for index, (length, begin) in enumerate(zip(sizes, begins, strict=False))
        ]
        empty = (MicroBatch(index, slice(size - 1, size), 0, 0, limit < 1) for index in range(full, count))
        return [*parts, *empty]

    def _packed(self, costs: list[int], limit: int, most: float = math.inf) -> list[int]:
        """Return the sizes of micro-batches as full as the limit allows, costliest samples first; of ``most`` + 1."""
        sizes: list[int] = []
        begin = 0
        while begin < len(costs) and len(sizes) <= most:
            sizes.append(min(max(1, limit // costs[begin]), len(costs) - begin))
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
        found = torch.as_tensor(cost(*args, **kwargs)).double()
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
        present: the one worked on; None before the first and after the last.
    """

    packing: SamplePacking
    each: list[MicroBatch]
    present: MicroBatch | None = field(default=None, init=False)

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each."""
        return [part.size for part in self.each]

    @property
    def order(self) -> list[int] | None:
        """The place of each sample among those of all micro-batches; None if that is its place in the batch."""
        if self.packing.is_even:
            return None
        everything = range(self.packing.batch.size)
        samples = [
            sample
            for part in self.each
            if part.size
            for sample in (everything[part.samples] if isinstance(part.samples, slice) else part.samples)
        ]
        return sorted(everything, key=samples.__getitem__)

    def arguments(self, part: MicroBatch) -> Arguments:
        """Return the arguments of a function for one micro-batch."""
        return self.packing.batch.take(part.samples)

    def joined(self, results: Sequence[Any]) -> Any:
        """Join the results of all micro-batches that have samples, see :func:`~speedswap.batching.nested.joined`."""
        return joined(results, [size for size in self.sizes if size], self.order)

    def in_turn(self, parts: Iterable[MicroBatch] | None = None) -> Iterator[MicroBatch]:
        """Yield each micro-batch, by default of all, and note it as :attr:`present` meanwhile."""
        for part in self.each if parts is None else parts:
            self.present = part
            yield part
        self.present = None
