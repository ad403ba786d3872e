"""The bags of several tables, pooled in as few passes as possible, and their order in the output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import near
from speedswap.swapping.collections.configs import EmbeddingBagConfig
from speedswap.swapping.collections.features import FeatureBatch, Slots
from speedswap.swapping.lookup import pool


class Pass(NamedTuple):
    """Slots of one group whose bags are pooled in one pass: sums and means together, maxima separately.

    Attributes:
        group: its index.
        start, stop: the slots.
        mode: "sum", "mean" or "max".
        has_padding: True if a table has a padding row, whose ids do not count.
        is_mean: if there are sums and means, bool, shape (slots, 1): True for a mean.
    """

    group: int
    start: int
    stop: int
    mode: str
    has_padding: bool
    is_mean: Tensor | None = None

    def pooled(self, found: FeatureBatch, weight: Tensor, local: Tensor) -> Tensor:
        """Return the slots' bags, shape (batch, slots · dim).

        Args:
            found: the batch.
            weight: the group's rows.
            local: each id's index among them, for all ids of the group.
        """
        features, offsets, factors = self.stop - self.start, found.offsets, found.weights
        if features < len(found.slots.features):  # else all ids of the batch are looked up here
            begin, end = found.bounds(self.group)
            first, last = found.span(range(self.start, self.stop))
            offsets = offsets[self.start * found.stride : self.stop * found.stride + 1]
            offsets = offsets - first if first else offsets
            if (first, last) != (begin, end):
                local = local.reshape(-1)[first - begin : last - begin]
            factors = None if factors is None else factors[first:last]
        factors = None if factors is None else factors.to(weight.dtype)
        counts, mode, is_mean = self._counting(found) if self.has_padding else None, self.mode, self.is_mean
        if found.is_single and counts is None and mode == "mean":
            mode, is_mean = "sum", None
        is_mean = None if is_mean is None else near(is_mean, offsets.device)
        return pool(weight, local, offsets, mode, factors, counts, is_mean=is_mean, features=features)

    def _counting(self, found: FeatureBatch) -> Tensor | None:
        """Return a mask of the ids, bool, shape (ids,): False for padding. None if the host knows that all count."""
        paddings = found.slots.paddings[self.start : self.stop]
        begin, _ = found.bounds(self.group)
        first, last = found.span(range(self.start, self.stop))
        rows = found.rows(self.group)[first - begin : last - begin]
        counts, paddings = found.asked.counts, near(paddings, rows.device)
        sizes = (found.offsets[:: found.stride].diff() if counts is None else counts)[self.start : self.stop]
        if counts is not None and int(sizes.min()) == int(sizes.max()):
            counting = (rows.view(len(sizes), -1) != paddings.unsqueeze(1)).view(-1)
        else:
            sizes = sizes if counts is None else near(sizes, rows.device)
            counting = rows != torch.repeat_interleave(paddings, sizes, output_size=len(rows))
        return None if rows.device.type == "cpu" and bool(counting.all()) else counting


class PooledColumns:
    """The passes of a collection, and the columns of its output.

    Args:
        slots: the lookups.
        configs: the tables, in the order of the output.

    Attributes:
        keys: the output's keys, in order.
        widths: columns per key.
        passes: the passes, in group order.
    """

    def __init__(self, slots: Slots, configs: Sequence[EmbeddingBagConfig]) -> None:
        self.passes = [each for group in range(len(slots.of_group)) for each in _passes(group, slots)]
        order = slots.in_order_of(configs)
        self.keys = [slots.keys[slot] for slot in order]
        self.widths = [slots.configs[slot].embedding_dim for slot in order]
        pass_of = [index for index, each in enumerate(self.passes) for _ in range(each.start, each.stop)]
        which = [pass_of[slot] for slot in order]
        # Columns of one pass that stay together: its index, and their number.
        runs = groupby(zip(which, self.widths, strict=True), key=itemgetter(0))
        self._runs = [(index, sum(width for _, width in run)) for index, run in runs]

    def joined(self, pooled: Sequence[Tensor]) -> Tensor:
        """Join the passes' results in output order; without a copy if there is only one pass.

        Args:
            pooled: each pass's result.
        """
        if len(self._runs) == 1:
            return pooled[0]
        widths = [[width for which, width in self._runs if which == index] for index in range(len(pooled))]
        pieces = [iter(torch.split(each, some, dim=1)) for each, some in zip(pooled, widths, strict=True)]
        return torch.cat([next(pieces[which]) for which, _ in self._runs], dim=1)


def _passes(group: int, slots: Slots) -> list[Pass]:
    """Return the passes of one group, maxima last."""
    some = slots.of_group[group]
    modes = [slots.configs[slot].pooling for slot in some]
    sums = len(modes) - modes.count("max")
    pads, passes = [row >= 0 for row in slots.paddings[some.start : some.stop].tolist()], []
    if sums:
        means = [mode == "mean" for mode in modes[:sums]]
        is_mean = torch.tensor(means).unsqueeze(1) if any(means) and not all(means) else None
        mode = "mean" if any(means) else "sum"
        passes.append(Pass(group, some.start, some.start + sums, mode, any(pads[:sums]), is_mean))
    if sums < len(modes):
        passes.append(Pass(group, some.start + sums, some.stop, "max", any(pads[sums:])))
    return passes
