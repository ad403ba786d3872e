"""Ids of several features merged into one lookup, against torch and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.kernels import (
    FeatureIds,
    JoinedBags,
    find_together,
    first_outside,
    join_bags,
    merge_ids,
)
from speedswap.kernels.cuda import driver

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the device is the same for all examples
@given(drawn=lookups())
def test_any_features_are_moved_to_their_ranges(drawn: tuple[list[list[int]], list[int], torch.dtype], device: str):
    each, limits, dtype = drawn
    bases, bounds = ranges(limits)
    parts = [torch.tensor(ids, dtype=dtype, device=device) for ids in each]
    expected = [
        int(base) + i if 0 <= i < limit else -1
        for ids, base, limit in zip(each, bases, limits, strict=True)
        for i in ids
    ]
    counts = torch.tensor([len(ids) for ids in each])
    outside = [(f, i, v) for f, ids in enumerate(each) for i, v in enumerate(ids) if not 0 <= v < limits[f]]
    for ids in [torch.cat(parts), parts] if device == "cuda" else [torch.cat(parts)]:
        asked = FeatureIds(ids, bases, bounds, counts)
        merged = merge_ids(asked)
        is_narrow = device == "cuda" and sum(limits) < 2**31
        assert merged.dtype == (torch.int32 if is_narrow else torch.int64)
        assert merged.tolist() == expected
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


@pytest.fixture
def gpu(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU, or the simulated one: SPEEDSWAP_TEST_DEVICE=simulated")
    return device


def test_ids_of_each_feature_may_lie_anywhere(gpu: str):
    """Columns of a matrix, several ids for each sample, and both widths: read where they are."""
    matrix = torch.arange(24).view(4, 6).to(gpu)
    parts = [matrix[:, 1], matrix[::2, 1:5:2], matrix[0].int(), matrix[:0, 0], matrix[:1, :2].expand(3, 2)]
    bases, limits = ranges([24] * len(parts))
    counts = torch.tensor([ids.numel() for ids in parts])
    merged = merge_ids(FeatureIds(parts, bases, limits, counts))
    expected = [ids.reshape(-1).cpu() + base for ids, base in zip(parts, bases, strict=True)]
    assert torch.equal(merged.cpu(), torch.cat(expected).int())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bags_of_each_feature_are_joined(dtype: torch.dtype, gpu: str):
    """Offsets with and without the number of ids at their end, and bags of one size."""
    bases, limits = ranges([9, 9, 9])
    parts = [torch.arange(size, device=gpu) for size in (4, 3, 6)]
    offsets = [
        (torch.tensor([0, 1, 4], dtype=dtype, device=gpu), False),
        (torch.tensor([0, 0, 0, 3], dtype=dtype, device=gpu), True),
        (None, False),
    ]
    parts[2] = parts[2].view(3, 2)
    asked = FeatureIds(parts, bases, limits, torch.tensor([4, 3, 6]), offsets=offsets)
    bags = join_bags(asked, 3)
    assert bags.offsets.tolist() == [0, 1, 4, 4, 4, 4, 7, 9, 11, 13]
    assert bags.wrong.tolist() == [0]
    assert merge_ids(asked).tolist() == [0, 1, 2, 3, 9, 10, 11, 18, 19, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("offsets", "closed"),
    [([1, 2], False), ([0, 4], False), ([0, -1], False), ([0, 2, 4], True), ([0, 4, 3], True), ([0, 2, 1], True)],
    ids=str,
)
def test_no_id_is_read_by_wrong_offsets(offsets: list[int], closed: bool, gpu: str):
    bases, limits = ranges([9, 9])
    parts = [torch.arange(size, device=gpu) for size in (4, 3)]
    right = torch.tensor([0, 1], device=gpu), False
    asked = FeatureIds(
        parts, bases, limits, torch.tensor([4, 3]), offsets=[right, (torch.tensor(offsets, device=gpu), closed)]
    )
    assert join_bags(asked, 2).wrong.tolist() == [1]
    assert merge_ids(asked).tolist() == [-1] * 7


def test_counts_and_begins_that_only_the_gpu_knows_are_not_waited_for(gpu: str):
    """Of two features with two bags each, the second is first in memory; an index per row says where its id is."""
    bases, limits = ranges([4, 6])
    ids = torch.tensor([3, 0, 6], device=gpu)
    offsets, begins = torch.tensor([0, 1, 1, 1, 3], device=gpu), torch.tensor([2, 0], device=gpu)
    for first, expected in ((None, [3, 4, -1]), (begins, [-1, 7, 4])):
        bags = JoinedBags(offsets, 2, torch.zeros(1, dtype=torch.int64, device=gpu))
        asked, indices = FeatureIds(ids, bases, limits, None, first, bags=bags), torch.empty(3, device=gpu).long()
        torch.cuda.set_sync_debug_mode("error")
        try:
            merged = merge_ids(asked, indices)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert merged.tolist() == expected
        assert indices.tolist() == ([0, 1, 2] if first is None else [2, 0, 1])
        assert first_outside(asked) == ((1, 1, 6) if first is None else (0, 0, 6))


def test_keys_of_groups_whose_sizes_only_the_gpu_knows(gpu: str):
    """Three features with two bags each, the second and third of one group, and room for two ids too many."""
    bases, limits = torch.tensor([0, 0, 4]), torch.tensor([5, 4, 6])
    offsets = torch.tensor([0, 2, 2, 3, 5, 5, 6], device=gpu)
    ids, groups, num_rows = torch.tensor([4, 1, 2, 3, 4, 0], device=gpu), [range(1), range(1, 3)], [5, 10]
    bags = JoinedBags(offsets, 2, torch.zeros(1, dtype=torch.int64, device=gpu))
    first, second = find_together(
        FeatureIds(ids, bases, limits, None, bags=bags), groups, num_rows, 8, lambda: [0, 2, 6]
    )
    assert [part.tolist() for part in first or ()] == [[1, 4], [1, 0]]
    assert second is None
    ids[4] = 2
    _, second = find_together(FeatureIds(ids, bases, limits, None, bags=bags), groups, num_rows, 8, lambda: [0, 2, 6])
    assert second is not None
    assert [second[0].tolist(), second[1].tolist()] == [[2, 3, 4], [0, 1, 0, 2]]
    assert kernels.order_of(second[1]).tolist() == [0, 2, 1, 3]


def test_a_thousand_features_are_one_launch(gpu: str, monkeypatch: pytest.MonkeyPatch):
    launched: list[str] = []
    kernel_handle = driver.kernel_handle

    def watched(device: int, name: str) -> int:
        launched.append(name)
        return kernel_handle(device, name)

    monkeypatch.setattr(driver, "kernel_handle", watched)
    parts = [torch.tensor([f % 50, 49], device=gpu) for f in range(1000)]
    bases, limits = ranges([50] * 1000)
    merged = merge_ids(FeatureIds(parts, bases, limits, torch.full((1000,), 2)))
    assert launched == ["merge_ids_i32"]
    assert torch.equal(
        merged.cpu(), torch.cat([ids.cpu() + base for ids, base in zip(parts, bases, strict=True)]).int()
    )


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
