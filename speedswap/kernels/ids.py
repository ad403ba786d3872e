"""Check ids, find their rows, and find duplicates, on the ids' own device; several features' ids as one lookup."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.kernels import _C
from speedswap.kernels.cuda.lookups import FeatureTable, join, merge, number
from speedswap.kernels.host import address, as_ids, as_read, empty, get_num_threads, ids_at, require_dense, threads_for

_ID_DTYPES = (torch.int64, torch.int32)


def require_id_dtype(ids: Tensor, name: str = "ids") -> None:
    """Raise TypeError unless ids is a dense int32 or int64 tensor, with memory for its items."""
    if type(ids) is not Tensor and not isinstance(ids, Tensor):
        raise TypeError(
            f"{name} is {a_kind(ids)}; pass a tensor (torch.as_tensor); keys, e.g. strings, are for an "
            "embedding with id_map=speedswap.IdMap(…)"
        )
    require_dense(ids, name)
    if ids.dtype not in _ID_DTYPES:
        raise TypeError(f"{name} has dtype {ids.dtype}; convert it to torch.int64 or torch.int32, as ids.long() does")
    if ids.is_neg():
        raise TypeError(f"{name} is a lazily negated view; carry the negation out with ids.resolve_neg()")


# ---- range -----------------------------------------------------------------------------------------------------------


def check_ids(ids: Tensor, num_rows: int, what: str) -> None:
    """Raise unless every id is one of ``num_rows`` rows.

    Args:
        ids: int32 or int64, any shape, on any device. On a GPU this waits for the ids.
        num_rows: ids must be 0 to num_rows - 1.
        what: the rows' owner, for the message: ``"table 'items'"``.

    Raises:
        IdError: an id is negative, or not below num_rows.
        TypeError: ids is not an int32 or int64 tensor.
    """
    require_id_dtype(ids)
    if ids.numel() == 0:
        return
    if ids.device.type == "cpu":
        flat = as_ids(ids)
        position = _C.check_ids(flat.data_ptr(), flat.numel(), num_rows, get_num_threads())
    else:
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        position = -1 if lowest >= 0 and highest < num_rows else _first_outside(ids, num_rows)
    if position >= 0:
        raise _outside(ids, position, num_rows, what)


def _first_outside(ids: Tensor, num_rows: int) -> int:
    flat = ids.reshape(-1).long()  # int32 cannot be compared with a greater number of rows
    return int(((flat < 0) | (flat >= num_rows)).nonzero()[0].item())


def _outside(ids: Tensor, position: int, num_rows: int, what: str) -> IdError:
    index = torch.unravel_index(torch.tensor(position), ids.shape)
    where = f"[{', '.join(str(int(each)) for each in index)}]" if index else ""
    rows = f"rows 0 to {num_rows - 1}" if num_rows else "no rows"
    return IdError(
        f"ids{where} is {int(ids.reshape(-1)[position])}, but {what} has {rows}; "
        "map unknown ids to a padding row (padding_idx=) before the lookup"
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def find_rows(ids: Tensor, num_rows: int, what: str) -> tuple[Tensor, Tensor]:
    """Return a batch's rows and each id's position among them, after checking their range; on a GPU in one round trip.

    Args:
        ids: as for :func:`check_ids`; the caller has checked them with :func:`require_id_dtype`.
        num_rows, what: as for :func:`check_ids`.

    Returns:
        As :func:`unique` does.

    Raises:
        IdError: as :func:`check_ids` does.

    >>> find_rows(torch.tensor([[7, 3], [3, 9]]), 10, "table 'items'")
    (tensor([3, 7, 9]), tensor([[1, 0],
            [0, 2]]))
    """
    found = _unique(ids, num_rows) if ids.is_cpu else distinct([ids], [num_rows])[0]
    if found is None:
        raise _outside(ids, _first_outside(ids, num_rows), num_rows, what)
    return found


def find_all(lookups: Sequence[tuple[Tensor, int]]) -> list[tuple[Tensor, Tensor] | None]:
    """Return :func:`find_rows` of each of several lookups; on a GPU with one sort and one round trip.

    Args:
        lookups: of each its ids, all on one device, and the number of existing rows.

    Returns:
        In their order; None for a lookup with an id out of range.
    """
    for ids, _ in lookups:
        require_id_dtype(ids)
    if lookups and lookups[0][0].device.type != "cpu":
        return distinct([ids for ids, _ in lookups], [num_rows for _, num_rows in lookups])
    return [_unique(ids, num_rows) for ids, num_rows in lookups]


def unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch's rows, and each id's position among them.

    Args:
        ids: int32 or int64, any shape, on any device.

    Returns:
        rows: the distinct ids, ascending; int64, shape (n,), on the ids' device.
        local: int64, of the ids' shape; ``rows[local]`` are the ids.

    >>> unique(torch.tensor([[7, 3], [3, 9]]))
    (tensor([3, 7, 9]), tensor([[1, 0],
            [0, 2]]))
    """
    require_id_dtype(ids)
    found = _unique(ids) if ids.is_cpu else distinct([ids])[0]
    assert found is not None
    return found


