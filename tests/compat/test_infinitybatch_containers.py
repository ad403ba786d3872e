"""Storage strategies: what is kept, and that nothing keeps a graph alive."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedswap.compat.infinitybatch import DiskStorage, HostStorage, RunningStatistics
from speedswap.compat.infinitybatch.data import make_storage

Pair = namedtuple("Pair", "logits hidden")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str


def outputs_of(batches, device="cpu"):
    weight = torch.ones(3, requires_grad=True, device=device)
    return [{"logits": weight * index, "parts": Pair(weight.exp(), [weight.sum()])} for index in range(batches)]


@pytest.mark.parametrize("strategy", ["none", "last", "host", "statistics", "disk"])
def test_no_strategy_keeps_a_graph(strategy, device):
    storage = make_storage(strategy)
    weight = torch.ones(3, requires_grad=True, device=device)
    output = {"logits": weight * 2, "parts": [weight.exp()]}
    only_the_graph_has_it = weakref.ref(weight)
    storage.append(output)
    del weight, output
    gc.collect()
    assert only_the_graph_has_it() is None


@pytest.mark.parametrize(
    ("strategy", "kept"), [("none", []), ("last", [3]), ("host", [0, 1, 2, 3]), ("disk", [0, 1, 2, 3])]
)
def test_strategies_keep_what_they_say(strategy, kept, device):
    storage = make_storage(strategy)
    for output in outputs_of(4, device):
        storage.append(output["logits"])
    assert len(storage) == len(kept)
    assert [value.cpu().tolist() for value in storage] == [[float(index)] * 3 for index in kept]
    assert [value.cpu()[0] for value in storage[:]] == [float(index) for index in kept]
    if kept:
        assert storage[-1][0] == kept[-1]
    with pytest.raises(IndexError, match=f"value {len(kept)} of {len(kept)}"):
        storage[len(kept)]
    storage.clear()
    assert list(storage) == []


def test_nested_values_keep_their_structure():
    storage = make_storage("host")
    (output,) = outputs_of(1)
    storage.append((output, Output(output["logits"], "first"), None, 2))
    kept, record, nothing, number = storage[0]
    assert type(kept["parts"]) is Pair
    assert not kept["logits"].requires_grad
    assert kept["parts"].hidden[0].item() == 3
    assert isinstance(record, Output)
    assert (record.name, record.logits.requires_grad) == ("first", False)
    assert (nothing, number) == (None, 2)


def test_host_copies_do_not_change_with_the_original():
    storage = make_storage("host")
    tensor = torch.zeros(2)
    storage.append(tensor)
    tensor.fill_(1)
    assert storage[0].tolist() == [0, 0]


def test_host_storage_can_be_bounded():
    storage = HostStorage(limit=2)
    for index in range(5):
        storage.append(index)
    assert list(storage) == [3, 4]


def test_disk_storage_is_read_on_and_cleaned_up(tmp_path):
    DiskStorage(tmp_path).append({"logits": torch.arange(3)})
    again = DiskStorage(tmp_path)
    again.append(torch.ones(1))
    assert len(again) == 2
    assert again[0]["logits"].tolist() == [0, 1, 2]
    temporary = DiskStorage()
    temporary.append(1.5)
    place = temporary.directory
    assert place.exists()
    del temporary
    gc.collect()
    assert not place.exists()


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=8))
def test_running_statistics_are_numpys(batches):
    statistics = RunningStatistics()
    for batch in batches:
        statistics.add(torch.tensor(batch, dtype=torch.float64))
    values = np.concatenate(batches)
    assert statistics.count == len(values)
    assert statistics.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-6)
    assert (statistics.minimum, statistics.maximum) == (values.min(), values.max())
    if len(values) > 1:
        assert statistics.variance == pytest.approx(values.var(ddof=1), rel=1e-6, abs=1e-3)


def test_running_statistics_of_nothing_are_not_numbers():
    figures = RunningStatistics().as_dict()
    assert figures["count"] == 0
    assert math.isnan(figures["mean"])
    assert math.isnan(figures["standard_deviation"])


def test_running_statistics_take_nested_and_half_precision_values(device):
    storage = make_storage("statistics")
    storage.append({"a": torch.tensor([1.0, 3.0], dtype=torch.bfloat16, device=device), "b": [torch.tensor(5)]})
    storage.append(7)
    assert storage[0].as_dict() == pytest.approx(
        {"count": 4, "mean": 4.0, "standard_deviation": math.sqrt(20 / 3), "minimum": 1.0, "maximum": 7.0}
    )


def test_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy is 'everything'"):
        make_storage("everything")
