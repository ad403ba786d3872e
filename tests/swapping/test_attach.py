"""Optimizers that are attached or refused, and updates that would be lost."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import multiprocessing
import pickle
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap.errors import IdError, LostUpdateError, OptimizerError, TableTooLargeError, WeightError
from speedswap.swapping.optimizers import clone_of, probe, this_thread

ROWS, DIM = 20, 4


@pytest.fixture
def items() -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, dtype=torch.float64, name="items")


def train(module: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        ids = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(ids).square().sum().backward()
        optimizer.step()


# ---------------------------------------------------------------------------- refusals


class ToyLamb(Optimizer):
    """Scales each update by the norm of the whole parameter, as LAMB does (You et al. 2020)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(group["lr"] * ratio * parameter.grad)


class MeanOfBatch(ToyLamb):
    """Divides by the number of rows: no row's gradient matters to another, but how many there are does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / len(parameter))


class TransposedState(ToyLamb):
    """Keeps state that has no rows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("seen", []).append(1)
                    parameter.sub_(parameter.grad)


class StartsFromWeight(ToyLamb):
    """Starts each row's state with a function of the row's weight."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter]["twice"] = 2 * parameter.detach()
                    parameter.sub_(parameter.grad * self.state[parameter]["twice"])


class ScheduleFree(torch.optim.SGD):
    """Evaluates an average of the weights that it trains, and swaps the two in ``eval`` and ``train``."""

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                average = self.state[weight].setdefault("average", weight.detach().clone())
                self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
                super().step()
                if self.state[weight]["step"] > 6:  # after a warm-up
                    average.lerp_(weight.detach(), 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        for weight, state in self.state.items():
            if state.get("step", 0) > 6:
                weight.copy_(state["average"])

    def train(self) -> None: ...


class EstimatesRate(ToyLamb):
    """Estimates the learning rate of later steps from all gradients, as D-Adaptation does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["seen"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is not None:
                group["seen"] = group["seen"] + 1e-3 * parameter.grad.abs().sum()
                parameter.sub_(parameter.grad, alpha=0.1 if group["seen"] < 1 else 0.2)


class ClipsNorm(Optimizer):
    """Bounds the norm of the whole gradient; small ones are below it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"bound": 100.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                norm = parameter.grad.norm()
                parameter.sub_(parameter.grad * (self.param_groups[0]["bound"] / norm).clamp(max=1), alpha=0.1)


class Counts(Optimizer):
    """Takes smaller steps as it counts them under a key."""

    def __init__(self, params: Any, key: Any = "steps", start: Any = 0) -> None:
        super().__init__(params, {})
        self.key, self.start = key, start

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state[self.key] = state.get(self.key, self.start) + 1
                parameter.sub_(parameter.grad, alpha=0.1 / abs(complex(state[self.key])))


class Extrapolates(Optimizer):
    """Takes the gradient at a point ahead."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        with torch.enable_grad():
            closure()
        (weight,) = self.param_groups[0]["params"]
        before = weight.clone()
        weight.sub_(weight.grad)
        with torch.enable_grad():
            closure()
        weight.copy_(before).sub_(weight.grad)


class Wraps(Optimizer):
    """Has the state of the optimizer that it wraps, as a property."""

    def __init__(self, params: Any) -> None:
        self.within = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.within.param_groups, {})

    @property
    def state(self) -> Any:
        return self.within.state

    @state.setter
    def state(self, state: Any) -> None: ...

    def step(self, closure: Any = None) -> None:
        self.within.step()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ScheduleFree, r"moves parameters in eval\(\) and train\(\), between steps, but a table's rows would not move"),
        (EstimatesRate, "mixes rows: one row's update changes"),
        (ClipsNorm, "mixes rows: one row's update changes"),
        (Wraps, "cannot be examined: .*'within'.*use another optimizer"),
        (torch.optim.Muon if hasattr(torch.optim, "Muon") else ToyLamb, "mixes rows"),
        (torch.optim.Adafactor, "mixes rows"),
        (torch.optim.LBFGS, "mixes rows"),
        (ToyLamb, "mixes rows: one row's update changes"),
        (MeanOfBatch, "mixes rows: a row's update depends on how many other rows"),
        (TransposedState, "keeps 'seen', of type list, without a row for each"),
        (StartsFromWeight, "starts its state 'twice' with values that differ between rows"),
        (torch.optim.SparseAdam, "only sparse gradients.*use torch.optim.Adam"),
    ],
)
def test_unfit_optimizers_are_refused_with_the_reason(
    cls: type[Optimizer], reason: str, items: speedswap.Embedding
) -> None:
    before = items.table.read()
    optimizer = cls(items.parameters())
    with pytest.raises(OptimizerError, match=f"^{cls.__name__} .*{reason}"):
        speedswap.attach(optimizer, items)
    assert list(items.table.columns) == ["weight"]
    items(torch.tensor([1])).sum().backward()
    if cls is not torch.optim.LBFGS:
        with pytest.raises(OptimizerError, match=cls.__name__):
            optimizer.step()  # and as it would attach itself
    assert torch.equal(items.table.read(), before)


