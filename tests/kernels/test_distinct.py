"""Distinct ids as a GPU finds them, on tensors of the CPU, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speedswap import kernels
from speedswap.errors import IdError
from speedswap.kernels import ids as module
from speedswap.kernels.ids import distinct

DTYPES = [torch.int32, torch.int64]
LIMIT = {torch.int32: 2**31, torch.int64: 2**63}


def assert_found(found: tuple[Tensor, Tensor] | None, ids: Tensor) -> None:
    """Assert that rows and positions are those of torch.unique."""
    rows, local = torch.unique(ids, sorted=True, return_inverse=True)
    assert found is not None
    assert found[0].dtype == found[1].dtype == torch.int64
    assert torch.equal(found[0], rows.long())
    assert torch.equal(found[1], local.view(ids.shape))


def test_a_literal_batch() -> None:
    ids = torch.tensor([[7, 3], [3, 9]])
    for num_rows in (None, [10]):
        ((rows, local),) = distinct([ids], num_rows)  # type: ignore[misc]
        assert rows.tolist() == [3, 7, 9]
        assert local.tolist() == [[1, 0], [0, 2]]


def test_several_literal_lookups() -> None:
    first, second, third = distinct(
        [torch.tensor([4, 0, 4]), torch.tensor([[0], [4]]), torch.tensor([5, 0])], [5, 5, 5]
    )
    assert [part.tolist() for part in first or ()] == [[0, 4], [1, 0, 1]]
    assert [part.tolist() for part in second or ()] == [[0, 4], [[0], [1]]]
    assert third is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1, 10, 10**4, 10**9, 2**31, 2**63], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3000])
def test_ids_of_any_value(dtype: torch.dtype, spread: int, count: int) -> None:
    limit = min(spread, LIMIT[dtype])
    for low in (0, -limit):
        ids = torch.from_numpy(np.random.default_rng(1).integers(low, low + limit, count, np.int64)).to(dtype)
        assert_found(distinct([ids])[0], ids)


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
        several.append((torch.tensor(draw(st.lists(values, max_size=12)), dtype=dtype), num_rows))
    return several


@given(several=lookups())
def test_several_lookups_at_once(several: list[tuple[Tensor, int]]) -> None:
    results = distinct([ids for ids, _ in several], [num_rows for _, num_rows in several])
    for found, (ids, num_rows) in zip(results, several, strict=True):
        if any(not 0 <= value < num_rows for value in ids.tolist()):
            assert found is None
        else:
            assert_found(found, ids)


def test_ids_of_any_layout() -> None:
    ids = torch.arange(24).view(4, 6) % 5
    views = [ids.t(), ids[::2], ids[:, 1::2], ids[:1].expand(3, 6), ids[1, 1], ids[:0]]
    for found, view in zip(distinct(views, [5] * len(views)), views, strict=True):
        assert_found(found, view.contiguous())


class Dispatched(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# Each of them makes the host wait for a GPU.
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}


def test_one_round_trip_for_any_number_of_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = module._ask

    def counted(positions: list[int], *values: Tensor) -> list[list[int]]:
        asked.append(len(positions))
        return ask(positions, *values)

    monkeypatch.setattr(module, "_ask", counted)
    several = [torch.randint(50, (20,)) for _ in range(10)]
    with Dispatched() as ran:
        distinct(several, [50] * 10)
    assert asked == [20]
    assert ran.names.count("sort") == 1
    assert not WAITING & set(ran.names)


def test_a_lookup_out_of_range_names_the_id(device: str) -> None:
    ids = torch.tensor([[1, 2], [9, -1]], device=device)
    with pytest.raises(IdError, match=r"ids\[1, 0\] is 9, but table 'items' has rows 0 to 4; map unknown ids to a"):
        kernels.find_rows(ids, 5, "table 'items'")


def test_lookups_on_any_device(device: str) -> None:
    several = [torch.tensor(ids, device=device) for ids in ([3, 3, 1], [0], [7, 2])]
    found = kernels.find_all([(ids, 5) for ids in several])
    assert found[2] is None
    for each, ids in zip(found[:2], several[:2], strict=True):
        assert each is not None
        assert each[0].device.type == device
        assert_found((each[0].cpu(), each[1].cpu()), ids.cpu())


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
