"""A checkpoint goes into optimizers with other settings, frozen tables and shared ones; or into the model alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swapping.checkpoints.trainings import OPTIMIZERS, Training, assert_same
from torch import nn
from torch.optim import SGD, Adam, Optimizer, RMSprop

import speedswap
from speedswap.errors import CheckpointError

Make = Callable[[Any], Optimizer]


def training(make: Make, **settings: Any) -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(speedswap.Embedding(12, 4, seed=1, **settings), nn.Linear(4, 1))
    return model, make(model.parameters())


def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randint(12, (30,), generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def state_of(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    states = {"model": dict(model.state_dict()), "optimizers": [each.state_dict() for each in optimizers]}
    return copy.deepcopy(states)


def adam(params: Any) -> Optimizer:
    return Adam(params, lr=0.05)


SETTINGS: dict[str, tuple[Make, Make]] = {
    "momentum": (lambda p: SGD(p, lr=0.01, momentum=0.9), lambda p: SGD(p, lr=0.1)),
    "amsgrad": (lambda p: Adam(p, lr=0.01, amsgrad=True), lambda p: Adam(p, lr=0.1)),
    "centered": (lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True), lambda p: RMSprop(p, lr=0.1)),
}


@pytest.mark.parametrize("storage", ["pageable", "disk"])
@pytest.mark.parametrize("steps_before", [0, 2], ids=["new", "trained"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_an_optimizer_takes_settings_and_state_that_it_did_not_have(
    kind: str, steps_before: int, storage: str, tmp_path: Path
) -> None:
    """As torch's own load_state_dict does: it goes on with the momentum that it is told to use."""
    saved, other = SETTINGS[kind]
    model, optimizer = training(saved)
    run(model, optimizer, range(4))
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    path = {"path": tmp_path / "rows"} if storage == "disk" else {}
    again, its_optimizer = training(other, storage=storage, **path)
    run(again, its_optimizer, range(10, 10 + steps_before))
    speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))
    run(model, optimizer, range(4, 7))
    run(again, its_optimizer, range(4, 7))
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))


def test_a_table_of_the_checkpoint_goes_on_with_other_settings(tmp_path: Path) -> None:
    """Its file has the columns, of which the optimizer knows nothing before it is loaded."""
    saved, other = SETTINGS["momentum"]
    model, optimizer = training(saved, path=tmp_path / "rows")
    run(model, optimizer, range(4))
    speedswap.save_checkpoint(tmp_path / "run", model, optimizer)
    run(model, optimizer, range(4, 7))
    expected = state_of(model, optimizer)
    model[0].table.close()
    torch.manual_seed(0)
    rows = speedswap.Embedding(12, 4, table=speedswap.Table.open(tmp_path / "rows"))
    again = nn.Sequential(rows, nn.Linear(4, 1))
    its_optimizer = other(again.parameters())
    speedswap.load_checkpoint(tmp_path / "run", again, its_optimizer)
    run(again, its_optimizer, range(4, 7))
    assert_same(state_of(again, its_optimizer), expected)


