"""Steps that raise, and optimizers that leave something other than the batch's rows."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from children import exit_status
from torch import Tensor

import speedswap
from speedswap.errors import LostUpdateError, OptimizerError, TableClosedError
from speedswap.swapping.row_step import RowStep

ROWS, DIM = 20, 3
IDS = torch.tensor([4, 1, 4, 9])


class Spoiled(torch.optim.Adagrad):
    """Adagrad that makes a given change after its step."""

    spoil: Callable[[Any, Any], Any] | None = None

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        spoil, self.spoil = self.spoil, None
        if spoil is not None:
            for group in self.param_groups:
                spoil(self, group["params"][0])


def state_of(change: Callable[[Tensor], Any]) -> Callable[[Any, Any], Any]:
    return lambda optimizer, weight: optimizer.state[weight].update(sum=change(optimizer.state[weight]["sum"]))


def weight_of(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    def spoil(optimizer: Any, weight: Any) -> None:
        weight.grad = None
        weight.data = change(weight.data)

    return spoil


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def with_half_its_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


SPOILED = {
    "state of one row": state_of(lambda state: state[:1].clone()),
    "state of too many rows": state_of(lambda state: torch.zeros(50, DIM)),
    "state of no rows": state_of(lambda state: state[:0].clone()),
    "state of another width": state_of(lambda state: state[:, :1].clone()),
    "state of fewer dimensions": state_of(lambda state: state[:, 0].clone()),
    "state of half precision": state_of(Tensor.half),
    "state of double precision": state_of(Tensor.double),
    "state without values": state_of(lambda state: state.to("meta")),
    "sparse state": state_of(Tensor.to_sparse),
    "state that is a number": state_of(lambda state: 3.0),
    "state without memory": state_of(lambda state: without_memory(state.clone())),
    "state with half its memory": state_of(lambda state: with_half_its_memory(state.clone())),
    "weight of one row": weight_of(lambda rows: rows[:1].clone()),
    "weight of too many rows": weight_of(lambda rows: torch.zeros(50, DIM)),
    "weight of another width": weight_of(lambda rows: rows[:, :2].clone()),
    "weight of double precision": weight_of(Tensor.double),
    "weight without memory": weight_of(lambda rows: without_memory(rows.clone())),
}
FITTING = {
    "transposed": lambda state: state.T.contiguous().T,
    "part of a larger tensor": lambda state: torch.cat([state, state])[len(state) :],
}


def columns(items: speedswap.Embedding) -> dict[str, Tensor]:
    return {name: items.table.read(column=name) for name in items.table.columns}


def backward(items: speedswap.Embedding, step: int = 0) -> None:
    items(IDS + step).square().sum().backward()


def train(items: speedswap.Embedding, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(items, step)
        optimizer.step()


def uninterrupted(steps: int) -> dict[str, Tensor]:
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    train(items, torch.optim.Adagrad(items.parameters(), lr=0.1), range(steps))
    return columns(items)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_what_does_not_fit_the_rows_is_refused_before_anything_is_written(spoil: Any, ahead: bool) -> None:
    """Table and optimizer are as before the step, and training continues as if it had not been attempted."""
    items = speedswap.Embedding(ROWS, DIM, seed=3, name="items")
    optimizer = Spoiled(items.parameters(), lr=0.1)
    batches: Any = [IDS + step for step in range(4)]
    for step, ids in enumerate(speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches):
        optimizer.zero_grad()
        items(ids).square().sum().backward()
        if step == 2:
            optimizer.spoil = spoil
            with pytest.raises(OptimizerError, match=r"Spoiled left .* of table 'items' as .* need \(3, 3\)"):
                optimizer.step()
            assert items.weight.shape == (ROWS, DIM)
            assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [2]
            assert_equal(columns(items), uninterrupted(2))
            optimizer.zero_grad()
            items(ids).square().sum().backward()
        optimizer.step()
    assert_equal(columns(items), uninterrupted(4))


@pytest.mark.parametrize("change", FITTING.values(), ids=FITTING.keys())
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_state_of_any_strides_is_written(change: Callable[[Tensor], Tensor], ahead: bool) -> None:
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Spoiled(items.parameters(), lr=0.1)
    expected = []

    def note(state: Tensor) -> Tensor:
        changed = change(state)
        expected.append(changed.clone())
        return changed

    batches: Any = [IDS, IDS, IDS]
    speedswap.attach(optimizer, items)
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches:
        optimizer.zero_grad()
        items(ids).square().sum().backward()
        optimizer.spoil = state_of(note)
        optimizer.step()
    assert torch.equal(items.table.read(column="sum")[[1, 4, 9]], expected[-1])


def test_one_table_that_is_left_misfitting_keeps_every_table_as_it_was() -> None:
    """Of two embeddings in one optimizer, the second one's state does not fit."""
    first, second = (speedswap.Embedding(ROWS, DIM, seed=seed) for seed in (1, 2))
    optimizer = Spoiled([{"params": first.parameters()}, {"params": second.parameters()}], lr=0.1)
    before = columns(first), columns(second)
    speedswap.attach(optimizer, torch.nn.ModuleList([first, second]))
    backward(first)
    backward(second)

    def spoil(optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        if rows is optimizer.param_groups[1]["params"][0]:
            optimizer.state[rows]["sum"] = optimizer.state[rows]["sum"][:1].clone()

    optimizer.spoil = spoil
    with pytest.raises(OptimizerError, match="'sum'"):
        optimizer.step()
    for items, rows in zip((first, second), before, strict=True):
        assert torch.equal(items.table.read(), rows["weight"])
        assert not items.table.read(column="sum").any()


class Raises(torch.optim.Adam):
    """Adam whose step raises after it has changed everything, a given number of times."""

    failures = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("in the middle of the step")
        return loss


@pytest.mark.parametrize("with_closure", [False, True])
def test_weight_stands_for_the_whole_table_after_a_step_that_raised(with_closure: bool) -> None:
    """At once, and not from the next forward pass on; a state_dict has the state from before the step."""
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Raises(items.parameters(), lr=0.1)
    train(items, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.failures = 1
    optimizer.zero_grad()
    if not with_closure:
        backward(items)
    with contextlib.suppress(RuntimeError):
        optimizer.step((lambda: backward(items)) if with_closure else None)
    assert items.weight.shape == (ROWS, DIM)
    assert "Table(" in repr(items.weight)
    after = optimizer.state_dict()
    for name, value in before["state"][0].items():
        assert torch.equal(after["state"][0][name], value), name
    with torch.no_grad():
        items.weight.fill_(7.0)  # the table, not some rows on the device
    assert torch.equal(items.table.read(), torch.full((ROWS, DIM), 7.0))


def test_state_dict_that_is_taken_while_the_error_is_handled_is_that_before_the_step() -> None:
    """A checkpoint at the end of a run that failed has no rows of a batch in it."""
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Raises(items.parameters(), lr=0.1)
    train(items, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())["state"][0]
    optimizer.failures = 1
    backward(items)
    try:
        optimizer.step()
    except RuntimeError:
        after = optimizer.state_dict()["state"][0]
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_step_that_raised_may_be_taken_again_with_the_same_gradient() -> None:
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Raises(items.parameters(), lr=0.1)
    speedswap.attach(optimizer, items)
    twin = speedswap.Embedding(ROWS, DIM, seed=3)
    for step in range(3):
        optimizer.zero_grad()
        backward(items, step)
        optimizer.failures = 2
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                optimizer.step()
        optimizer.step()
    train(twin, torch.optim.Adam(twin.parameters(), lr=0.1), range(3))
    assert_equal(columns(items), columns(twin))


def test_first_step_that_raised_is_taken_back_by_the_next_one() -> None:
    """In it an optimizer attaches itself; a state_dict in between has nothing of a batch's rows."""
    items, twin = (speedswap.Embedding(ROWS, DIM, seed=3) for _ in range(2))
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)

    def fail(*args: object) -> None:
        raise RuntimeError("in the middle of the step")

    hook = optimizer.register_step_post_hook(fail)  # before the table is written
    backward(items)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    hook.remove()
    assert not optimizer.state_dict()["state"]
    optimizer.step()
    train(items, optimizer, range(1, 3))
    train(twin, torch.optim.Adam(twin.parameters(), lr=0.1), range(3))
    assert_equal(columns(items), columns(twin))


def test_a_step_is_taken_back_under_learning_rate_schedulers() -> None:
    """They wrap the optimizer's step as well: one before it is attached, and one after."""
    items, twin = (speedswap.Embedding(ROWS, DIM, seed=3) for _ in range(2))
    optimizer = Raises(items.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(items, optimizer, range(1))
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.zero_grad()
    backward(items, 1)
    optimizer.failures = 1
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    assert items.weight.shape == (ROWS, DIM)
    optimizer.step()
    train(twin, torch.optim.Adam(twin.parameters(), lr=0.1), range(2))
    assert_equal(columns(items), columns(twin))


def test_step_without_a_gradient_after_one_that_raised_changes_nothing() -> None:
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Raises(items.parameters(), lr=0.1)
    train(items, optimizer, range(2))
    before = columns(items)
    optimizer.failures = 1
    backward(items)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(columns(items), before)
    assert optimizer.state[items.weight]["step"] == 2


def test_only_a_step_that_raised_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[RowStep] = []
    monkeypatch.setattr(RowStep, "undo", lambda step: noticed.append(step))
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = Raises(items.parameters(), lr=0.1)
    train(items, optimizer, range(2))
    assert not noticed
    optimizer.failures = 1
    backward(items)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    assert noticed == [items._step]


def test_ctrl_c_in_a_step_leaves_a_state_dict_of_one_step(
    interrupted_at: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """A checkpoint saved after it has every row's state, from before the step or from after it."""

    def trained() -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        items = speedswap.Embedding(ROWS, DIM, seed=3)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        train(items, optimizer, range(2))
        optimizer.zero_grad()
        backward(items)
        return items, optimizer

    items, optimizer = trained()
    possible = [(items.read(), copy.deepcopy(optimizer.state_dict()))]
    optimizer.step()
    possible.append((items.read(), copy.deepcopy(optimizer.state_dict())))
    interrupted = 0
    for line in range(1, 200):
        items, optimizer = trained()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line):
            optimizer.step()
            break
        interrupted += 1
        rows, expected = possible[not torch.equal(items.read(), possible[0][0])]
        assert torch.equal(items.read(), rows), line
        found = optimizer.state_dict()["state"][0]
        assert found.keys() == expected["state"][0].keys(), line
        assert all(torch.equal(found[key], value) for key, value in expected["state"][0].items()), line
    assert interrupted > 50


def test_hook_that_replaces_the_arguments_of_a_step_does_not_undo_it() -> None:
    """A step whose arguments are another hook's is a step all the same."""
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (tuple(args), dict(kwargs)))
    train(items, optimizer, range(3))
    assert_equal(columns(items), uninterrupted(3))


def test_gradient_of_another_width_is_refused() -> None:
    """torch's operators would spread its one column over all."""
    items = speedswap.Embedding(ROWS, DIM, seed=3)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    before = items.table.read()
    backward(items)
    items.weight.grad.data = items.weight.grad[:, :1].clone()
    with pytest.raises(LostUpdateError, match=r"replaced by one of shape \(3, 1\)"):
        optimizer.step()
    assert torch.equal(items.table.read(), before)


@pytest.mark.parametrize("refused", ["state of another table", "second of two"])
def test_refused_attach_changes_nothing(refused: str) -> None:
    """No column is added to any of the tables, and another optimizer may be attached."""
    first, second = (speedswap.Embedding(ROWS, DIM, seed=seed) for seed in (1, 2))
    both = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(both.parameters())
    if refused == "second of two":
        second = speedswap.Embedding(ROWS, DIM, table=second.table)
        other = torch.optim.SGD(second.parameters())
        speedswap.attach(other, second)
        error: type[Exception] = OptimizerError
    else:
        state = {"step": torch.tensor(1.0), "exp_avg": torch.rand(7, DIM), "exp_avg_sq": torch.rand(7, DIM)}
        optimizer.state[second.weight].update(state)
        error = ValueError
    before = [(dict(items.table.columns), items.table.version) for items in both]
    with pytest.raises(error):
        speedswap.attach(optimizer, both)
    assert [(dict(items.table.columns), items.table.version) for items in both] == before
    speedswap.attach(torch.optim.Adagrad(first.parameters()), first)
    assert set(first.table.columns) == {"weight", "sum"}


def test_a_table_that_cannot_begin_the_step_leaves_the_others_as_they_were() -> None:
    """The second table is closed: the first one's weight stands for its table again, and its state is scalars."""
    first, second = (speedswap.Embedding(10, 4) for _ in range(2))
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    ids = torch.tensor([1, 3])
    for _ in range(2):
        optimizer.zero_grad()
        (first(ids) + second(ids)).sum().backward()
        optimizer.step()
    before = first.read()
    optimizer.zero_grad()
    (first(ids) + second(ids)).sum().backward()
    second.table.write(0, torch.zeros(10, 4))  # so that the step has to read it again
    second.table.close()
    with pytest.raises(TableClosedError):
        optimizer.step()
    assert tuple(first.weight.shape) == (10, 4)
    assert set(optimizer.state[first.weight]) == {"step"}
    assert torch.equal(first.read(), before)


class Lost(Exception):
    """An error that gives a context manager's ``finally`` no turn, as a Ctrl-C may where one begins."""


@contextlib.contextmanager
def lost_at(number: int) -> Iterator[list[str]]:
    """Raise where a generator of the package pauses or ends for the n-th time before a table is written; never for 0.

    Yields:
        The places where one has.
    """
    places: list[str] = []
    package = str(Path(speedswap.__file__).parent)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_name == "_after_step":
            sys.setprofile(None)
        elif event == "return" and code.co_flags & inspect.CO_GENERATOR and code.co_filename.startswith(package):
            places.append(f"{Path(code.co_filename).name}:{code.co_name}")
            if len(places) == number:
                sys.setprofile(None)
                raise Lost

    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(None)


def test_step_after_one_whose_context_managers_were_left_open_is_torchs() -> None:
    """Wherever it was in the first step, the examination of the optimizer included, which steps with a copy of it."""

    def begin() -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        module = speedswap.Embedding.from_pretrained(torch.ones(5, DIM), freeze=False, padding_idx=2)
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.arange(5)).square().sum().backward()
        optimizer.step()

    theirs = torch.nn.Embedding.from_pretrained(torch.ones(5, DIM), freeze=False, padding_idx=2)
    expected, optimizer = [], torch.optim.Adam(theirs.parameters(), lr=0.1)
    for _ in range(2):
        step(theirs, optimizer)
        expected.append(theirs.weight.detach().clone())
    with lost_at(0) as places:
        step(*begin())
    assert len(places) > 10
    for number in range(1, len(places) + 1):
        module, optimizer = begin()
        with lost_at(number) as found, contextlib.suppress(Lost, OptimizerError):
            step(module, optimizer)
        step(module, optimizer)
        assert any(torch.equal(module.read(), each) for each in expected), found[-1]


def test_a_table_that_was_closed_before_its_step_keeps_no_other_model_from_training(tmp_path: Path) -> None:
    """Nor does a parent's table keep a forked child from it: a step reserves room in tables that it may write."""
    items, dense = speedswap.Embedding(10, 4, path=tmp_path / "items"), torch.nn.Linear(4, 1)
    speedswap.attach(torch.optim.SGD(items.parameters(), lr=0.1), items)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    dense(items(torch.tensor([1]))).sum().backward()
    assert exit_status(optimizer.step) == 0
    items.table.close()
    before = dense.bias.item()
    optimizer.step()
    assert dense.bias.item() == pytest.approx(before - 0.1)
