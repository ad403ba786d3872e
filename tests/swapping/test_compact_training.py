"""Training with weights or optimizer state that are stored in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedswap
from speedswap import kernels
from speedswap.errors import OptimizerError
from speedswap.optim import RowwiseAdagrad

ROWS, DIM = 60, 12
HALVES = [torch.float16, torch.bfloat16]
MakeOptimizer = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


def embedding(device: str = "cpu", **settings: Any) -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, seed=3, **settings).to(device)


def ids_of(step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return ((ROWS ** torch.rand(25, generator=generator)).long() - 1).to(device)


def loss_of(rows: Tensor) -> Tensor:
    return (rows * torch.linspace(-1, 1, DIM, device=rows.device) - 0.3).square().sum()


def train(module: nn.Module, optimizer: Optimizer, steps: int, device: str, *, ahead: bool = False) -> None:
    batches = [ids_of(step, device) for step in range(steps)]
    for ids in speedswap.lookahead(batches, {module: lambda ids: ids}) if ahead else batches:
        optimizer.zero_grad()
        loss_of(module(ids)).backward()
        optimizer.step()


def columns(module: speedswap.Embedding) -> dict[str, Tensor]:
    return {name: module.table.read(column=name) for name in module.table.columns}


def test_a_step_to_read(device: str) -> None:
    """SGD takes 0.001 from 1.0: what is stored as bfloat16 goes back to 1.0, the nearest there is."""
    items = speedswap.Embedding(
        4, 2, init=speedswap.init.constant(1), stored_dtype=torch.bfloat16, rounding="nearest"
    ).to(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.001)
    items(torch.tensor([2], device=device)).sum().backward()
    optimizer.step()
    assert items.table.read().tolist() == [[1.0, 1.0]] * 4
    assert items.table.nbytes == 16


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_is_torchs_with_rounding_after_every_step(
    make_optimizer: MakeOptimizer, dtype: torch.dtype, device: str
) -> None:
    """Weight and state, to the last bit: torch trains the batch's rows, and all are rounded to nearest after it."""
    ours = embedding(device, stored_dtype=dtype, state_dtype=dtype, rounding="nearest")
    optimizer = make_optimizer(ours.parameters())
    weight = ours.table.read().to(device)
    state: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for step in range(30):
        ids = ids_of(step, device)
        optimizer.zero_grad()
        loss_of(ours(ids)).backward()
        optimizer.step()

        rows, local = ids.unique(return_inverse=True)
        parameter = nn.Parameter(weight[rows])
        theirs = make_optimizer([parameter])
        if step:
            theirs.state[parameter] = {**scalars, **{name: column[rows] for name, column in state.items()}}
        loss_of(nn.functional.embedding(local, parameter)).backward()
        theirs.step()
        weight[rows] = parameter.detach().to(dtype).float()
        scalars = {name: value for name, value in theirs.state[parameter].items() if value.dim() == 0}
        for name, value in theirs.state[parameter].items():
            if value.dim():
                state.setdefault(name, torch.zeros_like(weight))[rows] = value.to(dtype).float()
    for name, column in columns(ours).items():
        assert torch.equal(column, (weight if name == "weight" else state[name]).cpu()), name


