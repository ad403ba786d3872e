"""One lookup of several features' ids, each in a separate range of one table's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.cuda.lookups import FeatureTable, join, merge, number
from speedswap.kernels.host import address, as_read, threads_for
from speedswap.kernels.ids import of_lookups


class JoinedBags(NamedTuple):
    """The bags of several features, feature by feature, on a GPU.

    Attributes:
        offsets: the position of each bag's first id among all ids, and their number, int64.
        stride: the number of bags per feature.
        wrong: int64, shape (1,): not 0 if the features' own offsets do not ascend from 0 to the number of ids.
    """

    offsets: Tensor
    stride: int
    wrong: Tensor


@dataclass(eq=False)
class FeatureIds:
    """The ids of several features, and each feature's range of rows in a table. The caller has checked them.

    Attributes:
        ids: the ids of all features, int32 or int64, shape (count,), dense, on any device; or on a GPU those of each
            feature, of one or two dimensions.
        bases: the first row of each feature's range, int64, shape (features,), contiguous, on the CPU.
        limits: each range's number of rows, like ``bases``: ids are below it.
        counts: the number of each feature's ids, like ``bases``; None if only ``bags`` tells them, and they sum to all
            ids.
        begins: the position of each feature's first id in ``ids``, like ``bases``, but on the ids' device if ``counts``
            is None, with one more item for :func:`find_together`; by default the features follow one another and have
            all ids.
        offsets: on a GPU, each feature's offsets, int32 or int64, contiguous, None for bags of one size; and True if
            the last of them is the number of ids.
        bags: the features' bags, once :func:`join_bags` has joined them.
    """

    ids: Tensor | Sequence[Tensor]
    bases: Tensor
    limits: Tensor
    counts: Tensor | None
    begins: Tensor | None = None
    offsets: Sequence[tuple[Tensor | None, bool]] = ()
    bags: JoinedBags | None = None
    _near: FeatureTable | None = None

    @functools.cached_property
    def total(self) -> int:
        """The number of rows to look up."""
        return len(self.ids) if self.counts is None else int(self.counts.sum())

    @property
    def near(self) -> FeatureTable:
        """The features on the ids' GPU."""
        if self._near is None:
            ids, bases, counts, begins = self.ids, self.bases, self.counts, self.begins
            self._near = FeatureTable(
                [ids] if isinstance(ids, Tensor) else ids,
                bases.shape[0],
                bases.data_ptr(),
                self.limits.data_ptr(),
                counts=0 if counts is None else counts.data_ptr(),
                begins=0 if begins is None or not begins.is_cpu else begins.data_ptr(),
                bags=self.offsets,
            )
        return self._near

    def on_host(self) -> FeatureIds:
        """Return the ids in host memory, after waiting for them."""
        ids = self.ids if isinstance(self.ids, Tensor) else torch.cat([each.reshape(-1) for each in self.ids])
        counts = self.counts
        if counts is None:
            assert self.bags is not None
            counts = self.bags.offsets[:: self.bags.stride].diff().cpu()
        begins = None if self.begins is None else self.begins.cpu()
        return FeatureIds(ids.cpu(), self.bases, self.limits, counts, begins)


def join_bags(asked: FeatureIds, stride: int) -> JoinedBags:
    """Join the bags of features on a GPU, and check that their offsets ascend, without waiting for the answer.

    Args:
        asked: the features, with their offsets; its ``bags`` become the result.
        stride: the number of bags per feature.
    """
    asked.bags = JoinedBags(join(asked.near, stride), stride, asked.near.wrong)
    return asked.bags


def merge_ids(asked: FeatureIds, indices: Tensor | None = None) -> Tensor:
    """Return the rows of all features' ids, feature by feature; -1 for an id outside its feature's range.

    On a GPU this is one kernel for any number of features, and nothing waits for it: the lookup of the rows
    (:func:`speedswap.kernels.find_rows`) detects a -1, and :func:`first_outside` then finds the id. Every id is outside
    if the features' offsets are wrong.

    Args:
        asked: the ids.
        indices: on a GPU, int64, shape (ids,): where to write the index of each row's id in ``asked.ids``; or None.

    Returns:
        int64, or on a GPU int32 if that holds all rows, shape (ids,), on the ids' device.

    Raises:
        ValueError: ``counts`` and ``begins`` do not match ``ids``.

    >>> bases, limits = torch.tensor([0, 10]), torch.tensor([10, 5])
    >>> merge_ids(FeatureIds(torch.tensor([7, 9, 0, 4, 5]), bases, limits, counts=torch.tensor([2, 3])))
    tensor([ 7,  9, 10, 14, -1])
    """
    ids, counts, begins = asked.ids, asked.counts, asked.begins
    if not isinstance(ids, Tensor) or not ids.is_cpu:
        return _merged_on_gpu(asked, indices)
    assert counts is not None
    count, size = ids.numel(), ids.dtype.itemsize
    if not ids.is_contiguous() or ids.data_ptr() % size:
        ids = as_read(ids)
    wanted = count if begins is None else int(counts.sum())
    rows = torch.empty(wanted, dtype=torch.int64)
    starts = 0 if begins is None else begins.data_ptr()
    features = (counts.shape[0], starts, address(counts), asked.bases.data_ptr(), asked.limits.data_ptr())
    if not _C.merge_ids(ids.data_ptr(), count, size, features, address(rows), wanted, threads_for(8 * wanted)):
        raise ValueError(
            f"counts is {counts.tolist()} and begins {None if begins is None else begins.tolist()}, but there are "
            f"{count} ids; give each feature a range of them"
        )
    return rows


