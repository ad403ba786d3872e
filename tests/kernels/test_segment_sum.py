"""Sums, maxima and products over groups of rows; against torch, to the bit where it has them, and NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import speedswap
from speedswap import kernels
from speedswap.errors import IdError

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]
floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def torchs_sum(values: Tensor, local: Tensor, num_rows: int) -> Tensor:
    """Return the sums of nn.Embedding's backward pass."""
    return torch.ops.aten.embedding_dense_backward(values, local, num_rows, -1, False)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def zipf(count: int, num_rows: int) -> Tensor:
    """Draw a few rows very often, and most of them once or never."""
    weights = 1.0 / torch.arange(1, num_rows + 1)
    return torch.multinomial(weights, count, replacement=True)[torch.randperm(count)]


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    speedswap.kernels.set_num_threads(request.param)
    yield request.param
    speedswap.kernels.set_num_threads(None)


# ---- rows for ids, and back ------------------------------------------------------------------------------------------


def test_three_ids_and_their_gradients(device: str):
    block = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    local = torch.tensor([1, 0, 1], device=device)
    assert kernels.expand(block, local).tolist() == [[3, 4], [1, 2], [3, 4]]
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], device=device)
    assert kernels.sum_rows(values, local, 3).tolist() == [[2, 20], [5, 50], [0, 0]]


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4), (2, 0), (2, 3, 2)], ids=str)
def test_expand_is_torchs(device: str, dtype: torch.dtype, shape: tuple[int, ...]):
    for dim in (0, 1, 5, 64):
        block = torch.randn(9, dim, device=device).to(dtype)
        local = torch.randint(9, shape, device=device)
        assert torch.equal(kernels.expand(block, local), F.embedding(local, block))
        assert torch.equal(kernels.expand(block[::2, ::2], local // 2), F.embedding(local // 2, block[::2, ::2]))


@floats
@pytest.mark.parametrize("dim", [0, 1, 2, 15, 16, 17, 100, 128, 300])
@pytest.mark.parametrize("count, num_rows", [(0, 0), (0, 3), (1, 1), (50, 7), (3000, 1), (3000, 5000), (3000, 900)])
def test_sums_are_torchs_to_the_bit(threads: int, dtype: torch.dtype, dim: int, count: int, num_rows: int):
    local = zipf(count, num_rows) if count else torch.empty(0, dtype=torch.int64)
    values = torch.randn(count, dim, dtype=dtype)
    ours = kernels.sum_rows(values, local, num_rows)
    assert ours.shape == (num_rows, dim)
    if dim:  # torch divides by zero
        assert torch.equal(bits(ours), bits(torchs_sum(values, local, num_rows)))


def test_a_row_of_most_ids_is_summed_in_order_by_many_threads(threads: int):
    """Such a row is divided among the threads by columns."""
    local = torch.zeros(40_000, dtype=torch.int64)
    local[::10] = torch.randint(500, (4000,))
    values = torch.randn(40_000, 130) * torch.logspace(-6, 6, 40_000).unsqueeze(1)
    assert torch.equal(kernels.sum_rows(values, local, 500), torchs_sum(values, local, 500))


def test_special_values_are_added_as_torch_does():
    values = torch.tensor([[-0.0, torch.inf, torch.nan], [-0.0, -torch.inf, 1.0], [-0.0, 1e38, 1e-45]])
    local = torch.tensor([0, 0, 1])
    assert torch.equal(bits(kernels.sum_rows(values, local, 2)), bits(torchs_sum(values, local, 2)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_added_as_floats_and_rounded_once(dtype: torch.dtype):
    local, values = zipf(3000, 20), torch.randn(3000, 33).to(dtype)
    assert torch.equal(kernels.sum_rows(values, local, 20), torchs_sum(values.float(), local, 20).to(dtype))


@floats
def test_values_of_any_layout(dtype: torch.dtype):
    local = torch.randint(5, (4, 6))
    wide = torch.randn(4, 6, 14, dtype=dtype)
    layouts = [
        wide[..., 3:10],
        wide[..., ::2],
        wide.transpose(0, 1).contiguous().transpose(0, 1),
        torch.randn(14, 6, 4, dtype=dtype).permute(2, 1, 0),
        torch.randn(14, dtype=dtype).expand(4, 6, 14),
        torch.randn((), dtype=dtype).expand(4, 6, 14),
        torch.randn(4, 6, 1, dtype=dtype).expand(4, 6, 14),
        torch.randn(6, 14, dtype=dtype).expand(4, 6, 14),
    ]
    for values in layouts:
        assert torch.equal(kernels.sum_rows(values, local, 5), torchs_sum(values.contiguous(), local, 5))


@given(local=st.lists(st.integers(0, 9), max_size=60))
def test_groups_are_a_stable_sort(local: list[int]):
    order, offsets = kernels.group(torch.tensor(local, dtype=torch.int64), 10)
    assert order.tolist() == sorted(range(len(local)), key=lambda i: local[i])
    assert offsets.tolist() == [sum(row < r for row in local) for r in range(11)]


@pytest.mark.parametrize("place", [-1, 5, 2**40])
def test_places_outside_the_block_are_refused(place: int):
    local = torch.tensor([0, place])
    with pytest.raises(IdError, match=rf"ids\[1\] is {place}"):
        kernels.sum_segments_back(torch.zeros(1, 2), local, 5, torch.tensor([0, 2]))


def test_entries_before_the_first_segment_have_no_gradient_to_sum():
    with pytest.raises(ValueError, match=r"offsets\[0\] is 3, not 0"):
        kernels.sum_segments_back(torch.zeros(0, 2), torch.tensor([0, 1, 1]), 5, torch.tensor([3]))


def test_unsupported_dtypes_are_refused():
    index, offsets = torch.tensor([0]), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"values is torch.complex64 on cpu; make it float32 or float64 on the CPU"):
        kernels.sum_segments(torch.zeros(1, 2, dtype=torch.complex64), index, offsets)
    with pytest.raises(TypeError, match=r"index is torch.int32 on cpu; make it torch.int64"):
        kernels.sum_segments(torch.zeros(1, 2), index.int(), offsets)
    with pytest.raises(ValueError, match=r"weights is torch.float64 of shape \(1,\); it must be torch.float32"):
        kernels.sum_segments(torch.zeros(1, 2), index, offsets, torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"others is torch.float32 of shape \(1, 3\); it must be .* of shape \(1, 2\)"):
        kernels.dot_segments(torch.zeros(1, 2), index, offsets, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"entries has shape \(1,\) and taken \(2, 2\); they must have"):
        kernels.sum_taken(torch.zeros(1, 2), index, offsets, index, torch.zeros(2, 2, dtype=torch.int64))


def test_large_results_are_like_small_ones():
    """Buffers that request huge pages."""
    block, local = torch.randn(300, 128), torch.randint(300, (20_000,))
    assert torch.equal(kernels.expand(block, local), F.embedding(local, block))


DIGEST = """
import hashlib, torch
from speedswap import kernels
torch.manual_seed(0)
values, weights = torch.randn(90, 75), torch.randn(2000)
index, offsets = torch.randint(90, (2000,)), torch.tensor([0, 5, 5, 1900, 2000])
sums = kernels.sum_segments(values, index, offsets, weights)
results = [sums, kernels.dot_segments(values, index, offsets, sums), *kernels.max_segments(values, index, offsets)]
digest = hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()
"""


def test_every_instruction_set_gives_the_same_bits(run_with_isa):
    here: dict[str, str] = {}
    exec(DIGEST, here)
    for asked in ("sse2", "avx2"):
        assert run_with_isa(asked, DIGEST + "print(digest)").strip() == here["digest"]


# ---- bags ------------------------------------------------------------------------------------------------------------


def some_bags(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, index and offsets of bags: some empty, at both ends and inside, one larger than a share."""
    sizes = torch.cat([torch.tensor([0, 3, 0, 0, 1, 9000]), torch.randint(6, (500,)), torch.tensor([0])])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return torch.randn(70, dim, dtype=dtype), torch.randint(70, (int(offsets[-1]),)), offsets


def by_bag(values: Tensor, index: Tensor, offsets: Tensor) -> list[np.ndarray]:
    rows = values.numpy()[index.numpy()]
    return [rows[begin:end] for begin, end in itertools.pairwise(offsets)]


@floats
@pytest.mark.parametrize("dim", [1, 7, 33, 128])
def test_weighted_sums_are_numpys(threads: int, dtype: torch.dtype, dim: int):
    values, index, offsets = some_bags(dtype, dim)
    weights = torch.rand(len(index), dtype=dtype)
    ours = kernels.sum_segments(values, index, offsets, weights)
    scaled = values[index] * weights.unsqueeze(1)
    # One addition after the other, in this order: nothing to tolerate.
    expected = torchs_sum(scaled, torch.repeat_interleave(offsets.diff()), len(offsets) - 1)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("features", [1, 2, 51, 102, 510])
@pytest.mark.parametrize("factors", ["none", "weights", "divisors", "both"])
def test_features_lie_side_by_side_and_their_gradient_finds_its_way_back(threads: int, features: int, factors: str):
    values, index, offsets = some_bags(torch.float64, 19)
    offsets = torch.cat([offsets, offsets[-1:].expand(510 - (len(offsets) - 1))])  # 510 bags
    count = 510 // features
    weights = torch.rand(len(index), dtype=torch.float64) if factors in ("weights", "both") else None
    divisors = torch.rand(510, dtype=torch.float64) + 0.5 if factors in ("divisors", "both") else None
    sums = kernels.sum_segments(values, index, offsets, weights)
    expected = sums if divisors is None else sums / divisors.unsqueeze(1)
    ours = kernels.sum_segments(values, index, offsets, weights, divisors=divisors, features=features)
    assert torch.equal(ours, expected.view(features, count, 19).transpose(0, 1).reshape(count, features * 19))

    entries = torch.ones(len(index), dtype=torch.float64) if weights is None else weights.clone()
    bag_of = torch.repeat_interleave(offsets.diff())
    if divisors is not None:
        entries /= divisors[bag_of]
    wide = torch.randn(count, 2 + features * 19 + 17, dtype=torch.float64)
    layouts = [
        wide[:, 2 : 2 + features * 19].contiguous(),
        wide[:, 2 : 2 + features * 19],
        torch.randn(count, (features + 2) * 19, dtype=torch.float64)[:, 19:-19],  # a multiple: not copied
        torch.randn(features * 19, count, dtype=torch.float64).T,
        torch.randn((), dtype=torch.float64).expand(count, features * 19),
    ]
    for grad in layouts:
        back = kernels.sum_segments_back(
            grad, index, len(values), offsets, weights, divisors=divisors, features=features
        )
        bags = grad.reshape(count, features, 19).transpose(0, 1).reshape(510, 19)
        scaled = bags[bag_of] * entries.unsqueeze(1)
        assert torch.equal(back, torchs_sum(scaled, index, len(values)))


@floats
@pytest.mark.parametrize("dim", [0, 1, 7, 33, 128])
def test_products_are_numpys(threads: int, dtype: torch.dtype, dim: int):
    values, index, offsets = some_bags(dtype, dim)
    others = torch.randn(len(offsets) - 1, dim, dtype=dtype)
    ours = kernels.dot_segments(values, index, offsets, others)
    bags = by_bag(values.double(), index, offsets)
    expected = np.concatenate([rows @ other for rows, other in zip(bags, others.double().numpy(), strict=True)])
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)


@floats
@pytest.mark.parametrize("dim", [1, 7, 128])
def test_maxima_and_where_they_were_taken_are_numpys(threads: int, dtype: torch.dtype, dim: int):
    values, index, offsets = some_bags(dtype, dim)
    values = values.round()  # many equal ones
    ours, taken = kernels.max_segments(values, index, offsets)
    for bag, rows in enumerate(by_bag(values, index, offsets)):
        if len(rows) == 0:
            assert (ours[bag] == 0).all()
            assert (taken[bag] == -1).all()
            continue
        np.testing.assert_array_equal(ours[bag].numpy(), rows.max(axis=0))
        np.testing.assert_array_equal(taken[bag].numpy(), int(offsets[bag]) + rows.argmax(axis=0))


@floats
def test_what_was_taken_finds_its_way_back(threads: int, dtype: torch.dtype):
    values, index, offsets = some_bags(dtype, 19)
    _, taken = kernels.max_segments(values, index, offsets)
    grad = torch.randn(len(offsets) - 1, 19, dtype=dtype)
    order, starts = kernels.group(index, len(values))
    bags = torch.repeat_interleave(offsets.diff())[order]
    ours = kernels.sum_taken(grad, bags, starts, order, taken)
    expected = np.zeros((len(values), 19))
    for bag, column in zip(*np.nonzero(taken.numpy() >= 0), strict=True):
        expected[index[taken[bag, column]], column] += float(grad[bag, column])
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)


def test_a_nan_counts_as_greatest_only_where_it_comes_first():
    """As in torch: nothing is greater than it, and it is greater than nothing."""
    values = torch.tensor([[torch.nan], [1.0]])
    ours, taken = kernels.max_segments(values, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 2, 4]))
    assert ours[0].isnan()
    assert ours[1] == 1
    assert taken.tolist() == [[0], [2]]