def _unique(ids: Tensor, num_rows: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Return :func:`unique` of ids in host memory, whose dtype was checked; None if one is out of range."""
    pointer, ids = ids_at(ids)
    count = ids.numel()
    # Their own methods are faster than torch.empty, and ignore torch's default device.
    rows, local = ids.new_empty(count), torch.empty_like(ids)
    limit = -1 if num_rows is None else num_rows
    found = _C.unique(pointer, count, rows.data_ptr() or address(rows), local.data_ptr(), threads_for(8 * count), limit)
    if found < 0:
        return None
    # Far more memory than the rows need is not kept alive.
    return (rows.resize_(found) if 2 * found >= count else rows[:found].clone()), local


def by_owner(ids: Tensor, *, bits: int, factor: int, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Order ids by the ranks that own their rows, as :class:`speedswap.ranks.Owners` defines them.

    Args:
        ids: int64, shape (n,), in host memory, not negative.
        bits, factor, world_size: the owners'.

    Returns:
        ordered: the ids, in rank order; ids of one rank keep their order.
        places: int64, shape (n,); ``ordered[places]`` are the ids.
        counts: the number of ids that each rank owns.
    """
    flat = as_ids(ids)
    ordered, places = torch.empty_like(flat), torch.empty_like(flat)
    counts = torch.empty(world_size, dtype=torch.int64)
    _C.by_owner(
        flat.data_ptr(), len(flat), bits, factor, world_size, address(ordered), address(places), address(counts)
    )
    return ordered, places, counts.tolist()


def distinct(lookups: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor] | None]:
    """Return each lookup's rows, and each id's position among them: on a GPU, with one sort and one round trip.

    The ids of all lookups are sorted together, as keys: an id is offset by its lookup's base. An id out of range
    becomes an extra key, the greatest of its lookup.

    Args:
        lookups: int32 or int64, any shapes, on one GPU.
        num_rows: per lookup, the bound of its ids, which start at 0. If None, there is one lookup, of any ids.

    Returns:
        For each lookup as :func:`unique` does, with :func:`order_of`; None if an id is out of range.
    """
    flat = [ids if ids.ndim == 1 else ids.reshape(-1) for ids in lookups]
    counts = [ids.shape[0] for ids in flat]
    starts = list(accumulate(counts, initial=0))
    bases = [0] if num_rows is None else list(accumulate([count + 1 for count in num_rows], initial=0))
    keys, table = flat[0], None
    if not starts[-1]:
        nothing = torch.empty(0, dtype=torch.int64, device=keys.device)
        return of_lookups(nothing, (nothing, nothing, [[0, 0, 0, 0]] * len(flat)), starts, bases, None, lookups)
    dtype = keys.dtype if num_rows is None else torch.int32 if bases[-1] < 2**31 else torch.int64
    if len(flat) > 1 or keys.dtype != dtype:  # narrow keys are sorted in half the time
        assert num_rows is not None
        table = FeatureTable.of_numbers(flat, bases[:-1], num_rows, [base - 1 for base in bases[1:]], counts)
        keys = merge(table, starts[-1], dtype, (table.starts, 1))
    ordered, order = torch.sort(keys, stable=True)
    del keys  # its memory is needed for the rows
    numbered = number(ordered, order, table, 0 if table is None else table.starts, len(flat))
    return of_lookups(order, numbered, starts, bases, num_rows, lookups)


