"""Row-wise Adagrad does what its formulas say, on matrices and on tables, and what FBGEMM does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import speedswap
from speedswap.errors import OptimizerError
from speedswap.optim import RowwiseAdagrad

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "l2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "clamped": {"max_gradient": 0.5},
    "bounded": {"max_norm": 1.5},
    "all": {"weight_decay": 0.1, "max_gradient": 0.5, "max_norm": 1.5, "initial_accumulator_value": 0.25},
}


class Model:
    """The update in NumPy, row after row."""

    def __init__(self, weight: np.ndarray, settings: dict[str, Any]) -> None:
        self.weight = weight.copy()
        self.sums = [settings.get("initial_accumulator_value", 0.0)] * len(weight)
        self.settings = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0, "weight_decay_mode": "l2", **settings}

    def step(self, gradients: np.ndarray, rows: Any) -> None:
        lr, eps, decay = (self.settings[name] for name in ("lr", "eps", "weight_decay"))
        bound, max_norm = self.settings.get("max_gradient"), self.settings.get("max_norm")
        for row in rows:
            w, g = self.weight[row], gradients[row]
            if bound is not None:
                g = np.minimum(np.maximum(g, -bound), bound)
            if self.settings["weight_decay_mode"] == "l2":
                g = g + decay * w
            self.sums[row] += (g**2).sum() / len(g)
            if self.settings["weight_decay_mode"] == "decoupled":
                w = (1 - lr * decay) * w
            w = w - lr / (math.sqrt(self.sums[row]) + eps) * g
            norm = math.sqrt((w**2).sum())
            self.weight[row] = w * (max_norm / norm) if max_norm is not None and norm > max_norm else w


def test_by_hand() -> None:
    """Row (3, 4) has mean squared gradient 12.5: from 0.0, its step is lr · g / √12.5."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    optimizer = RowwiseAdagrad([weight], lr=0.5, eps=1e-12)
    optimizer.step()
    assert optimizer.state[weight]["sum"].tolist() == [[pytest.approx(12.5)], [0.0]]
    assert weight.tolist() == [pytest.approx([-0.5 * 3 / math.sqrt(12.5), -0.5 * 4 / math.sqrt(12.5)]), [0.0, 0.0]]


positive = st.floats(1e-3, 3.0)
settings_of_any_kind = st.fixed_dictionaries(
    {"lr": st.floats(0.0, 2.0), "eps": st.sampled_from([1e-8, 1e-3, 1.0])},
    optional={
        "weight_decay": st.floats(0.0, 0.5),
        "weight_decay_mode": st.sampled_from(["l2", "decoupled"]),
        "max_gradient": positive,
        "max_norm": positive,
        "initial_accumulator_value": st.floats(0.0, 1.0),
    },
)