@pytest.mark.parametrize("settings", [{"stored_dtype": torch.bfloat16}, {"stored_dtype": torch.float16}, {}], ids=str)
@pytest.mark.parametrize("state_dtype", [*HALVES, None], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_lookahead_is_bit_identical(
    name: str, state_dtype: torch.dtype | None, settings: dict[str, Any], device: str
) -> None:
    """Rows forwarded on the device equal what the table would have returned, draws included."""
    runs = []
    for ahead in (False, True):
        items = embedding(device, state_dtype=state_dtype, **settings)
        train(items, OPTIMIZERS[name](items.parameters()), 25, device, ahead=ahead)
        assert items.table.writes == 25
        runs.append(columns(items))
    for column, values in runs[0].items():
        assert torch.equal(runs[1][column], values), column


def test_trained_columns_are_rounded_stochastically_by_default(device: str) -> None:
    items = embedding(device, stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    train(items, OPTIMIZERS["adam"](items.parameters()), 1, device)
    form = {name: (column.stored, column.rounding) for name, column in items.table.columns.items()}
    assert set(form) == {"weight", "exp_avg", "exp_avg_sq"}
    assert set(form.values()) == {(torch.bfloat16, "stochastic")}
    assert items.table.nbytes == ROWS * 3 * 2 * DIM, "half of what float32 takes"


def test_state_of_one_number_a_row_stays_float32(device: str) -> None:
    items = embedding(device, state_dtype=torch.bfloat16)
    train(items, RowwiseAdagrad(items.parameters(), 0.1, initial_accumulator_value=0.1), 2, device)
    assert all(not column.compact for column in items.table.columns.values())


def test_steps_of_any_kind_are_not_taken_for_lost(device: str) -> None:
    """Accumulation, evaluation, a step twice, and a forward whose gradient is thrown away: no false alarm."""
    items = embedding(device, stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    optimizer = OPTIMIZERS["adam"](items.parameters())
    for step in range(6):
        loss_of(items(ids_of(step, device))).backward()
        loss_of(items(ids_of(step + 50, device))).backward()
        with torch.no_grad():
            items(ids_of(step + 1, device))
        optimizer.step()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        loss_of(items(ids_of(step + 7, device))).backward()
        optimizer.zero_grad()


def test_a_reopened_table_trains_on_as_if_it_had_stayed_open(tmp_path: Path, device: str) -> None:
    runs = []
    for closes in (False, True):
        settings = {"stored_dtype": torch.float16, "state_dtype": torch.bfloat16}
        items = embedding(device, path=tmp_path / str(closes), **settings)
        optimizer = OPTIMIZERS["adam"](items.parameters())
        for step in range(10):
            if closes and step == 5:
                items.table.close()
                table = speedswap.Table.open(tmp_path / str(closes))
                # What the table has needs no saying, but may be said.
                items = speedswap.Embedding(ROWS, DIM, table=table, state_dtype=torch.bfloat16).to(device)
                optimizer = OPTIMIZERS["adam"](items.parameters())
            optimizer.zero_grad()
            loss_of(items(ids_of(step, device))).backward()
            optimizer.step()
        runs.append(columns(items))
        items.table.close()
    for name, values in runs[0].items():
        assert torch.equal(runs[1][name], values), name


@pytest.mark.parametrize(
    ("asked", "had"),
    [
        ({"state_dtype": torch.bfloat16}, {"state_dtype": torch.float16}),
        ({"state_dtype": torch.bfloat16}, {}),
        ({"state_dtype": torch.float32}, {"state_dtype": torch.bfloat16}),
        ({"state_dtype": torch.bfloat16, "rounding": "nearest"}, {"state_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_a_table_that_stores_state_otherwise_is_refused(asked: dict[str, Any], had: dict[str, Any]) -> None:
    first = embedding(**had)
    train(first, OPTIMIZERS["adam"](first.parameters()), 1, "cpu")
    before = columns(first)
    again = speedswap.Embedding(ROWS, DIM, table=first.table, **asked)
    del first
    with pytest.raises(OptimizerError, match=r"state_dtype is torch.* stores 'exp_avg' as .* leave both out"):
        train(again, OPTIMIZERS["adam"](again.parameters()), 1, "cpu")
    for name, values in columns(again).items():
        assert torch.equal(values, before[name])
    with pytest.raises(ValueError, match=r"stored_dtype is torch.float16, but table 'table' stores its weights as"):
        speedswap.Embedding(ROWS, DIM, table=again.table, stored_dtype=torch.float16)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"state_dtype": torch.int8}, TypeError, "state_dtype is torch.int8; give torch.bfloat16"),
        ({"state_dtype": torch.bfloat16, "dtype": torch.float64}, TypeError, "but the rows are torch.float64"),
        ({"stored_dtype": torch.bfloat16, "dtype": torch.float64}, TypeError, "was to be stored as torch.bfloat16"),
        ({"stored_dtype": torch.int8, "rounding": "stochastic"}, ValueError, "int8 is rounded to 'nearest' only"),
        ({"rounding": "down"}, ValueError, "rounding is 'down'; choose one of nearest, stochastic"),
    ],
)
def test_arguments_are_checked(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        embedding(**settings)


def test_state_dict_has_float32_and_comes_back_to_the_last_bit(device: str) -> None:
    runs = []
    for _ in range(2):
        items = embedding(device, stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
        optimizer = OPTIMIZERS["adam"](items.parameters())
        if runs:
            items.load_state_dict(runs[0][1])
            speedswap.attach(optimizer, items)
            optimizer.load_state_dict(runs[0][2])
            assert all(torch.equal(values, runs[0][0][name]) for name, values in columns(items).items())
        else:
            train(items, optimizer, 5, device)
            runs.append((columns(items), items.state_dict(), optimizer.state_dict()))
    assert runs[0][1]["weight"].dtype == torch.float32


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_over_compact_rows(mode: str, device: str) -> None:
    bag = speedswap.EmbeddingBag(ROWS, DIM, mode=mode, stored_dtype=torch.bfloat16, rounding="nearest").to(device)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, device=device)
    theirs.weight.data.copy_(bag.table.read())
    ids = ids_of(0, device).view(5, 5)
    torch.testing.assert_close(bag(ids), theirs(ids))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (bag, theirs)]
    for module, optimizer in zip((bag, theirs), optimizers, strict=True):
        module(ids).square().sum().backward()
        optimizer.step()
    rounded = theirs.weight.detach().cpu().bfloat16().float()
    torch.testing.assert_close(bag.table.read(), rounded, rtol=2**-7, atol=1e-6)


# ---------------------------------------------------------------------------- int8, for lookup


def test_pretrained_rows_in_a_quarter_of_the_bytes(device: str) -> None:
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    items = speedswap.Embedding.from_pretrained(rows, stored_dtype=torch.int8)
    assert items.table.nbytes == 1000 * 72  # 4 for the scale, 64, and 4 up to a multiple of 8
    ids = torch.randint(1000, (50, 3), device=device)
    found = items(ids)
    scale = rows.abs().amax(dim=1)[ids.cpu()] / 127
    assert found.dtype == torch.float32
    assert ((found.cpu() - rows[ids.cpu()]).abs() <= scale.unsqueeze(-1) * (0.5 + 1e-5)).all()
    bag = speedswap.EmbeddingBag.from_pretrained(rows, mode="sum", stored_dtype=torch.int8)
    torch.testing.assert_close(bag(ids), found.sum(dim=1))


def test_int8_rows_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match=r"stored_dtype is torch.int8 and freeze is False"):
        speedswap.Embedding.from_pretrained(torch.ones(3, 2), freeze=False, stored_dtype=torch.int8)
    items = embedding(stored_dtype=torch.int8)
    before = items.table.read()
    ids = torch.tensor([1])
    with pytest.raises(OptimizerError, match=r"stored as int8, for lookup only.*requires_grad_\(False\)"):
        items(ids)
    with pytest.raises(OptimizerError, match="stored as int8, for lookup only"):
        speedswap.attach(torch.optim.SGD(items.parameters(), lr=0.1), items)
    with torch.no_grad():
        items(ids)
    assert not items.requires_grad_(False)(ids).requires_grad
    assert torch.equal(items.table.read(), before)


# ---------------------------------------------------------------------------- what it is worth


def planted_loss(state_dtype: torch.dtype, rounding: str | None = None, steps: int = 900) -> float:
    """Mean loss of the last fifth of a factorization with noise, by Adam: ratings of low rank, Zipf-like users."""
    generator = torch.Generator().manual_seed(7)
    users, items, rank = 150, 120, 8
    left, right = torch.randn(users, rank, generator=generator), torch.randn(items, rank, generator=generator)
    settings: dict[str, Any] = {
        "state_dtype": state_dtype,
        "rounding": rounding,
        "init": speedswap.init.normal(std=0.3),
    }
    model = nn.ModuleList([speedswap.Embedding(size, rank, seed=size, **settings) for size in (users, items)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        user = (users ** torch.rand(256, generator=generator)).long() - 1
        item = torch.randint(items, (256,), generator=generator)
        rating = (left[user] * right[item]).sum(1) + 0.5 * torch.randn(256, generator=generator)
        optimizer.zero_grad()
        loss = ((model[0](user) * model[1](item)).sum(1) - rating).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-steps // 5 :]) / (steps // 5)


@pytest.mark.release
def test_half_the_state_costs_half_a_percent_of_loss_at_most() -> None:
    """On the same batches: the difference that the state's rounding makes, not the batches' noise."""
    exact = planted_loss(torch.float32)
    assert exact < 1.0, "the planted structure is found: without it the loss is above 8"
    assert planted_loss(torch.bfloat16) == pytest.approx(exact, rel=0.005)


def test_draws_do_not_depend_on_threads() -> None:
    found = []
    try:
        for threads in (1, 3):
            kernels.set_num_threads(threads)
            items = embedding(stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
            train(items, OPTIMIZERS["adam"](items.parameters()), 10, "cpu")
            found.append(columns(items))
    finally:
        kernels.set_num_threads(None)
    for name, values in found[0].items():
        assert torch.equal(found[1][name], values)