def test_settings_are_as_before_where_a_checkpoint_is_refused(tmp_path: Path) -> None:
    saved, other = SETTINGS["momentum"]
    model, optimizer = training(saved, stored_dtype=torch.bfloat16)
    run(model, optimizer, range(1))
    speedswap.save_checkpoint(tmp_path, model, optimizer, extra={"a": 1})
    again, its_optimizer = training(other, stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    before = state_of(again, its_optimizer)
    again.append(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    with pytest.raises(TypeError, match=r"extra\['a'\] is an int; give an object with load_state_dict"):
        speedswap.load_checkpoint(tmp_path, again[:2], its_optimizer, extra={"a": 5})
    assert_same(state_of(again[:2], its_optimizer), before)


@pytest.mark.parametrize("storage", ["pageable", "disk", "held"])
def test_a_model_loaded_alone_leaves_the_optimizer_as_it_is(storage: str, tmp_path: Path) -> None:
    """The rows' state goes with the step count and the dense half's state, which stay; as with load_state_dict."""
    path = {} if storage == "pageable" else {"path": tmp_path / "rows"}
    model, optimizer = training(adam, **(path if storage == "held" else {}))
    run(model, optimizer, range(5))
    speedswap.save_checkpoint(tmp_path / "run", model, optimizer)
    weights = state_of(model)
    again, its_optimizer = (model, optimizer) if storage == "held" else training(adam, **path)
    run(again, its_optimizer, range(10, 20))
    state = state_of(nn.Identity(), its_optimizer)
    speedswap.load_checkpoint(tmp_path / "run", again)
    assert_same(state_of(nn.Identity(), its_optimizer), state)
    assert_same(state_of(again), weights)
    if storage == "disk":
        again[0].table.close()
        with speedswap.Table.open(tmp_path / "rows") as table:
            assert table.attributes["optimizer"]["scalars"] == {"step": 10.0}


def test_an_optimizer_that_is_not_loaded_keeps_its_rows_state(tmp_path: Path) -> None:
    def two() -> tuple[nn.ModuleDict, list[Optimizer]]:
        model = nn.ModuleDict({key: speedswap.Embedding(12, 4, seed=1) for key in "ab"})
        return model, [Adam(each.parameters(), lr=0.1) for each in model.values()]

    def step(model: nn.ModuleDict, optimizers: list[Optimizer]) -> None:
        for each, optimizer in zip(model.values(), optimizers, strict=True):
            each(torch.arange(5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizers = two()
    step(model, optimizers)
    speedswap.save_checkpoint(tmp_path, model, optimizers[0])
    again, others = two()
    for _ in range(3):
        step(again, others)
    kept = copy.deepcopy(others[1].state_dict())
    speedswap.load_checkpoint(tmp_path, again, others[0])
    assert_same(others[1].state_dict(), kept)
    assert_same(others[0].state_dict(), optimizers[0].state_dict())
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def maps(keys: str = "int64", evict: str | None = None) -> nn.ModuleDict:
    torch.manual_seed(0)
    ids = speedswap.IdMap(10, keys=keys, evict=evict)
    first = speedswap.Embedding(40, 4, seed=1)
    return nn.ModuleDict({"a": first, "b": speedswap.Embedding(11, 4, seed=2, id_map=ids), "c": nn.Linear(1, 1)})


def test_a_second_table_that_does_not_fit_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    saved = maps()
    saved["b"](torch.tensor([5, 7]))
    speedswap.save_checkpoint(tmp_path, saved, extra={"a": 5})

    def refuse(kind: type[Exception], match: str, model: nn.ModuleDict, **settings: Any) -> None:
        nn.init.zeros_(model["a"].weight)
        before = state_of(model["a"]), state_of(model["c"])
        with pytest.raises(kind, match=match):
            speedswap.load_checkpoint(tmp_path, model, **settings)
        assert_same((state_of(model["a"]), state_of(model["c"])), before)

    refuse(CheckpointError, "was made with keys='int64', but this map with 'hashed'; make the map", maps("hashed"))
    refuse(CheckpointError, r"evict=None, but this map with 'lru'.*in table .* of the model \(b\)", maps(evict="lru"))
    refuse(TypeError, r"extra\['a'\] is an int; give an object with load_state_dict", maps(), extra={"a": 5})
    refuse(TypeError, r"extra\['a'\] is a Generator, but an int was saved", maps(), extra={"a": torch.Generator()})
    closed = maps()
    closed["b"].table.close()
    refuse(speedswap.errors.TableClosedError, "closed", closed)
    found = maps()
    speedswap.load_checkpoint(tmp_path, found)
    assert found["b"].id_map.lookup(torch.tensor([7, 5, 6])).tolist() == [2, 1, 0]


def test_damage_in_a_second_tables_id_map_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    folder = speedswap.save_checkpoint(tmp_path, maps()).path
    path = next(folder.glob("tensors-*"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"speedswap-keys 1 ") + 2] ^= 1
    path.write_bytes(raw)
    model = maps()
    nn.init.zeros_(model["a"].weight)
    with pytest.raises(CheckpointError, match=r"the bytes of 'tables.b.id_maps.' in .* differ from those"):
        speedswap.load_checkpoint(tmp_path, model)
    assert not model["a"].read().any()


def test_a_frozen_table_keeps_its_state_for_later(tmp_path: Path) -> None:
    def frozen() -> tuple[nn.Sequential, Optimizer]:
        model, optimizer = training(adam)
        model[0].weight.requires_grad_(False)
        return model, optimizer

    model, optimizer = training(adam)
    run(model, optimizer, range(3))
    model[0].weight.requires_grad_(False)
    run(model, optimizer, range(3, 5))
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    again, its_optimizer = frozen()
    speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))
    for each, its in ((model, optimizer), (again, its_optimizer)):
        each[0].weight.requires_grad_(True)
        run(each, its, range(5, 7))
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))


def test_a_frozen_table_without_state_is_loaded_without(tmp_path: Path) -> None:
    """Rows for lookup alone, among the parameters of the optimizer; also as bytes."""

    def frozen(**settings: Any) -> tuple[nn.Sequential, Optimizer]:
        model, optimizer = training(adam, **settings)
        model[0].weight.requires_grad_(False)
        return model, optimizer

    model, optimizer = frozen()
    run(model, optimizer, range(2))
    speedswap.save_checkpoint(tmp_path / "a", model, optimizer)
    again, its_optimizer = frozen()
    speedswap.load_checkpoint(tmp_path / "a", again, its_optimizer)
    assert list(again[0].table.columns) == ["weight"]
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))
    model, optimizer = training(adam)
    run(model, optimizer, range(2))
    speedswap.save_checkpoint(tmp_path / "b", model, optimizer)
    served, its_optimizer = frozen(stored_dtype=torch.int8)
    speedswap.load_checkpoint(tmp_path / "b", served, its_optimizer)
    assert list(served[0].table.columns) == ["weight"]
    torch.testing.assert_close(served[0].read(), model[0].read(), atol=0.02, rtol=0)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_two_embeddings_over_one_table_go_on(is_frozen: bool, steps: int, tmp_path: Path) -> None:
    def shared() -> tuple[nn.ModuleDict, Optimizer]:
        rows = speedswap.Embedding(12, 4, seed=1)
        model = nn.ModuleDict({"a": speedswap.Embedding(12, 4, table=rows.table), "b": rows})
        model["a"].weight.requires_grad_(not is_frozen)
        return model, Adam(model["b"].parameters(), lr=0.1)

    model, optimizer = shared()
    run(model["b"], optimizer, range(steps))
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    again, its_optimizer = shared()
    speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    for each, its in ((model, optimizer), (again, its_optimizer)):
        run(each["b"], its, range(steps, steps + 2))
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    alone, _ = shared()
    speedswap.load_checkpoint(tmp_path, alone)
    assert_same(dict(alone.state_dict()), dict(model.state_dict()))