@given(
    settings=settings_of_any_kind,
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    steps=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_settings_give_the_numpy_models_rows(
    settings: dict[str, Any], shape: tuple[int, int], steps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=shape)
    model, weight = Model(start, settings), nn.Parameter(torch.tensor(start))
    optimizer = RowwiseAdagrad([weight], **settings)
    for _ in range(steps):
        gradient = rng.normal(size=shape) * (rng.random((shape[0], 1)) < 0.8)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        model.step(gradient, range(shape[0]))
    assert np.allclose(weight.detach().numpy(), model.weight, rtol=1e-9, atol=1e-12)
    assert np.allclose(optimizer.state[weight]["sum"][:, 0], model.sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_pass_gives_what_torchs_operations_give(settings: dict[str, Any], device: str) -> None:
    """In float32, after four steps; a learning rate in a tensor leaves them to torch."""
    gradients = torch.randn(4, 50, 100)
    start, found = torch.randn(50, 100), []
    for lr in (0.3, torch.tensor(0.3)):
        weight = nn.Parameter(start.to(device, copy=True))
        optimizer = RowwiseAdagrad([weight], lr=lr, **settings)
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step()
        found.append((weight.detach().cpu(), optimizer.state[weight]["sum"].cpu()))
    (ours, sums), (theirs, their_sums) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums, their_sums, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("attach_first", [True, False], ids=["attached", "attaches-itself"])
def test_a_table_trains_the_rows_of_each_batch(settings: dict[str, Any], attach_first: bool, device: str) -> None:
    """Weights and accumulators are the NumPy model's, where only the batch's rows take part in a step."""
    items = speedswap.Embedding(30, 4, dtype=torch.float64, seed=1).to(device)
    model = Model(items.read().numpy(), {"lr": 0.3, **settings})
    optimizer = RowwiseAdagrad(items.parameters(), lr=0.3, **settings)
    if attach_first:
        speedswap.attach(optimizer, items)
    rng = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids, target = torch.randint(30, (10,), generator=rng), torch.randn(10, 4, generator=rng, dtype=torch.float64)
        optimizer.zero_grad()
        (items(ids.to(device)) - target.to(device)).square().sum().backward()
        optimizer.step()
        gradient = torch.zeros(30, 4, dtype=torch.float64)
        gradient.index_add_(0, ids, 2 * (torch.tensor(model.weight)[ids] - target))
        model.step(gradient.numpy(), ids.unique().tolist())
    assert items.table.columns["sum"].row_shape == (1,)
    assert np.allclose(items.read().numpy(), model.weight, rtol=1e-10, atol=1e-12)
    assert np.allclose(items.table.read(column="sum")[:, 0], model.sums, rtol=1e-10, atol=1e-12)


def test_groups_have_settings_of_their_own_and_a_learning_rate_may_be_a_tensor() -> None:
    weights = [nn.Parameter(torch.ones(2, 4)) for _ in range(2)]
    optimizer = RowwiseAdagrad([{"params": weights[:1]}, {"params": weights[1:], "lr": torch.tensor(0.5)}], lr=0.25)
    for weight in weights:
        weight.grad = torch.full((2, 4), 2.0)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[[0.75] * 4] * 2, [[0.5] * 4] * 2]


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = RowwiseAdagrad([weight], lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure)
    assert loss.item() == 4.0
    assert weight.max().item() < 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulators_of_half_precision_rows_are_float32(dtype: torch.dtype) -> None:
    """A small square added to a large sum is not lost."""
    weight = nn.Parameter(torch.ones(1, 2, dtype=dtype))
    optimizer = RowwiseAdagrad([weight], initial_accumulator_value=1000.0)
    weight.grad = torch.ones(1, 2, dtype=dtype)
    for _ in range(8):
        optimizer.step()
    assert optimizer.state[weight]["sum"].dtype == torch.float32
    assert optimizer.state[weight]["sum"].item() == 1008.0
    assert weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_a_table", [False, True], ids=["matrix", "table"])
def test_loaded_accumulators_keep_their_precision(of_a_table: bool, dtype: torch.dtype) -> None:
    """Torch would convert them to the rows' dtype: to infinity, in float16."""

    def make() -> tuple[Any, RowwiseAdagrad]:
        items = speedswap.Embedding(3, 4, dtype=dtype) if of_a_table else nn.Embedding(3, 4, dtype=dtype)
        return items, RowwiseAdagrad(items.parameters(), lr=0.1)

    items, optimizer = make()
    for _ in range(3):
        optimizer.zero_grad()
        (items(torch.arange(3)) * 200).sum().backward()
        optimizer.step()
    other, restored = make()
    restored.load_state_dict(optimizer.state_dict())
    if of_a_table:
        speedswap.attach(restored, other)
    found = restored.state_dict()["state"][0]["sum"]
    assert found.dtype == torch.float32
    assert found.tolist() == [[120_000.0]] * 3
    assert restored.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_state_dict_is_loaded_into_a_new_optimizer_which_trains_on() -> None:
    found = []
    for split in (False, True):
        items = speedswap.Embedding(10, 3, seed=0)
        optimizer = RowwiseAdagrad(items.parameters(), lr=0.1, weight_decay=0.01)
        for step in range(4):
            if split and step == 2:
                state = optimizer.state_dict()
                optimizer = RowwiseAdagrad(items.parameters(), lr=0.7)
                speedswap.attach(optimizer, items)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            items(torch.tensor([step, step + 1])).square().sum().backward()
            optimizer.step()
        found.append(items.read())
    assert torch.equal(*found)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"lr is -1\.0; give a number that is not negative"),
    ({"lr": math.nan}, r"lr is nan; give"),
    ({"eps": 0.0}, r"eps is 0\.0; give a number above 0"),
    ({"weight_decay": -0.1}, r"weight_decay is -0\.1; give"),
    ({"weight_decay_mode": "cowclip"}, r"weight_decay_mode is 'cowclip'; give 'l2' or 'decoupled'"),
    ({"max_gradient": 0.0}, r"max_gradient is 0\.0; give a number above 0, or None"),
    ({"max_norm": -1.0}, r"max_norm is -1\.0; give a number above 0, or None"),
    ({"initial_accumulator_value": -1.0}, r"initial_accumulator_value is -1\.0; give"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=message):
        RowwiseAdagrad([weight], **settings)
    optimizer = RowwiseAdagrad([weight])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], **settings})
    assert len(optimizer.param_groups) == 1


