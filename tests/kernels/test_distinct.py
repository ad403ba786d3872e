"""Distinct ids of one and of several lookups, on any device, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import simulated_gpu
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.kernels import find_all, unique
from speedswap.kernels.cuda.shapes import KEYS_PER_THREAD

DTYPES = [torch.int32, torch.int64]
LIMIT = {torch.int32: 2**31, torch.int64: 2**63}


def assert_found(found: tuple[Tensor, Tensor] | None, ids: Tensor) -> None:
    """Assert that rows and positions are those of torch.unique."""
    rows, local = torch.unique(ids.cpu(), sorted=True, return_inverse=True)
    assert found is not None
    assert found[0].dtype == found[1].dtype == torch.int64
    assert found[0].device == found[1].device == ids.device
    assert torch.equal(found[0].cpu(), rows.long())
    assert torch.equal(found[1].cpu(), local.view(ids.shape))


def test_a_literal_batch(device: str) -> None:
    ids = torch.tensor([[7, 3], [3, 9]], device=device)
    for rows, local in (unique(ids), kernels.find_rows(ids, 10, "table 'items'")):
        assert rows.tolist() == [3, 7, 9]
        assert local.tolist() == [[1, 0], [0, 2]]


def test_several_literal_lookups(device: str) -> None:
    several = [torch.tensor(ids, device=device) for ids in ([4, 0, 4], [[0], [4]], [5, 0])]
    first, second, third = find_all([(ids, 5) for ids in several])
    assert [part.tolist() for part in first or ()] == [[0, 4], [1, 0, 1]]
    assert [part.tolist() for part in second or ()] == [[0, 4], [[0], [1]]]
    assert third is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1, 10, 10**4, 10**9, 2**31, 2**63], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3000])
def test_ids_of_any_value(dtype: torch.dtype, spread: int, count: int, device: str) -> None:
    limit = min(spread, LIMIT[dtype])
    for low in (0, -limit):
        ids = torch.from_numpy(np.random.default_rng(1).integers(low, low + limit, count, np.int64)).to(device, dtype)
        assert_found(unique(ids), ids)


@st.composite
def lookups(draw: st.DrawFn) -> list[tuple[Tensor, int]]:
    """Draw ids and numbers of rows; some ids out of range, on either side."""
    several = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        num_rows = draw(st.sampled_from([1, 2, 7, 40, 2**31 - 3, 2**31 - 1, 2**31, 2**40]))
        inside = st.integers(0, min(num_rows, LIMIT[dtype]) - 1)
        near = st.integers(0, min(num_rows, 6) - 1)
        outside = st.sampled_from([-LIMIT[dtype], -2, -1, min(num_rows, LIMIT[dtype] - 1), LIMIT[dtype] - 1])
        values = st.one_of(inside, near, near, outside) if draw(st.booleans()) else st.one_of(inside, near)
        sizes = {"max_size": 3 * KEYS_PER_THREAD if draw(st.booleans()) else 5}
        several.append((torch.tensor(draw(st.lists(values, **sizes)), dtype=dtype), num_rows))
    return several


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the device is the same for all examples
@given(several=lookups())
def test_several_lookups_at_once(several: list[tuple[Tensor, int]], device: str) -> None:
    results = find_all([(ids.to(device), num_rows) for ids, num_rows in several])
    for found, (ids, num_rows) in zip(results, several, strict=True):
        if any(not 0 <= value < num_rows for value in ids.tolist()):
            assert found is None
        else:
            assert_found(found, ids.to(device))


@pytest.mark.parametrize("count", [KEYS_PER_THREAD - 1, KEYS_PER_THREAD, KEYS_PER_THREAD + 1, 5000])
def test_lookups_that_begin_and_end_within_a_thread(count: int, device: str) -> None:
    generator = torch.Generator().manual_seed(count)
    sizes = [count, 0, 1, KEYS_PER_THREAD, 0, 0, count, 3]
    several = [torch.randint(200, (size,), generator=generator).to(device) for size in sizes]
    for found, ids in zip(find_all([(ids, 200) for ids in several]), several, strict=True):
        assert_found(found, ids)


def test_ids_of_any_layout(device: str) -> None:
    ids = (torch.arange(24).view(4, 6) % 5).to(device)
    views = [ids.t(), ids[::2], ids[:, 1::2], ids[:1].expand(3, 6), ids[1, 1], ids[:0]]
    for found, view in zip(find_all([(view, 5) for view in views]), views, strict=True):
        assert_found(found, view)


def test_one_round_trip_for_any_number_of_lookups(device: str) -> None:
    if not simulated_gpu.is_on():
        pytest.skip("round trips are counted on the simulated GPU: SPEEDSWAP_TEST_DEVICE=simulated")
    several = [torch.randint(50, (20,)).to(device) for _ in range(100)]
    find_all([(ids, 50) for ids in several])
    for some in (several[:1], several):
        with simulated_gpu.counted() as counts:
            find_all([(ids, 50) for ids in some])
        assert len(counts.round_trips) == 1


def test_a_lookup_out_of_range_names_the_id(device: str) -> None:
    ids = torch.tensor([[1, 2], [9, -1]], device=device)
    with pytest.raises(IdError, match=r"ids\[1, 0\] is 9, but table 'items' has rows 0 to 4; map unknown ids to a"):
        kernels.find_rows(ids, 5, "table 'items'")


def test_a_lookup_in_a_graph_that_is_captured_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    """Waiting for the rows would end the capture with an error that names neither."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    ids = torch.tensor([3, 1, 3], device=device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"looked up inside torch\.cuda\.graph.*look them up before the graph"):
        kernels.unique(ids)
    monkeypatch.undo()
    assert kernels.unique(ids)[0].tolist() == [1, 3]