def test_what_would_not_be_loaded_is_refused(tmp_path: Path) -> None:
    saved = Training(OPTIMIZERS["adam"])
    saved.save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"model is None, .* so optimizer would not be loaded; give the model too"):
        speedswap.load_checkpoint(tmp_path, None, saved.optimizers)
    with pytest.raises(ValueError, match=r"model is None, .* so extra would not be loaded; give the model too"):
        speedswap.load_checkpoint(tmp_path, None, extra=saved.extra)
    assert speedswap.load_checkpoint(tmp_path, None).step == 1


class Counting(nn.Module):
    """A module with data besides its parameters."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.more = more

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


@pytest.mark.parametrize(
    "more, found",
    [
        (OrderedDict(a=1), {"a": 1}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (bytearray(b"x"), b"x"),
        ({"a": 1}, {"a": 1}),
        (None, None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_extra_state_of_modules_comes_back(more: Any, found: Any, tmp_path: Path) -> None:
    speedswap.save_checkpoint(tmp_path, Counting(more))
    model = Counting(more)
    speedswap.load_checkpoint(tmp_path, model)
    assert_same(model.more, found)
    if found is not None:
        with pytest.raises(CheckpointError, match=r"_extra_state' is a tensor|_extra_state' is .* of torch.float32"):
            speedswap.load_checkpoint(tmp_path, Counting(torch.ones(1)))
        with pytest.raises(CheckpointError, match="'_extra_state' is missing in the model"):
            speedswap.load_checkpoint(tmp_path, nn.ModuleDict({"layer": nn.Linear(1, 1)}))


class Prepared(Optimizer):
    """An optimizer in front of another one, as accelerate's ``prepare`` returns it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults, self.param_groups, self.state = optimizer.defaults, optimizer.param_groups, optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda optimizer: optimizer,
    "prepared": Prepared,
    "accumulating": lambda optimizer: speedswap.batching.AccumulatingOptimizer(optimizer, 2),
}


@pytest.mark.parametrize(
    "saving, loading", [("prepared", "none"), ("none", "prepared"), ("prepared", "prepared"), ("none", "accumulating")]
)
def test_a_wrapper_that_adds_no_state_makes_no_difference(saving: str, loading: str, tmp_path: Path) -> None:
    model, optimizer = training(adam)
    run(model, optimizer, range(4))
    speedswap.save_checkpoint(tmp_path, model, WRAPPERS[saving](optimizer))
    again, its_optimizer = training(adam)
    speedswap.load_checkpoint(tmp_path, again, WRAPPERS[loading](its_optimizer))
    for each in ((model, optimizer), (again, its_optimizer)):
        run(*each, range(4, 7))
    assert_same(state_of(again, its_optimizer), state_of(model, optimizer))


def test_a_wrappers_own_state_goes_to_such_a_wrapper_alone(tmp_path: Path) -> None:
    model, optimizer = training(adam)
    speedswap.save_checkpoint(tmp_path, model, WRAPPERS["accumulating"](optimizer))
    again, its_optimizer = training(adam)
    with pytest.raises(
        CheckpointError, match=r"optimizer is Adam, but the checkpoint .* has AccumulatingOptimizer; give"
    ):
        speedswap.load_checkpoint(tmp_path, again, its_optimizer)


def test_other_libraries_checkpoints_are_without_rows_where_they_are_apart() -> None:
    """Neither model nor optimizer gives rows away, or takes any; all of the rest is as ever."""
    model, optimizer = training(adam)
    run(model, optimizer, range(2))
    whole = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    assert whole[0].keys() - {"0.weight"} == {"1.weight", "1.bias"}
    rows = model[0].read()
    with speedswap.swapping.rows_apart():
        apart = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        run(model, optimizer, range(2, 4))
        changed = model[0].read()
        model.load_state_dict(whole[0])
        optimizer.load_state_dict(apart[1])
        assert torch.equal(model[0].read(), changed)
    assert apart[0].keys() == {"1.weight", "1.bias"}
    assert apart[1]["state"][0].keys() == {"step"}
    assert apart[1]["state"][1].keys() == whole[1]["state"][1].keys()
    assert not torch.equal(changed, rows)
    assert torch.equal(model[1].weight, whole[0]["1.weight"])
