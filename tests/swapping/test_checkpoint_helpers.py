"""The helpers of torch.distributed.checkpoint, which look into optimizers before their first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import speedswap
from speedswap.errors import LostUpdateError, OptimizerError

ROWS, DIM = 20, 4
MakeOptimizer = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.25),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> MakeOptimizer:
    return OPTIMIZERS[request.param]


def build(make_optimizer: MakeOptimizer, seed: int = 1, **settings: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    embedding = speedswap.Embedding(ROWS, DIM, seed=seed, dtype=torch.float64, name="items", **settings)
    model = nn.Sequential(embedding, nn.Linear(DIM, 1, dtype=torch.float64))
    return model, make_optimizer(model.parameters())


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.fixture
def uninterrupted(make_optimizer: MakeOptimizer) -> list[Tensor]:
    """Train six steps in one go and return the model's parameters."""
    model, optimizer = build(make_optimizer)
    train(model, optimizer, range(6))
    return weights(model)


def test_looking_at_the_state_before_the_first_step_breaks_no_later_one(make_optimizer: MakeOptimizer) -> None:
    """The table trains as if nobody had looked; torch's own parameters, which torch steps at lr 0, are left alone."""
    seen = []
    for look in (False, True):
        embedding = speedswap.Embedding(ROWS, DIM, seed=1, dtype=torch.float64)
        optimizer = make_optimizer(embedding.parameters())
        if look:
            get_optimizer_state_dict(embedding, optimizer)
            get_optimizer_state_dict(embedding, optimizer)
        train(embedding, optimizer, range(4))
        seen.append(embedding.table.read())
    assert torch.equal(*seen)


@pytest.mark.parametrize("options", [None, StateDictOptions(full_state_dict=True, cpu_offload=True)])
def test_resumed_run_equals_an_uninterrupted_one(
    options: StateDictOptions | None, make_optimizer: MakeOptimizer, uninterrupted: list[Tensor]
) -> None:
    """get_state_dict after three steps, set_state_dict into a fresh model and optimizer, three steps more."""
    model, optimizer = build(make_optimizer)
    train(model, optimizer, range(3))
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if options is not None and not optimizer_state["state"]:
        pytest.skip("torch takes the device from the state, of which this optimizer has none")
    model, optimizer = build(make_optimizer, seed=2)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    train(model, optimizer, range(3, 6))
    assert_equal(weights(model), uninterrupted)


def test_state_loaded_into_a_trained_optimizer_replaces_its_own(
    make_optimizer: MakeOptimizer, uninterrupted: list[Tensor]
) -> None:
    """Back to the checkpoint of step 3 after five steps, in the same objects."""
    model, optimizer = build(make_optimizer)
    train(model, optimizer, range(3))
    model_state = copy.deepcopy(get_model_state_dict(model))
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, range(3, 5))
    set_model_state_dict(model, model_state)
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    train(model, optimizer, range(3, 6))
    assert_equal(weights(model), uninterrupted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("storage", ["pageable", "disk"])
def test_checkpoint_is_loaded_into_the_state_of_a_fresh_optimizer(
    storage: str, make_optimizer: MakeOptimizer, uninterrupted: list[Tensor], tmp_path: Path
) -> None:
    """As torch's tutorial resumes: the fresh state_dicts say what to load, and are loaded into."""
    model, optimizer = build(make_optimizer)
    train(model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "checkpoint")
    model, optimizer = build(make_optimizer, seed=2, path=tmp_path / "table" if storage == "disk" else None)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, range(3, 6))
    assert_equal(weights(model), uninterrupted)
    model[0].table.close()


def test_state_before_the_first_step_is_that_of_the_whole_table() -> None:
    """Names, shapes and values as for an nn.Embedding; only the count of torch's trial step is not in it."""
    model, optimizer = build(OPTIMIZERS["adam"])
    found = get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]
    twin = nn.Sequential(nn.Embedding(ROWS, DIM, dtype=torch.float64))
    expected = get_optimizer_state_dict(twin, torch.optim.Adam(twin.parameters()))["state"]["0.weight"]
    assert found.keys() == expected.keys()
    assert found["step"] == 0
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[name], expected[name])


def test_flattened_state_is_refused_rather_than_dropped() -> None:
    """Flattened, torch asks the optimizer for names that only the table has, and would leave the state out."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = build(OPTIMIZERS["adam"])
    train(model, optimizer, range(3))
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    model, optimizer = build(OPTIMIZERS["adam"])
    with pytest.raises(ValueError, match=r"lacks exp_avg, exp_avg_sq of table 'items'.*flatten_optimizer_state_dict"):
        set_optimizer_state_dict(model, optimizer, flat, options=options)


def test_unfit_optimizer_is_refused_by_the_helpers_too() -> None:
    """An optimizer that mixes rows is refused although torch's trial step has a learning rate of 0."""
    embedding = speedswap.Embedding(ROWS, DIM)
    with pytest.raises(OptimizerError, match="Muon mixes rows"):
        get_optimizer_state_dict(embedding, torch.optim.Muon(embedding.parameters()))
    assert list(embedding.table.columns) == ["weight"]


def test_loading_a_state_dict_without_a_tables_state_starts_it_over() -> None:
    """The state of a fresh optimizer, loaded into a trained one: step count and moments start over together."""
    embedding = speedswap.Embedding(ROWS, DIM, seed=1, dtype=torch.float64)
    optimizer = torch.optim.Adam(embedding.parameters())
    fresh = copy.deepcopy(optimizer.state_dict())
    start = embedding.table.read()
    train(embedding, optimizer, range(4))
    once = embedding.table.read()
    embedding.load_state_dict({"weight": start})
    optimizer.load_state_dict(fresh)
    train(embedding, optimizer, range(4))
    assert torch.equal(embedding.table.read(), once)


def test_gradient_that_came_from_no_lookup_is_an_error() -> None:
    """Only gradients of zeros, which torch makes to see an optimizer's state, leave the step in silence."""
    embedding = speedswap.Embedding(ROWS, DIM, name="items")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    before = embedding.table.read()
    embedding.weight.grad = torch.ones(1, DIM)
    with pytest.raises(LostUpdateError, match="'items' came from no lookup"):
        optimizer.step()
    assert torch.equal(embedding.table.read(), before)
    train(embedding, optimizer, range(1))
