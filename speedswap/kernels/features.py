"""One lookup of several features' ids, each in a separate range of one table's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels.host import address, as_read, threads_for


@dataclass
class FeatureIds:
    """The ids of several features, and each feature's range of rows in a table. The caller has checked them.

    Attributes:
        ids: the ids of all features, int32 or int64, shape (count,), dense, on any device.
        bases: the first row of each feature's range, int64, shape (features,), contiguous, on the CPU.
        limits: each range's number of rows, like ``bases``: ids are below it.
        counts: the number of each feature's ids, like ``bases``; or on the ids' device, without ``begins``, to avoid
            waiting, if they sum to all ids.
        begins: the position of each feature's first id in ``ids``, like ``bases``; by default the features follow one
            another and have all ids.
    """

    ids: Tensor
    bases: Tensor
    limits: Tensor
    counts: Tensor
    begins: Tensor | None = None


def merge_ids(asked: FeatureIds) -> Tensor:
    """Return the rows of all features' ids, feature by feature; -1 for an id outside its feature's range.

    On a GPU the number of operations does not depend on the number of features, and nothing waits for them: the lookup
    of the rows (:func:`speedswap.kernels.find_rows`) detects a -1, and :func:`first_outside` then finds the id.

    Returns:
        int64, shape (ids,), on the ids' device.

    Raises:
        ValueError: ``counts`` and ``begins`` do not match ``ids``.

    >>> bases, limits = torch.tensor([0, 10]), torch.tensor([10, 5])
    >>> merge_ids(FeatureIds(torch.tensor([7, 9, 0, 4, 5]), bases, limits, counts=torch.tensor([2, 3])))
    tensor([ 7,  9, 10, 14, -1])
    """
    ids, counts, begins = asked.ids, asked.counts, asked.begins
    if not ids.is_cpu:
        return _merged_by_torch(asked)
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
    outside = (merge_ids(asked) < 0).nonzero()
    if not len(outside):
        return None
    counts = asked.counts.cpu()
    ends = counts.cumsum(0)
    place = int(outside[0])
    feature = int(torch.searchsorted(ends, place, right=True))
    position = place - int(ends[feature] - counts[feature])
    return feature, position, int(asked.ids[place if asked.begins is None else asked.begins[feature] + position])


def _merged_by_torch(asked: FeatureIds) -> Tensor:
    """Merge on a device, with a number of operations independent of the number of features."""
    ids, counts, begins = asked.ids, asked.counts, asked.begins
    on_host = counts.device.type == "cpu"
    total = int(counts.sum()) if on_host else len(ids)
    known = [asked.bases, asked.limits]
    if begins is not None:
        known.append(begins - (counts.cumsum(0) - counts))
    if on_host:
        known.append(counts)
    # Pinned, so that the transfer does not block.
    held = torch.empty((len(known), len(counts)), dtype=torch.int64, pin_memory=ids.device.type == "cuda")
    near = torch.stack(known, out=held).to(ids.device, non_blocking=True)
    feature = torch.repeat_interleave(near[-1] if on_host else counts, output_size=total)
    base, limit, *moved = near[: 2 if begins is None else 3].index_select(1, feature)
    if moved:
        ids = ids.index_select(0, torch.arange(total, device=ids.device) + moved[0])
    inside = (ids >= 0) & (ids < limit)
    return torch.where(inside, ids + base, -1)
