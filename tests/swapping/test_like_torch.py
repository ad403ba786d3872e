"""Programs that load, copy or freeze between backward passes and steps train as with torch's embeddings.

Every batch looks up all rows, for which lazy training is the dense one.
"""

from __future__ import annotations

import copy
import io
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap

ROWS, DIM = 6, 4
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.3),
}


class Net(nn.Module):
    """An embedding, a bag and a dense layer, of torch or of speedswap."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.items = package.Embedding(ROWS, DIM, dtype=torch.float64)
        self.words = package.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64)
        self.head = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        result: Tensor = self.head(self.items(ids).tanh().mean(1) + self.words(bags))
        return result


class Training:
    """A model with its optimizer, which can be saved, copied and recreated."""

    def __init__(self, package: Any, make: Callable[[Any], Optimizer]) -> None:
        self._package, self._make = package, make
        self.saved: list[Any] = []
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Make a model with values that depend on a seed, and its optimizer."""
        self.model = Net(self._package)
        values = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=values, dtype=torch.float64))
        self.renew()

    def renew(self) -> None:
        """Make an optimizer of three groups, in an unusual order."""
        model = self.model
        groups = [{"params": [model.words.weight], "weight_decay": 0.1}, {"params": model.head.parameters()}]
        self.optimizer = self._make([*groups, {"params": [model.items.weight]}])

    def backward(self, seed: int, times: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        more = torch.randint(ROWS, (2, 3), generator=generator)
        ids = torch.cat([torch.arange(ROWS).repeat(2, 1), more], 1)
        loss = (self.model(ids, ids.flip(0)) - torch.randn(2, 1, generator=generator)).square().mean()
        for _ in range(times):
            loss.backward(retain_graph=True)

    def step(self) -> None:
        self.optimizer.step()

    def train(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.backward(seed)
        self.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def warm_down(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def turn(self, name: str) -> None:
        """Freeze an embedding, or train it again."""
        weight = self.model.get_submodule(name).weight
        weight.requires_grad_(not weight.requires_grad)

    def save(self) -> None:
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        self.saved = torch.load(file, weights_only=True)

    def load(self, *, optimizer_first: bool = False) -> None:
        if self.saved:
            model, optimizer = copy.deepcopy(self.saved)  # torch's optimizers train the given tensors in place
            if optimizer_first:
                self.optimizer.load_state_dict(optimizer)
            self.model.load_state_dict(model)
            if not optimizer_first:
                self.optimizer.load_state_dict(optimizer)

    def start_again(self, seed: int) -> None:
        if self.saved:
            frozen = [name for name in ("items", "words") if not self.model.get_submodule(name).weight.requires_grad]
            self.begin(seed)
            for name in frozen:
                self.turn(name)
            self.load(optimizer_first=bool(seed % 2))

    def copy(self) -> None:
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self.optimizer.zero_grad()

    def copy_model(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.renew()

    def forget(self) -> None:
        self.optimizer.state = defaultdict(dict)

    def outcome(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self.model.state_dict()), self.optimizer.state_dict()


def assert_alike(ours: Training, theirs: Training, after: object = "") -> None:
    torch.testing.assert_close(ours.outcome(), theirs.outcome(), msg=lambda text: f"{text} after {after}")


def both(optimizer: str) -> tuple[Training, Training]:
    return Training(speedswap, OPTIMIZERS[optimizer]), Training(nn, OPTIMIZERS[optimizer])


_any_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@_any_optimizer
def test_a_weight_frozen_after_its_backward_pass_is_stepped(optimizer: str) -> None:
    trainings = both(optimizer)
    for each in trainings:
        each.train(1)
        each.backward(2)
        each.turn("items")
        each.step()
        each.optimizer.zero_grad()
        each.train(3)
    assert_alike(*trainings)


def test_a_weight_frozen_before_its_backward_pass_gets_no_gradient() -> None:
    trainings = both("adam")
    for each in trainings:
        each.optimizer.zero_grad()
        ids = torch.arange(ROWS).repeat(2, 1)
        loss = each.model(ids, ids).square().sum()
        each.turn("items")
        loss.backward()
        assert each.model.items.weight.grad is None
        each.step()
        each.turn("items")
        each.train(3)
    assert_alike(*trainings)


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_penalty_on_gradients_reaches_rows_and_other_layers(lookups: int) -> None:
    outcomes = []
    for package in (speedswap, nn):
        items = package.Embedding(ROWS, 4, padding_idx=1)
        head = nn.Linear(4, 1)
        with torch.no_grad():
            items.weight.copy_(torch.linspace(-1, 1, ROWS * 4).view(ROWS, 4))
            nn.init.constant_(head.weight, 0.5)
            nn.init.zeros_(head.bias)
        optimizer = torch.optim.SGD([*items.parameters(), *head.parameters()], lr=0.1)
        for seed in (1, 2):
            optimizer.zero_grad()
            ids = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(seed))
            sum(head(items(some)).sin().sum() for some in ids.chunk(lookups)).backward(create_graph=True)
            sum(parameter.grad.square().sum() for parameter in (items.weight, *head.parameters())).backward()
            optimizer.step()
        outcomes.append([items.state_dict()["weight"], head.weight])
    torch.testing.assert_close(*outcomes)


@_any_optimizer
def test_a_gradient_outlives_a_load_of_the_rows(optimizer: str) -> None:
    trainings = both(optimizer)
    for each in trainings:
        each.save()
        each.train(1)
        each.backward(2)
        each.model.load_state_dict(copy.deepcopy(each.saved[0]))
        each.step()
    assert_alike(*trainings)


@_any_optimizer
def test_state_that_is_the_same_in_every_row_is_loaded_before_the_first_step(optimizer: str) -> None:
    """As that of a table of one row is. The optimizer does not start its rows with it."""
    trainings = [speedswap.Embedding(1, DIM, seed=1), nn.Embedding(1, DIM)]
    trainings[1].weight.data.copy_(trainings[0].read())
    results = []
    for items in trainings:
        optimizers = [OPTIMIZERS[optimizer](items.parameters()) for _ in range(2)]
        for step, each in enumerate(optimizers):
            if step:
                each.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            each.zero_grad()
            (items(torch.tensor([0, 0])) * torch.arange(DIM)).sin().sum().backward()
            each.step()
        results.append((dict(items.state_dict()), optimizers[1].state_dict()))
    torch.testing.assert_close(*results)


@_any_optimizer
def test_a_copied_model_begins_anew_with_a_new_optimizer(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    trainings = both(optimizer)
    with caplog.at_level(logging.WARNING):
        for each in trainings:
            each.train(1)
            each.copy_model()
            each.train(2)
            each.copy()
            each.train(3)
    assert_alike(*trainings)
    assert not caplog.records


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("saves", [False, True])
def test_state_that_was_cleared_starts_over(optimizer: str, saves: bool) -> None:
    trainings = both(optimizer)
    for each in trainings:
        each.train(1)
        each.forget()
        if saves:
            each.save()
            assert not each.saved[1]["state"]
        each.train(2)
        each.train(3)
    assert_alike(*trainings)


def makes_state_in_a_step(make: Callable[[Any], Optimizer]) -> bool:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = make([weight])
    optimizer.state.clear()
    weight.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def test_rows_start_over_with_what_the_optimizer_makes_not_with_what_was_loaded() -> None:
    if not makes_state_in_a_step(OPTIMIZERS["adagrad"]):
        pytest.skip("torch's Adagrad, before 2.13, makes its state when it is constructed, and cannot start over")
    results = []
    rows = torch.randn(ROWS, DIM)
    for package in (speedswap, nn):
        items = package.Embedding.from_pretrained(rows.clone(), freeze=False)
        first, second = (OPTIMIZERS["adagrad"](items.parameters()) for _ in range(2))
        empty = copy.deepcopy(first.state_dict()) | {"state": {}}
        for optimizer, ids in ((first, [0, 1]), (second, [1, 2]), (second, [3, 3])):
            if ids == [1, 2]:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            if ids == [3, 3]:
                second.load_state_dict(empty)
            optimizer.zero_grad()
            items(torch.tensor(ids)).cos().sum().backward()
            optimizer.step()
        results.append((dict(items.state_dict()), second.state_dict()))
    torch.testing.assert_close(*results)


_SETTINGS: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "more": (torch.optim.Adam, {"amsgrad": True}, {"lr": 0.5}),
    "fewer": (torch.optim.Adam, {}, {"amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}),
    "plain": (torch.optim.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}),
    "both": (torch.optim.RMSprop, {"centered": True}, {"momentum": 0.5}),
}


@pytest.mark.parametrize("begun", ["not", "attached", "stepped"])
@pytest.mark.parametrize(("kind", "saved", "present"), _SETTINGS.values(), ids=_SETTINGS)
def test_a_state_dict_brings_the_columns_of_its_settings(kind: Any, saved: Any, present: Any, begun: str) -> None:
    """A batch has some of the rows, so that state of all of them fits no step."""

    def train(module: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.zero_grad()
        module(torch.tensor([step, step + 1, 0])).cos().sum().backward()
        optimizer.step()

    modules = [speedswap.Embedding(ROWS, DIM, seed=1) for _ in range(2)]
    first, second = kind(modules[0].parameters(), **saved), kind(modules[1].parameters(), **present)
    for step in range(2):
        train(modules[0], first, step)
    if begun == "attached":
        speedswap.attach(second, modules[1])
    elif begun == "stepped":
        train(modules[1], second, 4)
    modules[1].load_state_dict(modules[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(2, 4):
        for each in zip(modules, (first, second), strict=True):
            train(*each, step)
    assert torch.equal(modules[0].read(), modules[1].read())
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_a_state_dict_of_other_groups_changes_nothing() -> None:
    items, head = speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
    optimizer = torch.optim.Adam([*items.parameters(), *head.parameters()])
    other = torch.optim.Adam(items.parameters())
    for each in (other, optimizer):
        items(torch.tensor([1, 2])).sum().backward()
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    theirs = copy.deepcopy(before)
    theirs["param_groups"][0]["params"].pop()
    theirs["state"][0]["exp_avg"] += 1
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(theirs)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.sweep(9)
@_any_optimizer
@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_a_training_is_torchs(optimizer: str, seed: int) -> None:
    trainings = both(optimizer)
    draw = random.Random(seed)
    taken = []
    for _ in range(30):
        name, arguments = draw.choice(
            [
                ("backward", (draw.randrange(999), draw.choice([1, 1, 1, 2]))),
                ("step", ()),
                *[("train", (draw.randrange(999),))] * 3,
                ("clip", ()),
                ("warm_down", ()),
                *[("turn", (draw.choice(["items", "words"]),))] * 2,
                ("save", ()),
                ("load", ()),
                ("start_again", (draw.randrange(9),)),
                ("renew", ()),
                ("copy", ()),
                ("copy_model", ()),
            ]
        )
        taken.append((name, *arguments))
        for each in trainings:
            getattr(each, name)(*arguments)
        assert_alike(*trainings, after=taken)
