"""Ids of several features merged into one lookup, against torch and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.kernels import FeatureIds, first_outside, merge_ids
from speedswap.kernels import features as module

DTYPES = [torch.int32, torch.int64]


def ranges(limits: list[int]) -> tuple[Tensor, Tensor]:
    """Return bases and limits of tables that lie one after the other."""
    ends = torch.tensor(limits).cumsum(0)
    return ends - torch.tensor(limits), torch.tensor(limits)


def test_two_features_by_hand(device: str):
    bases, limits = torch.tensor([10, 0]), torch.tensor([5, 10])
    asked = FeatureIds(torch.tensor([4, 0, 9, -1], device=device), bases, limits, counts=torch.tensor([2, 2]))
    assert merge_ids(asked).tolist() == [14, 10, 9, -1]
    assert first_outside(asked) == (1, 1, -1)
    together = torch.tensor([4, 0, 9], device=device)
    asked = FeatureIds(together, bases, limits, counts=torch.tensor([2, 1]))
    assert merge_ids(asked).tolist() == [14, 10, 9]
    assert first_outside(asked) is None
    # The second feature's ids come first, and one id belongs to neither.
    asked = FeatureIds(together, bases, limits, counts=torch.tensor([1, 1]), begins=torch.tensor([2, 0]))
    assert merge_ids(asked).tolist() == [-1, 4]
    assert first_outside(asked) == (0, 0, 9)


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[list[int]], list[int], torch.dtype]:
    """Draw the ids of several features, some out of range on either side, and the number of rows of each."""
    limits = draw(st.lists(st.sampled_from([1, 7, 2**31 - 1]), min_size=1, max_size=5))
    ids = [draw(st.lists(st.sampled_from([0, 0, limit - 1, limit, -1, 3]), max_size=6)) for limit in limits]
    dtype = torch.int64 if any(2**31 in each for each in ids) else draw(st.sampled_from(DTYPES))
    return [[min(i, 2**31 - 1) if dtype == torch.int32 else i for i in each] for each in ids], limits, dtype


@given(drawn=lookups(), by_torch=st.booleans())
def test_any_features_are_moved_to_their_ranges(drawn: tuple[list[list[int]], list[int], torch.dtype], by_torch: bool):
    """Both by the CPU loop and by the operations for a GPU."""
    each, limits, dtype = drawn
    bases, bounds = ranges(limits)
    ids = torch.cat([torch.tensor(ids, dtype=dtype) for ids in each])
    expected = [
        int(base) + i if 0 <= i < limit else -1
        for ids, base, limit in zip(each, bases, limits, strict=True)
        for i in ids
    ]
    asked = FeatureIds(ids, bases, bounds, torch.tensor([len(ids) for ids in each]))
    merged = module._merged_by_torch(asked) if by_torch else merge_ids(asked)
    assert merged.dtype == torch.int64
    assert merged.tolist() == expected
    outside = [(f, i, v) for f, ids in enumerate(each) for i, v in enumerate(ids) if not 0 <= v < limits[f]]
    assert first_outside(asked) == (outside[0] if outside else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_ids_by_several_threads(dtype: torch.dtype):
    """Pieces of work begin and end inside of features, and features inside of pieces."""
    counts = torch.cat([torch.tensor([0, 90_000, 0, 1]), torch.randint(0, 90, (500,)), torch.tensor([50_000, 0])])
    bases, limits = ranges([1000] * len(counts))
    ids = torch.randint(1000, (int(counts.sum()),), dtype=dtype)
    merged = merge_ids(FeatureIds(ids, bases, limits, counts))
    assert torch.equal(merged, ids.long() + torch.repeat_interleave(bases, counts))
    ids[-1] = 1000
    assert first_outside(FeatureIds(ids, bases, limits, counts)) == (len(counts) - 2, 49_999, 1000)
    every_other = ids[::2]
    counts = torch.tensor([len(every_other)])
    assert torch.equal(merge_ids(FeatureIds(every_other, bases[:1], limits[:1], counts))[:-1], every_other[:-1].long())


class _Counting(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("begins", [False, True])
def test_a_thousand_features_are_as_many_operations_as_two_on_a_gpu(begins: bool):
    counted = []
    for features in (2, 1000):
        bases, limits = ranges([50] * features)
        counts = torch.full((features,), 3)
        asked = FeatureIds(torch.randint(50, (3 * features,)), bases, limits, counts)
        if begins:
            asked = replace(asked, begins=torch.arange(features).flip(0) * 3)
        with _Counting() as mode:
            module._merged_by_torch(asked)
        counted.append(mode.count)
    assert counted[0] == counted[1] < 25


def test_counts_on_the_device_are_not_waited_for(device: str):
    bases, limits = ranges([4, 6])
    counts = torch.tensor([1, 2], device=device)
    asked = FeatureIds(torch.tensor([3, 0, 6], device=device), bases, limits, counts)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        merged = merge_ids(asked)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert merged.tolist() == [3, 4, -1]
    assert first_outside(asked) == (1, 1, 6)


def test_the_lookup_of_the_rows_finds_an_id_outside(device: str):
    bases, limits = ranges([4, 6])
    merged = merge_ids(FeatureIds(torch.tensor([0, 6], device=device), bases, limits, torch.tensor([1, 1])))
    with pytest.raises(IdError, match=r"ids\[1\] is -1"):
        kernels.find_rows(merged, 10, "table 'both'")


def test_counts_that_do_not_match_the_ids_are_refused():
    bases, limits = ranges([4, 6])
    ids = torch.tensor([0, 1, 2])
    for counts in ([1, 1], [2, 2], [-1, 4]):
        with pytest.raises(ValueError, match="but there are 3 ids; give each feature a range of them"):
            merge_ids(FeatureIds(ids, bases, limits, torch.tensor(counts)))
    for begins in ([-1, 0], [0, 2]):
        with pytest.raises(ValueError, match=r"begins \[.*\], but there are 3 ids"):
            merge_ids(FeatureIds(ids, bases, limits, torch.tensor([1, 2]), torch.tensor(begins)))
