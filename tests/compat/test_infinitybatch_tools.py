"""infinitybatch's tools: the comparisons the right way round, snapshots and histories that work anywhere."""

from __future__ import annotations

import csv
import json
import math
import mmap
import random

import numpy as np
import pytest
import torch
from torch import nn

from speedswap.compat.infinitybatch import tools
from speedswap.compat.infinitybatch.tools import CudaHistory, CudaMemorySnapShot


@pytest.mark.parametrize(
    ("one", "another", "equal"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.tensor([1, 1, 1 + 5e-8], dtype=torch.float64), True),
        (torch.ones(3), torch.tensor([1, 1, 1.001]), False),
        (torch.tensor(math.nan), torch.tensor(1.0), False),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), False),
        (torch.tensor([math.inf, -math.inf]), torch.tensor([math.inf, -math.inf]), True),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), False),
        (torch.tensor(2.0), torch.tensor(2.0), True),
        (torch.zeros(2, 0, 3), torch.zeros(2, 0, 3), True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.tensor([True, False]), torch.tensor([1, 0]), True),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), False),
    ],
)
def test_defect_7_is_equal_with_error(one, another, equal):
    assert tools.is_equal_with_error(one, another) is equal
    assert tools.is_equal_with_error(another, one, detach=False) is equal


def test_defect_7_tensors_with_graphs_are_compared_too(device):
    weight = torch.ones(4, 4, requires_grad=True, device=device)
    assert tools.is_equal_with_error(weight * 2, torch.full((4, 4), 2.0))


def test_tolerance_is_read_when_comparing(monkeypatch):
    assert tools.ERROR_TOLERANCE == 1e-7
    assert not tools.is_equal_with_error(torch.zeros(2), torch.full((2,), 0.01))
    assert (tools.compare_with_error_(1.0, 1.0 + 5e-8), tools.compare_with_error_(1.0, 1.1)) == (True, False)
    assert (tools.compare_with_error_(math.inf, math.inf), tools.compare_with_error_(math.nan, math.nan)) == (
        True,
        False,
    )
    monkeypatch.setattr(tools, "ERROR_TOLERANCE", 0.1)
    assert tools.is_equal_with_error(torch.zeros(2), torch.full((2,), 0.01))
    assert tools.compare_with_error_(1.0, 1.05)


def test_is_equal_network():
    model, other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not tools.is_equal_network(model, other)
    other.load_state_dict(model.state_dict())
    assert tools.is_equal_network(model, other)
    other[1].running_mean += 1e-7
    assert not tools.is_equal_network(model, other)
    assert not tools.is_equal_network(model, nn.Linear(2, 2))
    assert not tools.is_equal_network(nn.Linear(2, 2), nn.Linear(2, 3))


def test_determinize_seeds_every_generator():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002

    def draws():
        return torch.rand(1).item(), np.random.random(), random.random()  # noqa: NPY002

    try:
        seen = []
        for seed in (5, 5, None, None):
            tools.determinize(seed)
            seen.append(draws())
        assert seen[0] == seen[1] != seen[2] == seen[3]
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        tools.determinize(be_deterministic=False)
        first = draws()
        tools.determinize(be_deterministic=False)
        assert all(one != other for one, other in zip(first, draws(), strict=True))
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def test_defect_6_snapshot_has_a_free_cache_and_cannot_be_changed(device):
    snapshot = CudaMemorySnapShot(device)
    assert snapshot.device == device
    assert snapshot.free_cache == snapshot.reserved - snapshot.allocated >= 0
    assert 0 <= snapshot.allocated <= snapshot.reserved <= snapshot.total
    before = snapshot.allocated
    for name in ("allocated", "reserved", "total", "device"):
        setattr(snapshot, name, -1)
    assert (snapshot.allocated, snapshot.device) == (before, device)
    assert CudaMemorySnapShot(synchronize=False).device is None


class Mine(CudaHistory):
    """Somebody's own history."""


@pytest.mark.parametrize("kind", [CudaHistory, Mine])
def test_defect_6_history_can_be_subclassed(kind, device):
    history = kind()
    assert str(history) == "CudaHistory is empty."
    history.append("before", device)
    history.append("a label that is much longer than twenty", device, False)
    assert [label for label, _ in history] == ["before", "a label that is much"]
    assert isinstance(history[1][1], CudaMemorySnapShot)
    lines = str(history).splitlines()
    assert lines[0] == "CudaHistory:"
    assert [cell.strip() for cell in lines[1].strip("|").split("|")] == ["Name", "Total", "Reserved", "Allocated"]
    assert str(history[0][1].allocated) in lines[2]


def test_plan_12_history_records_failures_too():
    history = CudaHistory()

    def fail():
        with history, history.span("work"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [label for label, _ in history] == ["begin", "work: begin", "work: end", "end"]


def test_plan_12_history_has_deltas_and_exports(tmp_path):
    with CudaHistory() as history:
        if torch.cuda.is_available():
            block = torch.ones(16 * 2**20, device="cuda")
        else:  # pages that no earlier test has freed
            block = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.float32).fill_(1)
        history.append("allocated")
        with history.span("sum"):
            assert block.sum() > 0
    assert [label for label, _ in history] == ["begin", "allocated", "sum: begin", "sum: end", "end"]
    assert history.deltas()[0][1]["allocated"] > 32 * 2**20
    history.to_json(tmp_path / "history.json")
    history.to_csv(tmp_path / "history.csv")
    assert [row["label"] for row in json.loads((tmp_path / "history.json").read_text())][:2] == ["begin", "allocated"]
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["seconds"]) for row in rows] == sorted(float(row["seconds"]) for row in rows)
    assert int(rows[1]["allocated"]) == history[1][1].allocated