@pytest.mark.parametrize("key", ["weight", "average", "average_2_updates", "last_step", 3, None, ("step", 0)])
def test_state_under_a_name_that_no_column_can_have_is_refused(key: Any, items: speedswap.Embedding) -> None:
    with pytest.raises(OptimizerError, match=re.escape(f"Counts keeps state under {key!r}, but a table")):
        speedswap.attach(Counts(items.parameters(), key), items)


def test_a_complex_scalar_is_refused(items: speedswap.Embedding) -> None:
    with pytest.raises(OptimizerError, match="keeps 'steps', of type Tensor, without a row for each"):
        speedswap.attach(Counts(items.parameters(), start=torch.tensor(1j)), items)


def test_a_count_alone_goes_on_with_a_table_opened_again(tmp_path: Path) -> None:
    ids, rows = torch.arange(4), []
    for pause in (False, True):
        table = speedswap.Table.create(ROWS, DIM, path=tmp_path / str(pause), seed=1)
        for _ in range(3):
            items = speedswap.Embedding(ROWS, DIM, table=table)
            optimizer = Counts(items.parameters())
            for _ in range(1 if pause else 3):
                optimizer.zero_grad()
                items(ids).sin().sum().backward()
                optimizer.step()
            if not pause:
                break
            table.close()
            table = speedswap.Table.open(tmp_path / str(pause))
        rows.append(table.read())
    assert torch.equal(*rows)


