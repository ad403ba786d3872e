"""Ranges, duplicates and distinct rows of ids, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedswap.errors import IdError
from speedswap.kernels import (
    check_ids,
    find_all,
    find_rows,
    first_duplicate,
    first_fall,
    last_occurrences,
    order_of,
    unique,
)

ID_DTYPES = [torch.int32, torch.int64]
id_dtypes = pytest.mark.parametrize("dtype", ID_DTYPES, ids=str)
LIMITS = {torch.int32: 2**31, torch.int64: 2**63}


def numpy_last_occurrences(ids: np.ndarray) -> np.ndarray:
    return np.array([np.flatnonzero(ids == row)[-1] for row in np.unique(ids)], np.int64)


def numpy_first_duplicate(ids: list[int]) -> int:
    return next((i for i, row in enumerate(ids) if row in ids[:i]), -1)


# ---- in range --------------------------------------------------------------------------------------------------------


@id_dtypes
def test_ids_in_range_pass(device: str, dtype: torch.dtype):
    check_ids(torch.tensor([0, 4, 2, 4], dtype=dtype, device=device), 5, "table 'items'")
    check_ids(torch.empty(0, dtype=dtype, device=device), 0, "table 'items'")
    check_ids(torch.tensor(3, dtype=dtype, device=device), 4, "table 'items'")


@pytest.mark.parametrize(
    "ids, num_rows, message",
    [
        (
            [0, 5],
            5,
            r"ids\[1\] is 5, but table 'items' has rows 0 to 4; map unknown ids to a padding row \(padding_idx=\)",
        ),
        ([-1], 5, r"ids\[0\] is -1, but table 'items' has rows 0 to 4"),
        ([[1, 2], [9, -1]], 5, r"ids\[1, 0\] is 9, but"),
        ([0], 0, r"ids\[0\] is 0, but table 'items' has no rows; map"),
        ([0, -(2**63)], 2**62, rf"ids\[1\] is {-(2**63)}, but"),
        ([2**62], 2**62, rf"ids\[0\] is {2**62}, but table 'items' has rows 0 to {2**62 - 1};"),
    ],
)
def test_the_first_id_out_of_range_is_named(device: str, ids: list, num_rows: int, message: str):
    with pytest.raises(IdError, match=message):
        check_ids(torch.tensor(ids, device=device), num_rows, "table 'items'")


@id_dtypes
@pytest.mark.parametrize("count", [1, 7, 1023, 1024, 1025, 100_000])
def test_the_first_of_many_is_found_wherever_it_is(device: str, dtype: torch.dtype, count: int):
    for position in {0, count // 2, count - 1}:
        ids = torch.randint(0, 1000, (count,), dtype=dtype, device=device)
        ids[position:] = 1000
        with pytest.raises(IdError, match=rf"ids\[{position}\] is 1000, but x has rows 0 to 999"):
            check_ids(ids, 1000, "x")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool], ids=str)
def test_other_dtypes_are_refused(device: str, dtype: torch.dtype):
    ids = torch.zeros(3, dtype=dtype, device=device)
    for ask in (
        lambda: check_ids(ids, 5, "x"),
        lambda: unique(ids),
        lambda: last_occurrences(ids),
        lambda: first_duplicate(ids, 5),
    ):
        with pytest.raises(TypeError, match=f"ids has dtype {dtype}; convert it to torch.int64 or torch.int32"):
            ask()


@id_dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 1024, 1025, 100_000])
def test_the_first_fall_is_found_wherever_it_is(device: str, dtype: torch.dtype, count: int):
    values = torch.arange(count, device=device).to(dtype) // 3
    assert first_fall(values) == -1
    for position in {0, (count - 1) // 2, count - 2} if count > 1 else ():
        falling = values.clone()
        falling[position + 1 :] = falling[position] - 1
        falling[-1] -= 1
        assert first_fall(falling) == position


# ---- unique ----------------------------------------------------------------------------------------------------------


def test_unique_of_a_batch(device: str):
    rows, local = unique(torch.tensor([[7, 3], [3, 9]], device=device))
    assert rows.tolist() == [3, 7, 9]
    assert local.tolist() == [[1, 0], [0, 2]]
    assert rows.device.type == local.device.type == device


@id_dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 100_000])
@pytest.mark.parametrize("spread", [1, 10, 10**4, 10**5, 10**9, 2**31, 2**63], ids=str)
def test_unique_is_numpys(device: str, dtype: torch.dtype, count: int, spread: int):
    spread = min(spread, LIMITS[dtype])
    for low in (0, -spread):
        ids = np.random.default_rng(1).integers(low, low + spread, count, np.int64, endpoint=False)
        ours = torch.from_numpy(ids).to(device, dtype)
        rows, local = unique(ours)
        expected, inverse = np.unique(ids, return_inverse=True)
        assert rows.dtype == local.dtype == torch.int64
        np.testing.assert_array_equal(rows.cpu().numpy(), expected)
        np.testing.assert_array_equal(local.cpu().numpy(), inverse)


@given(ids=st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 20)), max_size=60))
def test_unique_of_anything(ids: list[int]):
    rows, local = unique(torch.tensor(ids, dtype=torch.int64))
    assert rows.tolist() == sorted(set(ids))
    assert rows[local].tolist() == ids


def test_unique_of_any_layout(device: str):
    ids = torch.arange(24, device=device).view(4, 6) % 5
    for view in (ids.t(), ids[::2], ids[:, 1::2], ids[:1].expand(3, 6), ids[1, 1]):
        rows, local = unique(view)
        expected, inverse = np.unique(view.cpu().numpy(), return_inverse=True)
        np.testing.assert_array_equal(rows.cpu().numpy(), expected)
        np.testing.assert_array_equal(local.cpu().numpy(), inverse.reshape(view.shape))


# ---- duplicates ------------------------------------------------------------------------------------------------------


def test_a_gpu_leaves_the_positions_of_each_lookup_by_row(device: str):
    """A stable sort of each, though all lookups are sorted together."""
    lookups = [torch.randint(9, shape, device=device) for shape in ((300,), (7, 20), (0,), (40,))]
    for ids, found in zip(lookups, find_all([(ids, 9) for ids in lookups]), strict=True):
        order, values = order_of(found[1]), ids.flatten().tolist()
        if device == "cpu":
            assert order is None
        else:
            assert order.tolist() == sorted(range(len(values)), key=lambda i: values[i])


def test_last_occurrences_of_a_batch(device: str):
    assert last_occurrences(torch.tensor([5, 2, 5, 9, 2], device=device)).tolist() == [4, 2, 3]


@given(ids=st.lists(st.integers(0, 30), max_size=60), dtype=st.sampled_from(ID_DTYPES))
def test_last_occurrences_and_first_duplicate_are_numpys(ids: list[int], dtype: torch.dtype):
    ours = torch.tensor(ids, dtype=dtype)
    assert last_occurrences(ours).tolist() == numpy_last_occurrences(np.array(ids)).tolist()
    for num_rows in (31, 10**12):  # a bitmap, and a hash table
        assert first_duplicate(ours, num_rows) == numpy_first_duplicate(ids)


@id_dtypes
@pytest.mark.parametrize("num_rows", [200_000, 2**31, 2**62])
def test_duplicates_of_many_ids(device: str, dtype: torch.dtype, num_rows: int):
    num_rows = min(num_rows, LIMITS[dtype])
    ids = np.random.default_rng(2).choice(min(num_rows, 2**20), 50_000, replace=False) * (num_rows // 2**20 or 1)
    ours = torch.tensor(ids, dtype=dtype, device=device)
    assert first_duplicate(ours, num_rows) == -1
    assert first_duplicate(ours.sort().values, num_rows) == -1
    ours[40_000] = ours[123]
    ours[49_999] = ours[0]
    assert first_duplicate(ours, num_rows) == 40_000
    np.testing.assert_array_equal(ids[last_occurrences(torch.from_numpy(ids)).numpy()], np.sort(ids))


def test_sorted_ids_with_one_pair(device: str):
    ids = torch.arange(1000, device=device)
    assert first_duplicate(ids, 1000) == -1
    ids[700] = 699
    assert first_duplicate(ids, 1000) == 700
    assert first_duplicate(ids[::2], 1000) == -1


@pytest.mark.parametrize("copies", [1, 2, 3, 100])
def test_rows_keep_at_most_twice_their_memory(copies: int) -> None:
    rows, local = find_rows(torch.arange(50).repeat(copies), 50, "table")
    assert torch.equal(rows, torch.arange(50))
    assert torch.equal(local, torch.arange(50).repeat(copies))
    assert rows.untyped_storage().nbytes() <= 2 * rows.nbytes
