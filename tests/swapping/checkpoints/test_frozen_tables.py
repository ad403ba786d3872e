"""Tables that are frozen for some steps, in checkpoints: missing state is initial state, as in torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap

ROWS, DIM = 6, 3
Make = Callable[[Any], Optimizer]


class MakesState(Optimizer):
    """Makes its state in its constructor, and at no other time."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for weight in group["params"]:
                state = {"sum": torch.full_like(weight, 0.5), "momentum": torch.zeros_like(weight), "step": 0}
                self.state[weight] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["step"] += 1
                    state["sum"].addcmul_(weight.grad, weight.grad)
                    state["momentum"].mul_(0.9).add_(weight.grad)
                    weight.addcdiv_(state["momentum"], state["sum"].sqrt(), value=-group["lr"] / state["step"])


OPTIMIZERS: dict[str, Make] = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.25),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "state made with it": MakesState,
}


class Model(nn.Module):
    """Two tables, the second of which is frozen for some steps, and a layer."""

    def __init__(self, kind: str, folder: Path | None = None) -> None:
        super().__init__()
        names, settings = ("a", "b"), {"dtype": torch.float64}
        path: dict[str, Any] = {} if folder is None else {"path": folder}
        self.tables: Any
        if kind == "collection":
            configs = [
                speedswap.EmbeddingConfig(name=each, num_embeddings=ROWS, embedding_dim=DIM, group=each, **settings)
                for each in names
            ]
            self.tables = speedswap.EmbeddingCollection(configs, **path)
        elif kind == "torch":
            self.tables = nn.ModuleDict({each: nn.Embedding(ROWS, DIM, **settings) for each in names})
        else:
            paths = [{} if folder is None else {"path": folder / each} for each in names]
            ours = [speedswap.Embedding(ROWS, DIM, **settings, **where) for where in paths]
            self.tables = nn.ModuleDict(dict(zip(names, ours, strict=True)))
        self.layer = nn.Linear(DIM, 1, dtype=torch.float64)
        with torch.no_grad():
            for weight in self.weights:
                weight.data.copy_(torch.linspace(-1, 1, ROWS * DIM, dtype=torch.float64).view(ROWS, DIM))
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(0.1)

    @property
    def weights(self) -> list[nn.Parameter]:
        if isinstance(self.tables, speedswap.EmbeddingCollection):
            return [*self.tables.parameters_of("a"), *self.tables.parameters_of("b")]
        return [self.tables["a"].weight, self.tables["b"].weight]

    @property
    def rows(self) -> list[Tensor]:
        if isinstance(self.tables, speedswap.EmbeddingCollection):
            return [each.read() for each in self.tables.tables.values()]
        return [each.read() if hasattr(each, "read") else each.weight.detach() for each in self.tables.values()]

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.tables, speedswap.EmbeddingCollection):
            found = self.tables({"a": ids.unsqueeze(1), "b": ids.unsqueeze(1)})
            one, other = found["a"].values(), found["b"].values()
        else:
            one, other = self.tables["a"](ids), self.tables["b"](ids)
        out: Tensor = self.layer(2 * one + other)
        return out


def run(model: Model, optimizer: Optimizer, steps: range, *, is_frozen: bool) -> None:
    """Take steps with every row in each, so that torch moves no others."""
    model.weights[1].requires_grad_(not is_frozen)
    for step in steps:
        optimizer.zero_grad()
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
        (model(ids).sin() * torch.arange(1, ROWS + 1).unsqueeze(1)).sum().backward()
        optimizer.step()


@pytest.mark.sweep(31)
@pytest.mark.parametrize(
    ("kind", "place"),
    [("embeddings", "memory"), ("embeddings", "disk"), ("embeddings", "itself"), ("collection", "itself")],
)
@pytest.mark.parametrize("is_trained", [False, True], ids=["never trained", "trained before"])
@pytest.mark.parametrize("frozen", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_table_frozen_at_times_goes_on_as_in_torch(
    make: Make, frozen: tuple[bool, bool], is_trained: bool, kind: str, place: str, tmp_path: Path
) -> None:
    """Frozen when it is saved, when it is loaded or both; into a new model or back into the one that has moved on."""
    at_save, at_load = frozen
    ours, theirs = Model(kind, tmp_path / "rows" if place == "itself" else None), Model("torch")
    own, torchs = make(ours.parameters()), make(theirs.parameters())
    for model, optimizer in ((ours, own), (theirs, torchs)):
        run(model, optimizer, range(2), is_frozen=not is_trained)
        run(model, optimizer, range(2, 4), is_frozen=at_save)
    speedswap.save_checkpoint(tmp_path / "run", ours, own)
    saved = copy.deepcopy((theirs.state_dict(), torchs.state_dict()))
    if place == "itself":
        for model, optimizer in ((ours, own), (theirs, torchs)):
            run(model, optimizer, range(4, 6), is_frozen=False)
    else:
        ours, theirs = Model(kind, tmp_path / "rows" if place == "disk" else None), Model("torch")
        own, torchs = make(ours.parameters()), make(theirs.parameters())
    for model in (ours, theirs):
        model.weights[1].requires_grad_(not at_load)
        model.zero_grad()
    speedswap.load_checkpoint(tmp_path / "run", ours, own)
    theirs.load_state_dict(saved[0])
    torchs.load_state_dict(saved[1])
    for model, optimizer in ((ours, own), (theirs, torchs)):
        run(model, optimizer, range(6, 8), is_frozen=at_load)
        run(model, optimizer, range(8, 10), is_frozen=False)
    torch.testing.assert_close(ours.rows, theirs.rows)
    torch.testing.assert_close(ours.layer.state_dict(), theirs.layer.state_dict())
    for each in ours.modules():
        if isinstance(each, speedswap.Embedding):
            each.table.close()
        elif isinstance(each, speedswap.EmbeddingCollection):
            each.close()


def test_a_frozen_table_takes_no_room_for_state_that_was_never_used(tmp_path: Path) -> None:
    """Adagrad's constructor makes state for it, of one value in the table's shape."""
    model = Model("embeddings")
    model.weights[1].requires_grad_(False)
    optimizer = torch.optim.Adagrad(model.parameters())
    run(model, optimizer, range(2), is_frozen=True)
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    assert list(model.tables["b"].table.columns) == ["weight"]
    again = Model("embeddings")
    its_optimizer = torch.optim.Adagrad(again.parameters())
    again.weights[1].requires_grad_(False)
    speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    assert list(again.tables["b"].table.columns) == ["weight"]


def test_state_that_a_frozen_table_was_loaded_with_is_saved(tmp_path: Path) -> None:
    """It is the optimizer's until a step or a checkpoint brings it to the table."""
    model = Model("torch")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(model, optimizer, range(2), is_frozen=False)
    ours = Model("embeddings")
    own = torch.optim.Adam(ours.parameters(), lr=0.1)
    ours.weights[1].requires_grad_(False)
    ours.load_state_dict(model.state_dict())
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    speedswap.save_checkpoint(tmp_path, ours, own)
    again = Model("embeddings")
    its_optimizer = torch.optim.Adam(again.parameters(), lr=0.1)
    speedswap.load_checkpoint(tmp_path, again, its_optimizer)
    run(again, its_optimizer, range(2, 4), is_frozen=False)
    run(model, optimizer, range(2, 4), is_frozen=False)
    torch.testing.assert_close(again.rows, model.rows)