def test_parameters_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter of shape \(1,\), but RowwiseAdagrad works on the rows"):
        RowwiseAdagrad(nn.Linear(3, 1).parameters())
    with pytest.raises(TypeError, match=r"parameter of torch\.complex64; give real"):
        RowwiseAdagrad([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    before = module.weight.detach().clone()
    optimizer = RowwiseAdagrad(module.parameters())
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="takes dense ones; make the embedding with sparse=False"):
        optimizer.step()
    assert torch.equal(module.weight, before)


def test_another_optimizers_accumulator_is_not_taken_for_its_own() -> None:
    """Adagrad has a column of the same name, of another width."""
    items = speedswap.Embedding(10, 3)
    speedswap.attach(torch.optim.Adagrad(items.parameters()), items)
    with pytest.raises(OptimizerError, match=r"keeps 'sum' as \(1,\) of torch\.float32 per row, but table"):
        speedswap.attach(RowwiseAdagrad(items.parameters()), items)


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}, {"eps": 0.5}],
    ids=str,
)
def test_steps_are_fbgemms(settings: dict[str, Any]) -> None:
    """Its own embedding on the CPU, with the exact row-wise Adagrad, over random batches with repeated ids."""
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    modes = {"l2": tbe.WeightDecayMode.L2, "decoupled": tbe.WeightDecayMode.DECOUPLE}
    mode = modes[settings.get("weight_decay_mode", "l2")] if settings.get("weight_decay") else tbe.WeightDecayMode.NONE
    theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(40, 8, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=settings.get("eps", 1e-8),
        weight_decay=settings.get("weight_decay", 0.0),
        weight_decay_mode=mode,
        pooling_mode=tbe.PoolingMode.NONE,
    )
    ours = speedswap.Embedding(40, 8, seed=0)
    theirs.split_embedding_weights()[0].detach().copy_(ours.read())
    optimizer = RowwiseAdagrad(ours.parameters(), lr=0.1, **settings)
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids, grad = torch.randint(40, (25,), generator=rng), torch.randn(25, 8, generator=rng)
        theirs(ids, torch.tensor([0, 25])).backward(grad)
        optimizer.zero_grad()
        ours(ids).backward(grad)
        optimizer.step()
    torch.testing.assert_close(ours.read(), theirs.split_embedding_weights()[0].detach(), rtol=1e-5, atol=1e-6)
    sums = theirs.split_optimizer_states()[0][0]
    torch.testing.assert_close(ours.table.read(column="sum")[:, 0], sums.detach().view(-1), rtol=1e-5, atol=1e-6)