def of_lookups(
    order: Tensor,
    numbered: tuple[Tensor, Tensor, Sequence[Sequence[int]]],
    starts: Sequence[int],
    bases: Sequence[int],
    num_rows: Sequence[int] | None,
    lookups: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor] | None]:
    """Return what :func:`distinct` does, of sorted and numbered keys.

    Args:
        order, numbered: the keys' indices before the sort, and what :func:`number` returned.
        starts: the index of each lookup's first key, and their number.
        bases: each lookup's first key, and the end of all: one key more than rows, for ids out of range.
        num_rows: as for :func:`distinct`.
        lookups: tensors of the shapes of each lookup's ids; the size of one dimension is ignored.
    """
    found, local, answers = numbered
    results: list[tuple[Tensor, Tensor] | None] = [None] * len(lookups)
    for i, ids in enumerate(lookups):
        (first, last, low, high), start, stop = answers[i], starts[i], starts[i + 1]
        count = last + 1 - first if start < stop else 0
        if count and num_rows is not None and not bases[i] <= low <= high < bases[i] + num_rows[i]:
            continue
        # A view of all would keep far more memory alive than the rows need.
        if len(lookups) == 1 and 2 * count >= found.shape[0]:
            rows = found.resize_(count)
        else:
            rows = empty((count,), torch.int64, order.device).copy_(found[first : first + count])
        mine, positions = local, order
        if start or stop < local.shape[0]:
            mine, positions = local[start:stop], order[start:stop]
        if ids.ndim != 1:
            mine = mine.view(ids.shape)
        mine.order = positions.sub_(start) if start else positions  # type: ignore[attr-defined]
        results[i] = rows, mine
    return results


def order_of(local: Tensor) -> Tensor | None:
    """Return the positions of a lookup's ids by row, those of one row ascending, as the sort that found it left them.

    Args:
        local: each id's position among the rows, as :func:`unique` returned it: not a view of it.

    Returns:
        int64, shape (count,); None for ids in host memory, which are not sorted.
    """
    return getattr(local, "order", None)


# ---- duplicates ------------------------------------------------------------------------------------------------------


def last_occurrences(ids: Tensor) -> Tensor:
    """Return the last position of each distinct id, ascending by id.

    Args:
        ids: int32 or int64, shape (n,), on any device.

    Returns:
        Positions, int64, on the ids' device.

    >>> last_occurrences(torch.tensor([5, 2, 5]))
    tensor([1, 2])
    """
    require_id_dtype(ids)
    if ids.device.type != "cpu":
        rows, local = unique(ids)
        positions = torch.zeros(len(rows), dtype=torch.int64, device=ids.device)
        every = torch.arange(len(ids), device=ids.device)
        return positions.scatter_reduce_(0, local, every, "amax")
    flat = as_ids(ids)
    positions = torch.empty(len(flat), dtype=torch.int64)
    found = _C.last_occurrences(flat.data_ptr(), len(flat), address(positions))
    return positions[:found].clone()


def first_duplicate(ids: Tensor, num_rows: int) -> int:
    """Return the first position whose id occurs before it, or -1.

    Args:
        ids: int32 or int64, shape (n,), on any device, each in 0 to num_rows - 1.
        num_rows: the bound of the ids.

    >>> first_duplicate(torch.tensor([4, 1, 4, 1]), num_rows=5)
    2
    """
    require_id_dtype(ids)
    if len(ids) < 2:
        return -1
    if ids.device.type == "cpu":
        flat = as_ids(ids)
        return _C.first_duplicate(flat.data_ptr(), len(flat), num_rows)
    ordered, order = torch.sort(ids, stable=True)
    first = int(torch.where(ordered[1:] == ordered[:-1], order[1:], len(ids)).min())  # one wait
    return first if first < len(ids) else -1


def first_fall(values: Tensor) -> int:
    """Return the first position whose value is greater than the next one's, or -1 if the values ascend.

    Args:
        values: int32 or int64, shape (n,), on any device. On a GPU this waits for them.

    >>> first_fall(torch.tensor([0, 2, 2, 1])), first_fall(torch.tensor([0, 2, 2]))
    (2, -1)
    """
    require_id_dtype(values)
    if values.device.type == "cpu":
        read = as_ids(values)
        return _C.first_fall(read.data_ptr(), read.numel(), get_num_threads())
    falls = (values[1:] < values[:-1]).nonzero()
    return int(falls[0]) if len(falls) else -1


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

    @functools.cached_property
    def total(self) -> int:
        """The number of rows to look up."""
        return len(self.ids) if self.counts is None else int(self.counts.sum())

    @functools.cached_property
    def near(self) -> FeatureTable:
        """The features on the ids' GPU."""
        ids, bases, counts, begins = self.ids, self.bases, self.counts, self.begins
        return FeatureTable(
            [ids] if isinstance(ids, Tensor) else ids,
            bases.shape[0],
            bases.data_ptr(),
            self.limits.data_ptr(),
            counts=0 if counts is None else counts.data_ptr(),
            begins=0 if begins is None or not begins.is_cpu else begins.data_ptr(),
            bags=self.offsets,
        )

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
