"""Observers report what was replaced, moved, regrouped, frozen or cast; and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedswap.compat.infinitybatch.changes import ChangeObserver
from speedswap.monitor import ChangeWarning, MonitorWarning, WarningPolicy


@pytest.fixture
def parts():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1), "criterion": nn.MSELoss()}


def observing(level="user", **parts):
    observer = ChangeObserver(WarningPolicy(level))
    for name, part in parts.items():
        assert observer.observe(name, part) == []
    return observer


def kinds(changes):
    return [(change.name, change.kind) for change in changes]


def test_training_changes_nothing(parts):
    observer = observing("expert", **parts)
    for _ in range(2):
        parts["model"](torch.randn(4, 2)).sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["model"].eval()
        assert observer.check() == []


@pytest.mark.parametrize("name", ["model", "optimizer", "criterion"])
def test_replacing_is_reported_once(parts, name):
    observer = observing("expert", **parts)
    other = nn.Linear(2, 2)
    new = {"model": other, "optimizer": torch.optim.SGD(other.parameters()), "criterion": nn.L1Loss()}[name]
    with pytest.warns(MonitorWarning) as said:
        changes = observer.observe(name, new)
    assert kinds(changes) == [(name, "replaced")]
    assert [warning.message.code for warning in said] == ["SW201"]
    assert observer.observe(name, new) == []
    assert observer.check() == []


def test_moving_is_reported_of_model_and_criterion(parts):
    parts["criterion"] = nn.CrossEntropyLoss(weight=torch.ones(3))
    observer = observing("off", **parts)
    parts["criterion"].to("meta")
    assert kinds(observer.check()) == [("criterion", "device")]
    parts["model"].to("meta")
    changes = observer.check()
    assert ("model", "device") in kinds(changes)
    assert str(changes[0]) == "model: device changed from cpu to meta"
    loud = observing(criterion=parts["criterion"])
    parts["criterion"].to_empty(device="cpu")
    with pytest.warns(ChangeWarning, match="SW202: criterion"):
        loud.check()


def test_param_groups_and_hyperparameters_are_told_apart(parts):
    observer = observing("expert", **parts)
    optimizer = parts["optimizer"]
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.warns(ChangeWarning, match="SW204"):
        assert kinds(observer.check()) == [("optimizer", "hyperparameters")]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.01})
    with pytest.warns(ChangeWarning, match="SW203"):
        assert ("optimizer", "parameter_groups") in kinds(observer.check())
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 2))
    assert kinds(observer.check()) == [("optimizer", "parameter_groups")]  # a code is said once


def test_a_learning_rate_in_a_tensor_that_changes_in_place_is_seen(parts):
    rate = torch.tensor(0.1)
    parts["optimizer"].param_groups[0]["lr"] = rate
    observer = observing("off", **parts)
    assert observer.check() == []
    rate.fill_(0.2)
    assert kinds(observer.check()) == [("optimizer", "hyperparameters")]


def test_freezing_and_casting_are_reported(parts):
    observer = observing("off", model=parts["model"])
    parts["model"][0].weight.requires_grad_(False)
    assert kinds(observer.check()) == [("model", "trainable")]
    parts["model"].double()
    assert kinds(observer.check()) == [("model", "dtype")]


def test_changes_below_the_level_of_warnings_are_kept(parts):
    observer = observing("user", **parts)
    observer.observe("model", nn.Linear(1, 1))  # without a warning, which would be an error
    observer.observe("model", None)
    assert [(change.before, change.after) for change in observer.changes] == [
        ("a Sequential", "a Linear"),
        ("a Linear", "None"),
    ]