def first_outside(asked: FeatureIds) -> tuple[int, int, int] | None:
    """Return the first id outside its feature's range: the feature, the position among its ids, and the value.

    Returns:
        None if all ids are inside. On a GPU this waits for the ids.

    Raises:
        ValueError: as :func:`merge_ids` does.

    >>> bases, limits = torch.tensor([0, 10]), torch.tensor([10, 5])
    >>> first_outside(FeatureIds(torch.tensor([7, 9, 0, 5]), bases, limits, counts=torch.tensor([2, 2])))
    (1, 1, 5)
    """
    if not isinstance(asked.ids, Tensor) or not asked.ids.is_cpu:
        asked = asked.on_host()
    ids, counts = asked.ids, asked.counts
    assert isinstance(ids, Tensor) and counts is not None  # noqa: PT018
    outside = (merge_ids(asked) < 0).nonzero()
    if not len(outside):
        return None
    ends = counts.cumsum(0)
    place = int(outside[0])
    feature = int(torch.searchsorted(ends, place, right=True))
    position = place - int(ends[feature] - counts[feature])
    return feature, position, int(ids[place if asked.begins is None else asked.begins[feature] + position])


def _merged_on_gpu(asked: FeatureIds, indices: Tensor | None) -> Tensor:
    near, bags = asked.near, asked.bags
    starts = (near.starts, 1) if bags is None else (bags.offsets.data_ptr(), bags.stride)
    begins = starts
    if not isinstance(asked.ids, Tensor):
        begins = 0, 0
    elif asked.begins is not None:
        begins = near.begins if asked.begins.is_cpu else asked.begins.data_ptr(), 1
    total = asked.total if asked.counts is None else near.num_ids
    dtype = torch.int32 if near.end < 2**31 else torch.int64
    return merge(near, total, dtype, starts, begins, None if bags is None else bags.wrong, indices)


def find_together(
    asked: FeatureIds,
    of_group: Sequence[range],
    num_rows: Sequence[int],
    room: int,
    starts_of: Callable[[], Sequence[int]],
) -> list[tuple[Tensor, Tensor] | None]:
    """Return :func:`find_all` of groups of features, whose number of ids only the GPU knows yet: in one round trip.

    Args:
        asked: the ids, at least one.
        of_group: the features of each group, one group after the other.
        num_rows: each group's number of rows, in which the features' ranges lie.
        room: a bound of the number of ids; any more are left out.
        starts_of: returns the index of each group's first id, and their number; called after the round trip.
    """
    ids, bags, firsts = asked.ids, asked.bags, list(accumulate([count + 1 for count in num_rows], initial=0))
    assert isinstance(ids, Tensor) and bags is not None  # noqa: PT018
    of_feature, end = [group for group, some in enumerate(of_group) for _ in some], firsts[-1]
    bases = [firsts[group] + base for group, base in zip(of_feature, asked.bases.tolist(), strict=True)]
    outside = [firsts[group + 1] - 1 for group in of_feature]
    # The rest of the room is a last feature, which reads the first id again and again; its keys are past all others.
    every, limits = [ids] * len(bases) + [ids[0].expand(1)], [*asked.limits.tolist(), 0]
    near = FeatureTable.of_numbers(every, [*bases, end], limits, [*outside, end], [0] * len(every))
    starts = bags.offsets.data_ptr(), bags.stride
    begins = starts if asked.begins is None else (asked.begins.data_ptr(), 1)
    dtype = torch.int32 if end + 1 < 2**31 else torch.int64
    keys = merge(near, room, dtype, starts, begins, bags.wrong)
    keys_of = [*(count + 1 for count in num_rows), 1]
    table = FeatureTable.of_numbers([ids], firsts, [*num_rows, 0], firsts, keys_of)
    keys, order = torch.sort(keys, stable=True)
    begun = torch.searchsorted(keys, table.bounds.to(keys.dtype))  # each group's first key
    numbered = number(keys, order, table, begun.data_ptr(), len(firsts))
    return of_lookups(order, numbered, starts_of(), firsts, num_rows, [ids] * len(num_rows))