def test_a_closure_that_is_called_again_at_moved_rows_is_refused(items: speedswap.Embedding) -> None:
    before, optimizer = items.table.read(), Extrapolates(items.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = items(torch.arange(4)).sin().sum()
        loss.backward()
        return loss

    with pytest.raises(OptimizerError, match="Extrapolates evaluates its closure again after it has moved the rows"):
        optimizer.step(closure)
    assert torch.equal(items.table.read(), before)


def test_unfit_optimizer_is_refused_when_a_warm_up_begins_at_zero(items: speedswap.Embedding) -> None:
    """With a learning rate of 0 no weight moves, so mixing rows would not show; it is found all the same."""
    optimizer = ToyLamb(items.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(OptimizerError, match="ToyLamb mixes rows"):
        speedswap.attach(optimizer, items)
    assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("stored_dtype", [None, torch.int8])
def test_frozen_table_in_an_optimizer_is_left_alone(stored_dtype: torch.dtype | None) -> None:
    """The rest of the model trains, and the table gets no state."""
    frozen = speedswap.Embedding.from_pretrained(torch.randn(ROWS, DIM), stored_dtype=stored_dtype)
    model = nn.Sequential(frozen, nn.Linear(DIM, 1))
    before = model[1].weight.detach().clone()
    train(model, torch.optim.Adam(model.parameters()))
    assert not torch.equal(model[1].weight, before)
    assert list(frozen.table.columns) == ["weight"]


def test_probing_changes_neither_the_optimizer_nor_its_other_parameters() -> None:
    model = nn.Sequential(speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    linear = model[1]
    before = [parameter.detach().clone() for parameter in linear.parameters()]
    grads = [parameter.grad.clone() for parameter in linear.parameters()]
    random = torch.get_rng_state()
    speedswap.attach(optimizer, model)
    assert torch.equal(torch.get_rng_state(), random)
    assert optimizer.state == {}
    for parameter, value, grad in zip(linear.parameters(), before, grads, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)


def test_probe_finds_columns_initial_values_and_scalars(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.Rprop(items.parameters(), lr=0.25)
    found = probe(optimizer, items.weight, DIM, torch.float64)
    values = {column.name: column.init.to_json()["value"] for column in found.columns}
    assert values == {"prev": 0.0, "step_size": 0.25}
    assert found.scalars == {"step": torch.tensor(0.0)}


@pytest.mark.parametrize("rows", [1, 2])
def test_probe_keeps_the_values_that_state_is_made_with(rows: int) -> None:
    weight = nn.Parameter(torch.zeros(rows, DIM))
    optimizer = torch.optim.Adagrad([weight], initial_accumulator_value=0.25)
    (column,) = probe(optimizer, weight, DIM, torch.float32).columns
    assert column.init == speedswap.init.constant(0.25)


def test_a_copy_of_an_optimizer_has_its_state_where_the_rows_are() -> None:
    """A constructor makes state on the module's device, but rows are trained on that of the batch.

    A count of steps without dimensions stays on the CPU, as torch wants it.
    """
    weight, rows = nn.Parameter(torch.zeros(2, DIM)), nn.Parameter(torch.zeros(7, DIM, device="meta"))
    copied = clone_of(torch.optim.Adagrad([weight], initial_accumulator_value=0.25), weight, rows)
    state = copied.state[rows]
    assert {name: (value.device.type, tuple(value.shape)) for name, value in state.items()} == {
        "step": ("cpu", ()),
        "sum": ("meta", (7, DIM)),
    }


def test_a_scheduler_that_wraps_step_does_not_step_the_real_optimizer_while_probing() -> None:
    items = speedswap.Embedding(ROWS, DIM, dtype=torch.float64)
    optimizer = torch.optim.Adam(items.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = items.table.read()
    items(torch.tensor([1])).sum().backward()
    speedswap.attach(optimizer, items)
    assert torch.equal(items.table.read(), before)
    assert items.weight.grad is not None


def test_row_wise_state_is_a_column_of_one_item(items: speedswap.Embedding) -> None:
    class RowwiseAdagrad(ToyLamb):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if not state:
                            state["sum"] = torch.full_like(parameter[:, :1], 0.1)
                        state["sum"] += parameter.grad.square().mean(dim=1, keepdim=True)
                        parameter.sub_(group["lr"] * parameter.grad / state["sum"].sqrt())

    optimizer = RowwiseAdagrad(items.parameters())
    train(items, optimizer)
    assert items.table.columns["sum"].row_shape == (1,)
    seen = torch.cat([torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(s)) for s in range(3)])
    untouched = [row for row in range(ROWS) if row not in seen]
    assert torch.equal(
        items.table.read(column="sum")[untouched], torch.full((len(untouched), 1), 0.1, dtype=torch.float64)
    )


def test_state_that_starts_as_the_weight_is_copied_from_it(items: speedswap.Embedding) -> None:
    class Anchored(ToyLamb):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if not state:
                            state["anchor"] = parameter.detach().clone()
                        parameter.sub_(0.1 * parameter.grad + 0.1 * (parameter - state["anchor"]))

    start = items.table.read()
    train(items, Anchored(items.parameters()))
    assert torch.equal(items.table.read(column="anchor"), start)
    assert not torch.equal(items.table.read(), start)


# ---------------------------------------------------------------------------- attaching


def test_attach_takes_a_model_or_a_table_and_refuses_others(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.Adam(items.parameters())
    speedswap.attach(optimizer, items.table)
    assert "exp_avg" in items.table.columns
    with pytest.raises(ValueError, match=r"has no speedswap\.Embedding"):
        speedswap.attach(optimizer, nn.Linear(2, 2))
    other = speedswap.Embedding(3, 2, name="other")
    with pytest.raises(ValueError, match=r"'other' is not in optimizer Adam; pass model\.parameters"):
        speedswap.attach(optimizer, other)


def test_a_new_optimizer_starts_with_fresh_state(items: speedswap.Embedding) -> None:
    train(items, torch.optim.Adam(items.parameters()))
    assert items.table.read(column="exp_avg").any()
    second = torch.optim.Adam(items.parameters())
    speedswap.attach(second, items)
    assert not items.table.read(column="exp_avg").any()
    train(items, second, steps=1)
    assert second.state[items.weight]["step"] == 1


def test_weight_decay_reaches_the_batchs_rows_alone_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without decay SGD and Adagrad give the dense result; with it, rows outside the batch keep their values."""

    def trained(embedding: nn.Module, make: Any, decay: float) -> Tensor:
        embedding.weight.data.fill_(1.0)
        optimizer = make(embedding.parameters(), lr=0.1, weight_decay=decay)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([1])).square().sum().backward()
            optimizer.step()
        return embedding.weight.detach() if type(embedding) is nn.Embedding else embedding.read()

    idle = torch.arange(4) != 1
    for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW):
        ours, theirs = (trained(kind(4, 2), make, 0.0) for kind in (speedswap.Embedding, nn.Embedding))
        torch.testing.assert_close(ours, theirs)  # without a warning, which would be an error here
    monkeypatch.setattr("speedswap._words._said", set())
    for make in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.warns(speedswap.errors.SpeedswapWarning, match=rf"^SW401: .*{make.__name__}.* 0\.5") as said:
            ours = [trained(speedswap.Embedding(4, 2), make, 0.5) for _ in range(2)]
        assert [warning.filename for warning in said] == [__file__]
        theirs = trained(nn.Embedding(4, 2), make, 0.5)
        torch.testing.assert_close(ours[1][1], theirs[1])
        assert bool((ours[1][idle] == 1).all())
        torch.testing.assert_close(theirs[idle], torch.full((3, 2), 0.95**3))
    plain, decayed = nn.Linear(1, 1), speedswap.Embedding(4, 2)
    groups = [{"params": plain.parameters(), "weight_decay": 0.5}, {"params": decayed.parameters()}]
    trained_apart = torch.optim.SGD(groups, lr=0.1)  # of another group: no warning
    decayed(torch.tensor([1])).sum().backward()
    trained_apart.step()


def test_two_optimizers_cannot_take_turns(items: speedswap.Embedding) -> None:
    first, second = torch.optim.Adam(items.parameters()), torch.optim.SGD(items.parameters(), lr=0.1)
    train(items, first)
    train(items, second)  # it takes over
    items(torch.tensor([1])).sum().backward()
    before = items.table.read()
    with pytest.raises(OptimizerError, match=r"this Adam was replaced as the optimizer of table 'items'"):
        first.step()
    assert torch.equal(items.table.read(), before)


def test_loading_weights_keeps_the_optimizers_step_count(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.Adam(items.parameters())
    train(items, optimizer, steps=3)
    items.load_state_dict(items.state_dict())
    assert optimizer.state[items.weight]["step"] == 3
    train(items, optimizer, steps=1)
    assert optimizer.state[items.weight]["step"] == 4


def test_two_embeddings_cannot_train_one_table(items: speedswap.Embedding) -> None:
    twin = speedswap.Embedding(ROWS, DIM, table=items.table)
    ids = torch.tensor([2, 3])
    assert torch.equal(twin(ids), items(ids))
    optimizer = torch.optim.SGD([items.weight, twin.weight], lr=0.1)
    with pytest.raises(OptimizerError, match="'items' is already trained through another embedding"):
        speedswap.attach(optimizer, nn.ModuleList([items, twin]))


# ---------------------------------------------------------------------------- lost updates


def test_a_weight_in_no_optimizer_is_an_error_at_the_next_forward(items: speedswap.Embedding) -> None:
    head = nn.Linear(DIM, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    ids = torch.tensor([1, 2])
    head(items(ids)).sum().backward()
    optimizer.step()
    with pytest.raises(LostUpdateError, match=r"'items' is in no optimizer.*pass model\.parameters"):
        items(ids)
    with torch.no_grad():
        items(ids)  # a lookup, without training
    optimizer.add_param_group({"params": items.parameters()})
    head(items(ids)).sum().backward()
    optimizer.step()


class Adds(torch.optim.SGD):
    """Takes its parameters one by one, in a separate method."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        first, *others = params
        super().__init__([first], lr=lr)
        for each in others:
            self.add_param_group({"params": [each]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, Adds])
@pytest.mark.parametrize("wait", [1, 2, 7], ids="waits-{}".format)
@pytest.mark.parametrize("zero", ["own", "all", "none"])
def test_optimizers_that_take_turns_raise_no_alarm(make: Any, wait: int, zero: str, items: speedswap.Embedding) -> None:
    """As in adversarial training: one optimizer steps several times before the embedding's own takes its first step."""
    twin = nn.Embedding.from_pretrained(items.table.read(), freeze=False)
    found = []
    for module in (items, twin):
        torch.manual_seed(0)
        head = nn.Linear(DIM, 1, dtype=torch.float64)
        extra = nn.Parameter(torch.ones(1))
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.1), make([extra, *module.parameters()], lr=0.1)]
        for step in range(2 * wait + 2):
            turn = 1 if step % (wait + 1) == wait else 0
            if zero == "own":
                optimizers[turn].zero_grad()
            elif zero == "all":
                head.zero_grad()
                module.zero_grad()
            head(module(torch.tensor([step % 3, 4]))).square().sum().backward()
            optimizers[turn].step()
        found.append(module.weight.detach() if module is twin else module.table.read())
    if make is not torch.optim.Adam:  # whose rows outside of the batch drift in torch
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_optimizer_of_another_kind_of_loop_is_known_once_it_is_attached(items: speedswap.Embedding) -> None:
    """It takes the weight past ``add_param_group``, so that nothing tells before its first step."""
    head = nn.Linear(DIM, 1, dtype=torch.float64)
    first, second = torch.optim.SGD(head.parameters(), lr=0.1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    second.param_groups[0]["params"].append(items.weight)
    speedswap.attach(second, items)
    before = items.table.read()
    for _ in range(3):
        head(items(torch.tensor([1, 2]))).sum().backward()
        first.step()
    second.step()
    assert (items.table.read() != before).any(dim=1).nonzero().flatten().tolist() == [1, 2]


def under_a_default_device(items: speedswap.Embedding) -> tuple[speedswap.Embedding, Optimizer]:
    with torch.device("cpu"):  # as torch.set_default_device leaves on
        return items, torch.optim.SGD(items.parameters(), lr=0.1)


def copied(items: speedswap.Embedding) -> tuple[speedswap.Embedding, Optimizer]:
    return copy.deepcopy((items, torch.optim.SGD(items.parameters(), lr=0.1)))


def copied_after_a_step(items: speedswap.Embedding) -> tuple[speedswap.Embedding, Optimizer]:
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    items(torch.tensor([3])).sum().backward()
    optimizer.step()
    return copy.deepcopy((items, optimizer))


def with_a_group_changed_by_hand(items: speedswap.Embedding) -> tuple[speedswap.Embedding, Optimizer]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"].append(items.weight)
    return items, optimizer


@pytest.mark.parametrize(
    "make",
    [under_a_default_device, copied, copied_after_a_step, with_a_group_changed_by_hand],
    ids=lambda f: f.__name__,
)
def test_optimizer_whose_first_step_comes_late_is_known(make: Any, items: speedswap.Embedding) -> None:
    """Also a copy, and one that was given the weight by hand, once it is attached."""
    items, second = make(items)
    head = nn.Linear(DIM, 1, dtype=torch.float64)
    first = torch.optim.SGD(head.parameters(), lr=0.1)
    if make is with_a_group_changed_by_hand:
        speedswap.attach(second, items)
    before = items.table.read()
    for _ in range(3):
        head(items(torch.tensor([1, 2]))).sum().backward()
        first.step()
    second.step()
    assert (items.table.read() != before).any(dim=1).nonzero().flatten().tolist() == [1, 2]


def test_weight_taken_out_of_the_optimizer_that_trained_it_is_an_error(items: speedswap.Embedding) -> None:
    model = nn.Sequential(items, nn.Linear(DIM, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["params"].remove(items.weight)
    items.zero_grad()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    with pytest.raises(LostUpdateError, match="'items' is in no optimizer"):
        model(torch.tensor([1, 2]))


@pytest.mark.parametrize("left", ["dropped", "its group emptied", "of a copy"])
def test_optimizer_that_no_longer_holds_the_weight_is_no_excuse(left: str, items: speedswap.Embedding) -> None:
    """One that was made with it may step late, and is waited for until others have taken a hundred steps."""
    head = nn.Linear(DIM, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    other: Any = copy.deepcopy(items) if left == "of a copy" else items
    holder: Any = torch.optim.SGD(other.parameters(), lr=0.1)
    if left == "dropped":
        del holder
    elif left == "its group emptied":
        holder.param_groups.clear()
    for _ in range(1 if left == "of a copy" else 100):
        head(items(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
    with pytest.raises(LostUpdateError, match="'items' is in no optimizer"):
        items(torch.tensor([1, 2]))


@pytest.mark.parametrize("zero", ["zero_grad()", "zero_grad(set_to_none=False)", "never"])
def test_a_weight_in_no_optimizer_is_an_error_in_every_loop(zero: str, items: speedswap.Embedding) -> None:
    """Before the second step, in a loop that drops the gradient as in one that lets it add up."""
    model = nn.Sequential(items, nn.Linear(DIM, 1, dtype=torch.float64))
    optimizer = torch.optim.Adam(model[1].parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    if zero != "never":
        model.zero_grad(set_to_none="False" not in zero)
    with pytest.raises(LostUpdateError, match="'items' is in no optimizer"):
        model(torch.tensor([1, 2]))


@pytest.mark.parametrize("way", ["no_grad", "data"])
@pytest.mark.parametrize("ids", [[1, 2], [3], range(ROWS)], ids=["some rows", "one row", "every row"])
def test_an_update_by_hand_is_an_error(way: str, ids: Sequence[int], items: speedswap.Embedding) -> None:
    """The batch's gradient may have any shape: one row's would fit every row of the table."""
    before = items.table.read()
    items(torch.tensor(ids)).sum().backward()
    weight = items.weight.data if way == "data" else items.weight
    with (
        torch.no_grad(),
        pytest.raises(WeightError, match=r"used in sub_, .*: rows are trained by an optimizer of torch\.optim"),
    ):
        weight -= 0.1 * items.weight.grad
    assert torch.equal(items.table.read(), before)


def test_clamping_after_the_step_clamps_the_table(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    train(items, optimizer)
    wanted = items.table.read().clamp(-0.1, 0.1)
    with torch.no_grad():
        items.weight.clamp_(-0.1, 0.1)
    assert torch.equal(items.table.read(), wanted)
    train(items, optimizer)


def test_a_change_after_the_step_that_torch_does_not_see_is_an_error(items: speedswap.Embedding) -> None:
    """As a C++ extension makes them, which passes by torch functions and the dispatcher."""
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    train(items, optimizer)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        items.weight.clamp_(-0.1, 0.1)
    with pytest.raises(LostUpdateError, match=r"after the optimizer's step.*table\.gather and table\.scatter"):
        items(torch.tensor([1]))
    train(items, optimizer)  # told once, training goes on


class Unhooked(torch.optim.SGD):
    """Steps without torch's optimizer hooks."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.__func__.__wrapped__.__get__(self) if name == "step" else value


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_without_torchs_hooks_is_an_error(foreach: bool, items: speedswap.Embedding) -> None:
    optimizer = Unhooked(items.parameters(), lr=0.1, foreach=foreach)
    items(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(WeightError, match=r"a subclass of torch\.optim\.Optimizer that calls super\(\)\.__init__"):
        optimizer.step()


def test_an_optimizer_in_a_c_extension_without_hooks_is_an_error_at_the_next_forward(
    items: speedswap.Embedding,
) -> None:
    optimizer = Unhooked(items.parameters(), lr=0.1)
    items(torch.tensor([1, 2])).sum().backward()
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        optimizer.step()
    with pytest.raises(LostUpdateError, match="changed on the device"):
        items(torch.tensor([1, 2]))


def test_accumulating_forwards_are_no_lost_updates(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    for _ in range(4):
        items(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    for _ in range(4):
        items(torch.tensor([2, 3])).sum().backward()


class DecayedTwice(torch.optim.SGD):
    """Work before and after the step of its base class is part of its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)
        return loss


def test_a_step_inside_of_a_step_is_a_part_of_it(items: speedswap.Embedding) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # lets torch give the inner step its hooks
    wanted = items.table.read()
    optimizer = DecayedTwice(items.parameters(), lr=0.1)
    for _ in range(2):
        items(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted[1:3] = (wanted[1:3] * 0.5 - 0.1) * 0.5
    torch.testing.assert_close(items.table.read(), wanted, rtol=0, atol=1e-12)


def test_a_step_inside_of_a_step_may_raise_and_be_tried_again(items: speedswap.Embedding) -> None:
    class Fragile(torch.optim.SGD):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.fails = not self.fails and not this_thread.probing
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    class Patient(Fragile):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with contextlib.suppress(ArithmeticError):
                return super().step(closure)
            return super().step(closure)

    Fragile([nn.Parameter(torch.ones(1))], lr=1.0)  # lets torch give the inner step its hooks
    before = items.table.read()
    optimizer = Patient(items.parameters(), lr=0.1)
    for _ in range(2):
        items(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before[1:3] -= 0.2
    torch.testing.assert_close(items.table.read(), before, rtol=0, atol=1e-12)


def test_loaded_state_of_one_row_is_refused_and_not_taken_for_the_tables(items: speedswap.Embedding) -> None:
    """As of a table of one row; every step raises, and the table is unchanged."""
    optimizer = torch.optim.Adam(items.parameters())
    one_row = torch.ones(1, DIM, dtype=torch.float64)
    state = {0: {"step": torch.tensor(3.0), "exp_avg": one_row, "exp_avg_sq": one_row}}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    before = items.table.read()
    for _ in range(2):
        items(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"'exp_avg' in the optimizer's state_dict has shape \(1, 4\)"):
            optimizer.step()
    assert torch.equal(items.table.read(), before)


def test_writing_the_table_between_backward_and_step_is_seen(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    ids = torch.tensor([1, 2])
    items(ids).sum().backward()
    items.table.scatter(ids, torch.ones(2, DIM, dtype=torch.float64))
    optimizer.step()
    torch.testing.assert_close(items.table.read(1, 3), torch.full((2, DIM), 0.9, dtype=torch.float64))


# ---------------------------------------------------------------------------- exceptions


class Interrupted(torch.optim.Adam):
    """Raises when told to, after it has changed weights and state."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():  # without hooks, which torch wraps around it with the first Adam of a process
            result = inspect.unwrap(torch.optim.Adam.step)(self, closure)
        if self.fails:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("place", ["forward", "loss", "backward", "step"])
def test_an_exception_anywhere_leaves_the_table_as_after_the_last_step(place: str, items: speedswap.Embedding) -> None:
    optimizer = Interrupted(items.parameters())
    speedswap.attach(optimizer, items)
    ids = torch.tensor([1, 2, 5])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def one_step(fail: bool) -> None:
        optimizer.zero_grad()
        out = items(torch.tensor([99]) if fail and place == "forward" else ids)
        if fail and place == "loss":
            raise KeyboardInterrupt
        if fail and place == "backward":
            out = Fails.apply(out)
        out.square().sum().backward()
        optimizer.fails = fail and place == "step"
        optimizer.step()

    one_step(False)
    one_step(False)
    before = {name: items.table.read(column=name) for name in items.table.columns}
    with pytest.raises((KeyboardInterrupt, IdError)):
        one_step(True)
    for name, value in before.items():
        assert torch.equal(items.table.read(column=name), value)
    one_step(False)  # and training goes on
    assert optimizer.state[items.weight]["step"] == 3
    assert not torch.equal(items.table.read(), before["weight"])


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["INT", "TERM", "HUP"])
def test_ctrl_c_while_rows_are_written_waits_until_all_of_them_are(
    number: signal.Signals, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does any other signal that has a handler, such as one that turns SIGTERM into an exception."""
    signal.signal(number, signal.default_int_handler)
    users, items = (
        speedswap.Embedding(ROWS, DIM, dtype=torch.float64, name=name, path=tmp_path / name if on_disk else None)
        for name in ("users", "items")
    )
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()])
    ids = torch.tensor([1, 2])

    def one_step() -> None:
        optimizer.zero_grad()
        (users(ids) * items(ids)).sum().backward()
        optimizer.step()

    one_step()
    before = [module.table.read() for module in (users, items)]
    scatter = users.table.store.scatter

    def interrupted(*args: Any) -> None:
        signal.raise_signal(number)
        scatter(*args)

    monkeypatch.setattr(users.table.store, "scatter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_step()
    for module, old in zip((users, items), before, strict=True):
        assert (module.table.read() != old).any(dim=1).nonzero().flatten().tolist() == [1, 2]
        assert optimizer.state[module.weight]["step"] == 2
    assert signal.getsignal(number) is signal.default_int_handler


def test_ids_out_of_range_are_refused_before_anything_is_read(items: speedswap.Embedding, device: str) -> None:
    for bad in (-1, ROWS, 2**31, 2**62, -(2**63)):
        ids = torch.tensor([[1, 2], [bad, 3]], device=device)
        with pytest.raises(IdError, match=rf"ids\[1, 0\] is {bad}, but table 'items' has rows 0 to 19"):
            items(ids)
    with pytest.raises(TypeError, match="float32"):
        items(torch.tensor([1.0], device=device))


# ---------------------------------------------------------------------------- state_dict


@pytest.mark.parametrize("storage", ["pageable", "disk"])
@pytest.mark.parametrize("load_first", [True, False], ids=["before-attaching", "after-attaching"])
def test_state_dicts_round_trip_into_another_storage(storage: str, load_first: bool, tmp_path: Path) -> None:
    def build(storage: str, path: Path | None, seed: int) -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(
            speedswap.Embedding(ROWS, DIM, storage=storage, path=path, seed=seed, dtype=torch.float64),
            nn.Linear(DIM, 1, dtype=torch.float64),
        )
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    model, optimizer = build("pageable", None, 1)
    train(model, optimizer, steps=5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")

    path = tmp_path / "table" if storage == "disk" else None
    other, other_optimizer = build(storage, path, 2)
    if not load_first:
        speedswap.attach(other_optimizer, other)
    checkpoint = torch.load(tmp_path / "checkpoint", weights_only=True)
    other.load_state_dict(checkpoint["model"])
    other_optimizer.load_state_dict(checkpoint["optimizer"])
    for module, opt in ((model, optimizer), (other, other_optimizer)):
        train(module, opt, steps=5)
    mine, theirs = model[0].table, other[0].table
    assert theirs.storage == storage
    for name in mine.columns:
        assert torch.equal(mine.read(column=name), theirs.read(column=name))
    theirs.close()


def test_state_dict_is_that_of_nn_embedding(items: speedswap.Embedding) -> None:
    twin = nn.Embedding(ROWS, DIM, dtype=torch.float64)
    twin.load_state_dict(items.state_dict())
    assert torch.equal(twin.weight.detach(), items.table.read())
    nn.init.ones_(twin.weight)
    items.load_state_dict(twin.state_dict())
    assert torch.equal(items.table.read(), torch.ones(ROWS, DIM, dtype=torch.float64))
    for wrong in ({"weight": torch.zeros(3, 4)}, {}, {"weight": [1.0]}):
        with pytest.raises(RuntimeError) as theirs:
            twin.load_state_dict(wrong)
        with pytest.raises(RuntimeError) as ours:
            items.load_state_dict(wrong)
        assert str(ours.value) == str(theirs.value)


def test_optimizer_state_of_another_size_is_refused(items: speedswap.Embedding) -> None:
    optimizer = torch.optim.Adam(items.parameters())
    speedswap.attach(optimizer, items)
    small = speedswap.Embedding(3, DIM, dtype=torch.float64)
    small_optimizer = torch.optim.Adam(small.parameters())
    small(torch.tensor([1])).sum().backward()
    small_optimizer.step()
    with pytest.raises(ValueError, match=r"'exp_avg'.* has shape \(3, 4\), but table 'items' needs \(20, 4\)"):
        optimizer.load_state_dict(small_optimizer.state_dict())


def test_a_table_too_large_for_memory_points_to_checkpoints(tmp_path: Path) -> None:
    rows = 2**40 // (4 * 1024)  # 1 TiB, in a file without blocks
    huge = speedswap.Embedding(rows, 1024, path=tmp_path / "huge", init=speedswap.init.zeros(), seed=0)
    with pytest.raises(TableTooLargeError, match=r"1024\.00 GiB.* use speedswap\.save_checkpoint\(path"):
        huge.state_dict()
    huge(torch.tensor([rows - 1])).sum()
    huge.table.close()


def test_a_reopened_table_goes_on_with_the_step_count_of_an_optimizer_that_makes_its_state_when_it_is_made(
    tmp_path: Path,
) -> None:
    """Adagrad's ``lr_decay`` goes by the steps of all runs, as in torch without an interruption."""
    ids = torch.arange(4)

    def train(module: nn.Module, steps: int) -> None:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1, lr_decay=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            module(ids).square().sum().backward()
            optimizer.step()

    values = torch.randn(4, 2)
    expected = nn.Embedding.from_pretrained(values.clone(), freeze=False)
    train(expected, 7)
    module = speedswap.Embedding.from_pretrained(values, freeze=False, path=tmp_path / "table")
    train(module, 5)
    module.table.close()
    with speedswap.Table.open(tmp_path / "table") as table:
        module = speedswap.Embedding(4, 2, table=table)
        train(module, 2)
        assert torch.equal(module.read(), expected.weight)


def test_a_reopened_table_goes_on_with_weights_state_and_step_count(tmp_path: Path) -> None:
    def run(steps: list[range], path: Path | None) -> Tensor:
        table = None
        for part in steps:
            torch.manual_seed(0)
            if table is None:
                module = speedswap.Embedding(ROWS, DIM, path=path, seed=3, dtype=torch.float64)
            else:
                module = speedswap.Embedding(ROWS, DIM, table=speedswap.Table.open(path))
            table = module.table
            optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
            for step in part:
                optimizer.zero_grad()
                ids = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))
                module(ids).square().sum().backward()
                optimizer.step()
            weights = table.read()
            if path is not None:
                table.close()
        return weights

    whole = run([range(10)], None)
    assert torch.equal(run([range(4), range(4, 10)], tmp_path / "table"), whole)


def test_state_without_its_step_count_starts_over_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = speedswap.Embedding(ROWS, DIM, path=tmp_path / "items", seed=0)
    train(first, torch.optim.Adam(first.parameters()))
    weights = first.table.read()
    first.table.close()
    table = speedswap.Table.open(tmp_path / "items")
    table.attributes.clear()  # as after a process that never came to flush or close
    again = speedswap.Embedding(ROWS, DIM, table=table)
    optimizer = torch.optim.Adam(again.parameters())
    speedswap.attach(optimizer, again)
    assert torch.equal(table.read(), weights)
    assert not table.read(column="exp_avg").any()
    train(again, optimizer)
    assert "'items' has state of an earlier run (exp_avg, exp_avg_sq)" in caplog.text
    table.close()


# ---------------------------------------------------------------------------- the module


def test_the_module_is_freed_with_its_table() -> None:
    import weakref

    module = speedswap.Embedding(ROWS, DIM)
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer)
    table, step = weakref.ref(module.table), weakref.ref(module._step)
    del module, optimizer
    gc.collect()
    assert table() is None
    assert step() is None


def test_pickles_and_dtype_changes_are_refused_with_the_remedy(items: speedswap.Embedding) -> None:
    with pytest.raises(TypeError, match=r"torch\.save\(model\.state_dict\(\).*save_checkpoint.* Table\.save"):
        torch.save(nn.Sequential(items), io.BytesIO())
    child = multiprocessing.get_context("spawn").Process(target=print, args=(items,))
    with pytest.raises(
        TypeError, match=r"in a worker, start that with fork .*\(path=\).* with storage=speedswap.Ranks"
    ):
        child.start()
    with pytest.raises(TypeError, match="float64 and stay so; give dtype="):
        items.float()
    assert items.double() is items
    with pytest.raises(TypeError, match="int64"):
        speedswap.Embedding(3, 2, dtype=torch.int64)


def test_a_pickled_embedding_looks_up_in_the_tables_files(tmp_path: Path) -> None:
    items = speedswap.Embedding(ROWS, DIM, 3, path=tmp_path / "items").eval()
    items.weight.requires_grad_(False)
    payload = pickle.dumps(nn.Sequential(items))
    assert len(payload) < 2000
    (again,) = pickle.loads(payload)
    ids = torch.tensor([3, 7])
    assert torch.equal(again(ids), items(ids))
    assert (again.padding_idx, again.training, again.weight.requires_grad) == (3, False, False)
    again.table.close()
    items.table.close()


def test_a_compiled_model_trains_the_same() -> None:
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(speedswap.Embedding(ROWS, DIM, seed=1), nn.Linear(DIM, 1))
        run = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = run(torch.arange(step, step + 5)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(compiled=True) == losses(compiled=False)


def test_constructor_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="padding_idx is 5"):
        speedswap.Embedding(5, 2, padding_idx=5)
    assert speedswap.Embedding(5, 2, padding_idx=-1).padding_idx == 4
    table = speedswap.Table.create(5, 2)
    with pytest.raises(ValueError, match="leave them out, or give the table's"):
        speedswap.Embedding(5, 3, table=table)
    assert speedswap.Embedding(5, 2, table=table).table is table


def test_rows_are_drawn_from_torchs_generator_unless_a_seed_is_given() -> None:
    torch.manual_seed(5)
    first, second = speedswap.Embedding(ROWS, DIM), speedswap.Embedding(ROWS, DIM)
    torch.manual_seed(5)
    again = speedswap.Embedding(ROWS, DIM)
    assert torch.equal(first.table.read(), again.table.read())
    assert not torch.equal(first.table.read(), second.table.read())
    seeded = [speedswap.Embedding(ROWS, DIM, seed=9).table.read() for _ in range(2)]
    assert torch.equal(*seeded)


def test_from_pretrained_freezes_by_default() -> None:
    rows = torch.randn(ROWS, DIM)
    frozen = speedswap.Embedding.from_pretrained(rows)
    out = frozen(torch.tensor([3]))
    assert torch.equal(out, rows[3:4])
    assert not out.requires_grad
    assert speedswap.Embedding.from_pretrained(rows, freeze=False)(torch.tensor([3])).requires_grad


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_ctrl_c_in_the_first_step_leaves_an_embedding_that_trains_on(
    name: str, interrupted_at: Callable[[int], AbstractContextManager[list[str]]]
) -> None:
    """Wherever it comes, the interrupted step counts or does not, and the steps after it are torch's."""

    def train(module: nn.Module, optimizer: Optimizer, steps: int) -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            module(torch.arange(4)).square().sum().backward()
            optimizer.step()
        return module.weight.detach() if type(module) is nn.Embedding else module.read()

    make = functools.partial(getattr(torch.optim, name), lr=0.1)
    values = torch.randn(4, 2)
    dense = [nn.Embedding.from_pretrained(values.clone(), freeze=False) for _ in range(2)]
    expected = [train(each, make(each.parameters()), steps) for each, steps in zip(dense, (2, 3), strict=True)]
    interrupted = 0
    for line in range(1, 3000, 61):
        module = speedswap.Embedding.from_pretrained(values, freeze=False)
        optimizer = make(module.parameters())
        module(torch.arange(4)).square().sum().backward()
        try:
            with interrupted_at(line) as places:
                optimizer.step()
        except KeyboardInterrupt:
            interrupted += 1
            assert "ctrl_c" not in places[0], "it came where no signal would"
        found = train(module, optimizer, 2)
        assert any(torch.equal(found, each) for each in expected), line
    assert interrupted > 5


def test_attaching_leaves_every_random_generator_as_it_is(device: str):
    """On a GPU too, whose ranks would else draw the same numbers after the first step."""

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]

    init = speedswap.init.from_torch(torch.nn.init.normal_)
    items = speedswap.Embedding(50, 4, init=init, seed=1, device=device)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    torch.rand(3, device=device)
    before = states()
    items(torch.tensor([1, 2], device=device)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, states(), before))
