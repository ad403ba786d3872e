"""The switchers train rows as torch's optimizers would, write the rows they were given, and refuse what is wrong."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import speedswap
from speedswap import ModelFactory, OptimizerFactory
from speedswap.errors import (
    DuplicateRowsWarning,
    IdError,
    LostUpdateError,
    OptimizerError,
    SpeedswapWarning,
    TableFormatError,
)

ROWS, DIM = 40, 6
NO_GPU = "ignore:SW405:speedswap.errors.SpeedswapWarning"


class SkipGram(nn.Module):
    """word2vec with negative sampling; ``other`` comes first, so that the embeddings are not the first parameters."""

    def __init__(self, num_rows: int, dim: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.other = nn.Linear(dim, dim, dtype=dtype)
        self.u_embeddings = nn.Embedding(num_rows, dim, sparse=False, dtype=dtype)
        self.v_embeddings = nn.Embedding(num_rows, dim, sparse=False, dtype=dtype)

    def forward(self, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
        return skip_gram_loss(self.u_embeddings.weight, self.v_embeddings.weight, centres, contexts, negatives)


def skip_gram_loss(u: Tensor, v: Tensor, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
    centre = F.embedding(centres, u)
    positive = (F.embedding(contexts, v) * centre).sum(-1)
    negative = torch.einsum("bd,bnd->bn", centre.flatten(1), F.embedding(negatives, v))
    return -(F.logsigmoid(positive).sum() + F.logsigmoid(-negative).sum())


class RowReference:
    """Plain tensors of all rows; each step, torch's optimizer is applied to a parameter of the batch's rows alone."""

    def __init__(self, weight: Tensor, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.weight = weight.clone()
        self.optimizer, self.options = optimizer, options
        self.columns: dict[str, Tensor] = {}
        self.scalars: dict[str, Any] = {}
        # What torch fills fresh state with; everything else starts at zero.
        self.initial = {"step_size": options.get("lr"), "sum": options.get("initial_accumulator_value", 0.0)}

    def rows(self, ids: Tensor) -> nn.Parameter:
        return nn.Parameter(self.weight[ids])

    def step(self, ids: Tensor, rows: nn.Parameter) -> None:
        optimizer = self.optimizer([rows], **self.options)
        if self.columns:
            optimizer.state[rows] = {**self.scalars, **{name: all_[ids] for name, all_ in self.columns.items()}}
        optimizer.step()
        self.weight[ids] = rows.detach()
        for name, value in optimizer.state[rows].items():
            if isinstance(value, Tensor) and value.shape == rows.shape:
                if name not in self.columns:
                    self.columns[name] = torch.full_like(self.weight, self.initial.get(name, 0.0))
                self.columns[name][ids] = value
            else:
                self.scalars[name] = value


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD with Nesterov momentum and decay": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "RMSprop, centered, with momentum": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    # On a GPU torch takes the steps of all parameters at once by default, with its averages in float32.
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "foreach": False}),
}


def all_rows(num_rows: int = ROWS, dim: int = DIM, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num_rows, dim, dtype=dtype, generator=torch.Generator().manual_seed(7))


def switcher(rows: Tensor, *, device: str = "cpu", **options: Any) -> ModelFactory:
    """Return a switcher over the given rows, for an embedding of three rows."""
    embedding = nn.Embedding(3, rows.shape[1], dtype=rows.dtype).to(device)
    factory = ModelFactory(embedding, len(rows), rows.shape[1], datatype=rows.dtype, **options)
    factory.zerosInit()
    factory.table.write(0, rows)
    return factory


def weight_of(factory: ModelFactory) -> nn.Parameter:
    weight = factory.model_variable.weight
    assert isinstance(weight, nn.Parameter)
    return weight


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_word2vec_trains_as_torch_does_on_the_rows_alone(device: str, name: str) -> None:
    """Two embeddings, one optimizer, static dummy inputs, no duplicates: the SpeedTorch way of training."""
    optimizer_class, options = OPTIMIZERS[name]
    batch, num_negative = 4, 3
    model = SkipGram(2, DIM).to(device)
    optimizer = optimizer_class(model.parameters(), **options)
    u_rows, v_rows = all_rows(), all_rows().flip(0)
    u = ModelFactory(model.u_embeddings, ROWS, DIM, datatype="float64")
    v = ModelFactory(model.v_embeddings, ROWS, DIM, datatype="float64")
    for factory, rows in ((u, u_rows), (v, v_rows)):
        factory.zerosInit()
        factory.table.write(0, rows)
    u_state = OptimizerFactory(optimizer, ROWS, DIM, model, "u_embeddings", dtype="float64")
    v_state = OptimizerFactory(optimizer, ROWS, DIM, model, "v_embeddings", dtype="float64")
    u_state.optInit()
    v_state.optInit()
    centres = torch.as_tensor(u.variableTransformer(batch, 1), device=device)
    contexts, negatives = (torch.as_tensor(a, device=device) for a in v.variableTransformer(batch, 1, num_negative))
    u_reference, v_reference = (RowReference(rows, optimizer_class, options) for rows in (u_rows, v_rows))
    rng = np.random.default_rng(1)

    for _ in range(8):
        u_ids = rng.choice(ROWS, (batch, 1), replace=False)
        v_ids = rng.choice(ROWS, batch * (1 + num_negative), replace=False)
        positive, negative = v_ids[:batch].reshape(batch, 1), v_ids[batch:].reshape(batch, num_negative)
        u.beforeForwardPass(u_ids)
        u_state.beforeForwardPass(u_ids)
        v.beforeForwardPass(positive, negative)
        v_state.beforeForwardPass(positive, negative)
        optimizer.zero_grad()
        loss = model(centres, contexts, negatives)
        loss.backward()
        optimizer.step()
        u.afterOptimizerStep(u_ids)
        u_state.afterOptimizerStep(u_ids)
        v.afterOptimizerStep(positive, negative)
        v_state.afterOptimizerStep(positive, negative)

        ids = (torch.as_tensor(u_ids.reshape(-1)), torch.as_tensor(v_ids))
        parameters = (u_reference.rows(ids[0]), v_reference.rows(ids[1]))
        expected_loss = skip_gram_loss(*parameters, centres.cpu(), contexts.cpu(), negatives.cpu())
        expected_loss.backward()
        u_reference.step(ids[0], parameters[0])
        v_reference.step(ids[1], parameters[1])
        torch.testing.assert_close(loss.detach().cpu(), expected_loss.detach(), rtol=1e-12, atol=1e-12)

    for factory, state, reference in ((u, u_state, u_reference), (v, v_state, v_reference)):
        np.testing.assert_allclose(factory.getNumpyVersion(), reference.weight.numpy(), rtol=1e-10, atol=1e-12)
        found = state.getNumpyVersion()
        assert sorted(found) == sorted(reference.columns)
        for column, values in reference.columns.items():
            np.testing.assert_allclose(found[column], values.numpy(), rtol=1e-10, atol=1e-12, err_msg=column)
    assert not np.allclose(u.getNumpyVersion(), u_rows.numpy())


def test_the_first_step_with_dampening_is_torchs() -> None:
    """SGD takes its first gradient whole as momentum, and only later ones dampened."""
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM, dtype=torch.float64)})
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    weights = ModelFactory(model["words"], ROWS, DIM, datatype="float64")
    weights.zerosInit()
    weights.table.write(0, all_rows())
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words", "float64")
    state.optInit()
    reference = RowReference(all_rows(), torch.optim.SGD, options)
    for ids in (torch.tensor([5, 9]), torch.tensor([9, 5, 30])):
        weights.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        weight_of(weights).square().sum().backward()
        optimizer.step()
        weights.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)
        rows = reference.rows(ids)
        rows.square().sum().backward()
        reference.step(ids, rows)
    np.testing.assert_allclose(weights.getNumpyVersion(), reference.weight.numpy(), rtol=1e-14)


def test_state_is_in_the_optimizer_before_its_first_step(device: str) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)}).to(device)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.25)
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    state.beforeForwardPass([3, 1, 4])
    found = optimizer.state[model["words"].weight]
    assert sorted(found) == ["prev", "step", "step_size"]
    assert float(found["step"]) == 0
    assert torch.equal(found["step_size"], torch.full((3, DIM), 0.25, device=device))
    assert torch.equal(found["prev"], torch.zeros(3, DIM, device=device))


def test_only_the_named_variables_state_is_swapped() -> None:
    model = SkipGram(2, DIM, torch.float32)
    optimizer = torch.optim.Adam(model.parameters())
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "v_embeddings")
    state.optInit()
    state.beforeForwardPass(np.arange(5))
    assert {id(p) for p in optimizer.state} == {id(model.v_embeddings.weight)}


# ---------------------------------------------------------------------- autograd and batch sizes


@pytest.mark.parametrize("keep_losses", [False, True])
def test_batches_may_change_size(device: str, keep_losses: bool) -> None:
    """Also while losses of batches of other sizes are alive, as one kept for a plot is."""
    factory = switcher(all_rows(), device=device)
    embedding, weight = factory.model_variable, weight_of(factory)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    expected = all_rows()
    losses = []
    for ids in ([1], [2, 3, 4], [5, 6], [7, 8], [9, 10, 11, 12], [13]):
        factory.beforeForwardPass(torch.tensor(ids))
        assert weight.shape == (len(ids), DIM)
        positions = torch.as_tensor(factory.variableTransformer(len(ids), 1), device=device)
        loss = embedding(positions).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        factory.afterOptimizerStep(torch.tensor(ids))
        losses.append(loss if keep_losses else loss.detach())
        assert losses[-1].item() == pytest.approx(float(expected[ids].square().sum()))
        expected[ids] -= 0.5 * 2 * expected[ids]
    np.testing.assert_allclose(factory.getNumpyVersion(), expected.numpy(), rtol=1e-14, atol=1e-15)


def test_a_kept_loss_of_another_size_is_what_torch_stumbles_over() -> None:
    """The reason for the test above: re-pointed by hand, the weight refuses the next gradient."""
    weight = nn.Embedding(2, DIM).weight
    kept = F.embedding(torch.arange(2), weight).sum()
    weight.data = torch.zeros(3, DIM)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        F.embedding(torch.arange(3), weight).sum().backward()
    assert kept.requires_grad


def test_a_gradient_that_does_not_fit_the_new_rows_is_dropped() -> None:
    factory = switcher(all_rows())
    weight = weight_of(factory)
    factory.beforeForwardPass([1, 2])
    weight.sum().backward()
    factory.beforeForwardPass([1, 2, 3])
    assert weight.grad is None
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (3, DIM)


@pytest.mark.parametrize("next_ids", [[3, 4], [3, 4, 5]], ids=["same size", "another size"])
def test_a_loss_differentiated_after_its_rows_were_swapped_out_is_refused(next_ids: list[int]) -> None:
    """Its gradient would train other rows."""
    factory = switcher(all_rows())
    factory.beforeForwardPass([1, 2])
    late = factory.model_variable(torch.arange(2)).sum()
    factory.beforeForwardPass(next_ids)
    with pytest.raises(LostUpdateError, match=r"loss.backward\(\) before the next beforeForwardPass"):
        late.backward()
    assert weight_of(factory).grad is None
    factory.model_variable(torch.arange(2)).sum().backward()
    assert weight_of(factory).grad is not None


def test_nothing_is_written_before_afterOptimizerStep() -> None:
    factory = switcher(all_rows())
    factory.beforeForwardPass([1, 2])
    with torch.no_grad():
        weight_of(factory).zero_()
    np.testing.assert_array_equal(factory.getNumpyVersion(), all_rows().numpy())


# ---------------------------------------------------------------------- indexes


class DLPackOnly:
    """An array that speaks nothing but DLPack, as a CuPy array does for torch."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def read_only(ids: list[list[int]]) -> np.ndarray:
    array = np.array(ids)
    array.flags.writeable = False
    return array


IDS = [[5, 0, 39], [12, 7, 8]]
INDEXES = {
    "numpy int64": np.array(IDS),
    "numpy uint32": np.array(IDS, np.uint32),
    "numpy int16": np.array(IDS, np.int16),
    "numpy uint8": np.array(IDS, np.uint8),
    "numpy uint64": np.array(IDS, np.uint64),
    "numpy, big-endian": np.array(IDS, ">i4"),
    "numpy, read-only": read_only(IDS),
    "numpy, backwards": np.array(IDS)[::-1, ::-1][::-1, ::-1],
    "numpy, flat": np.array(IDS).reshape(-1),
    "torch int64": torch.tensor(IDS),
    "torch int32": torch.tensor(IDS, dtype=torch.int32),
    "torch int16": torch.tensor(IDS, dtype=torch.int16),
    "torch uint32": torch.tensor(IDS).to(torch.uint32),
    "torch, not contiguous": torch.tensor(IDS).T.contiguous().T,
    "torch, 3-D": torch.tensor(IDS).view(2, 1, 3),
    "list": IDS,
    "DLPack": DLPackOnly(torch.tensor(IDS, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_of_any_kind(device: str, name: str) -> None:
    factory = switcher(all_rows(), device=device)
    indexes = INDEXES[name]
    factory.beforeForwardPass(indexes)
    flat = np.array(IDS).reshape(-1)
    assert weight_of(factory).device.type == device
    np.testing.assert_array_equal(weight_of(factory).detach().cpu().numpy(), all_rows().numpy()[flat])
    with torch.no_grad():
        weight_of(factory).mul_(2)
    factory.afterOptimizerStep(indexes)
    expected = all_rows().numpy()
    expected[flat] *= 2
    np.testing.assert_array_equal(factory.getNumpyVersion(), expected)


def test_negative_examples_follow_the_positive_ones(device: str) -> None:
    factory = switcher(all_rows(), device=device)
    factory.beforeForwardPass(np.array([[3], [4]], np.uint32), torch.tensor([[9, 8], [7, 6]], dtype=torch.int32))
    rows = weight_of(factory).detach().cpu().numpy()
    np.testing.assert_array_equal(rows, all_rows().numpy()[[3, 4, 9, 8, 7, 6]])


def test_ids_on_the_device_are_as_good(device: str) -> None:
    factory = switcher(all_rows(), device=device)
    factory.beforeForwardPass(torch.tensor([3, 4], device=device), np.array([5]))
    np.testing.assert_array_equal(weight_of(factory).detach().cpu().numpy(), all_rows().numpy()[[3, 4, 5]])


@pytest.mark.parametrize("indexes", [np.array([], np.int64), []], ids=["array", "list"])
def test_an_empty_batch(indexes: Any) -> None:
    factory = switcher(all_rows())
    factory.beforeForwardPass(indexes)
    assert weight_of(factory).shape == (0, DIM)
    factory.afterOptimizerStep(indexes)
    np.testing.assert_array_equal(factory.getNumpyVersion(), all_rows().numpy())


@settings(max_examples=50)
@given(st.lists(st.integers(0, ROWS - 1), max_size=60), st.lists(st.integers(0, ROWS - 1), max_size=20))
def test_the_last_of_equal_indexes_wins(positive: list[int], negative: list[int]) -> None:
    factory = switcher(all_rows())
    factory.beforeForwardPass(positive, negative)
    ids = positive + negative
    np.testing.assert_array_equal(weight_of(factory).detach().numpy(), all_rows().numpy()[ids])
    values = torch.arange(len(ids) * DIM, dtype=torch.float64).view(-1, DIM)
    weight_of(factory).data.copy_(values)
    expected = all_rows().numpy()
    for place, row in enumerate(ids):
        expected[row] = values[place]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        factory.afterOptimizerStep(positive, negative)
    assert [w.category for w in said] == [DuplicateRowsWarning] * (len(set(ids)) < len(ids))
    np.testing.assert_array_equal(factory.getNumpyVersion(), expected)


def test_equal_indexes_are_warned_of_once_for_each_switcher(device: str) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)}).to(device)
    optimizer = torch.optim.Adagrad(model.parameters())
    weights = ModelFactory(model["words"], ROWS, DIM)
    weights.zerosInit()
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    ids = np.array([4, 4, 2, 4])
    said = []
    for _ in range(3):
        weights.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        model["words"](torch.arange(4, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)
        said.append(caught)
    assert [len(caught) for caught in said] == [2, 0, 0]
    for warning in said[0]:
        assert warning.category is DuplicateRowsWarning
        assert "4 indexes" in str(warning.message)
        assert "the other 2 updates are lost" in str(warning.message)
        assert "speedswap.Embedding sums the gradients" in str(warning.message)
        assert warning.filename == __file__
    assert state.getNumpyVersion()["sum"][4].tolist() == [3.0] * DIM
    assert state.getNumpyVersion()["sum"][3].tolist() == [0.0] * DIM


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40, np.uint64(2**63)])
def test_an_index_outside_the_collection_changes_nothing(bad: Any) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM, dtype=torch.float64)})
    weights = ModelFactory(model["words"], ROWS, DIM, datatype="float64")
    weights.zerosInit()
    weights.table.write(0, all_rows())
    state = OptimizerFactory(torch.optim.Adam(model.parameters()), ROWS, DIM, model, "words", "float64")
    state.optInit()
    before = weight_of(weights).detach().clone()
    negative = np.array([[1, bad]], np.uint64 if bad > 2**62 else np.int64)
    for call in (
        weights.beforeForwardPass,
        weights.afterOptimizerStep,
        state.beforeForwardPass,
        state.afterOptimizerStep,
    ):
        with pytest.raises(IdError, match=rf"retrievedNegIndexes: ids\[0, 1\] is .* rows 0 to {ROWS - 1}"):
            call([0], negative)
    assert torch.equal(weight_of(weights), before)
    assert not state.given_optimizer.state
    np.testing.assert_array_equal(weights.getNumpyVersion(), all_rows().numpy())


@pytest.mark.parametrize(
    "indexes", [np.array([1.0]), torch.tensor([0.5]), np.array([True]), torch.tensor([True]), ["a"]]
)
def test_indexes_that_are_no_whole_numbers(indexes: Any) -> None:
    with pytest.raises(TypeError, match=r"retrievedPosIndexes is an array of .*; give whole numbers"):
        switcher(all_rows()).beforeForwardPass(indexes)


def test_other_indexes_than_those_that_were_swapped_in() -> None:
    factory = switcher(all_rows())
    factory.beforeForwardPass([1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(3, 6\), but there are 2 indexes"):
        factory.afterOptimizerStep([1, 2])
    np.testing.assert_array_equal(factory.getNumpyVersion(), all_rows().numpy())


def test_a_swap_before_an_init_method_names_the_init_methods() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    weights = ModelFactory(model["words"], ROWS, DIM)
    state = OptimizerFactory(torch.optim.Adam(model.parameters()), ROWS, DIM, model, "words")
    for call in (weights.beforeForwardPass, weights.afterOptimizerStep):
        with pytest.raises(RuntimeError, match="call zerosInit, uniformDistributionInit, normalDistributionInit"):
            call([0, 1])
    with pytest.raises(RuntimeError, match="call zerosInit"):
        weights.getNumpyVersion()
    with pytest.raises(RuntimeError, match="call optInit"):
        state.beforeForwardPass([0])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"embed_dimension": 5}, ValueError, "embed_dimension is 5, but the weight of model_variable has 6 columns"),
        ({"total_classes": 0}, ValueError, "total_classes is 0; give a whole number of at least 1"),
        ({"total_classes": 2.5}, ValueError, "total_classes is 2.5"),
        ({"embed_dimension": 0}, ValueError, "embed_dimension is 0"),
        ({"datatype": "uint32"}, TypeError, "datatype is 'uint32'; rows are trained"),
        ({"datatype": "no such"}, TypeError, "datatype is 'no such'; give a dtype that torch has"),
        ({"model_variable": nn.ReLU()}, TypeError, "model_variable is a ReLU without a 2-D weight"),
        ({"model_variable": speedswap.Embedding(3, DIM)}, TypeError, "swaps its own rows"),
    ],
)
def test_a_model_factory_checks_its_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given_ = {"model_variable": nn.Embedding(3, DIM), "total_classes": ROWS, "embed_dimension": DIM, **arguments}
    with pytest.raises(error, match=message):
        ModelFactory(**given_)


def test_padding_idx_would_be_a_position_in_the_batch() -> None:
    with pytest.warns(SpeedswapWarning, match="padding_idx 0, which is a position in the batch"):
        ModelFactory(nn.Embedding(3, DIM, padding_idx=0), ROWS, DIM)


def two_level_model() -> nn.Module:
    model = nn.Module()
    model.encoder = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    model.bias = nn.Parameter(torch.zeros(3, DIM))
    return model


@pytest.mark.parametrize("name", ["encoder.words", "encoder.words.weight", "bias"])
def test_a_variable_is_found_by_its_name(name: str) -> None:
    model = two_level_model()
    optimizer = torch.optim.Adam(model.parameters())
    state = OptimizerFactory(optimizer, ROWS, DIM, model, name)
    state.optInit()
    state.beforeForwardPass([1])
    expected = model.bias if name == "bias" else model.encoder["words"].weight
    assert list(optimizer.state) == [expected]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"variable_name": "words"}, ValueError, "variable_name is 'words', but the model has bias, encoder.words"),
        (
            {"embed_dimension": 7},
            ValueError,
            r"embed_dimension is 7, but 'encoder.words' has a weight of shape \(2, 6\)",
        ),
        ({"total_classes": -3}, ValueError, "total_classes is -3"),
        ({"dtype": "int32"}, TypeError, "dtype is 'int32'; rows are trained"),
        ({"given_optimizer": "Adam"}, TypeError, "given_optimizer is a str"),
        (
            {"given_optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(2, DIM))])},
            ValueError,
            "whose weight is not in given_optimizer",
        ),
    ],
)
def test_an_optimizer_factory_checks_its_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = two_level_model()
    given_ = {
        "given_optimizer": torch.optim.Adam(model.parameters()),
        "total_classes": ROWS,
        "embed_dimension": DIM,
        "model": model,
        "variable_name": "encoder.words",
        **arguments,
    }
    with pytest.raises(error, match=message):
        OptimizerFactory(**given_)


def test_a_speedswap_embedding_needs_no_switcher() -> None:
    model = nn.ModuleDict({"words": speedswap.Embedding(ROWS, DIM)})
    with pytest.raises(TypeError, match=r"a speedswap\.Embedding, which keeps its own state"):
        OptimizerFactory(torch.optim.Adam(model.parameters()), ROWS, DIM, model, "words")


def test_optimizers_that_do_not_work_row_by_row_are_refused() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    with pytest.raises(OptimizerError, match=r"use torch\.optim\.Adam"):
        OptimizerFactory(torch.optim.SparseAdam(model.parameters()), ROWS, DIM, model, "words")
    with pytest.raises(OptimizerError, match="mixes rows"):
        OptimizerFactory(torch.optim.Adafactor(model.parameters()), ROWS, DIM, model, "words")


@pytest.mark.parametrize("name", ["Adam", "Rprop", "RMSprop", "NAdam"])
def test_a_switcher_made_after_steps_starts_every_row_afresh(name: str) -> None:
    """Earlier state of a batch's rows belongs to no other row; the optimizer's step count continues."""
    model = nn.ModuleDict({"words": nn.Embedding(3, DIM)})
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5)
    model["words"].weight.pow(3).sum().backward()
    optimizer.step()
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    for column, values in state.getNumpyVersion().items():
        np.testing.assert_array_equal(values, np.full((ROWS, DIM), 0.5 if column == "step_size" else 0.0))
    state.beforeForwardPass([1])
    assert float(optimizer.state[model["words"].weight]["step"]) == 1


class Eager(torch.optim.Optimizer):
    """Makes its state with itself and never again, as Adagrad did in older versions of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                total = self.state[parameter]["sum"]
                total.add_(parameter.grad.square())
                parameter.addcdiv_(parameter.grad, total.sqrt(), value=-0.1)


def test_state_made_with_an_optimizer_is_what_rows_start_with() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(3, DIM)})
    state = OptimizerFactory(Eager(model.parameters()), ROWS, DIM, model, "words")
    state.optInit()
    np.testing.assert_array_equal(state.getNumpyVersion()["sum"], np.full((ROWS, DIM), 0.5))


def test_state_made_with_an_optimizer_is_not_to_be_seen_after_its_first_step() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(3, DIM)})
    optimizer = Eager(model.parameters())
    model["words"].weight.pow(3).sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match="make its OptimizerFactory before its first step"):
        OptimizerFactory(optimizer, ROWS, DIM, model, "words")


class Anchored(torch.optim.Optimizer):
    """Pulls each row back to where it started."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["anchor"] = parameter.detach().clone()
                parameter.add_(parameter.grad + parameter - state["anchor"], alpha=-0.1)


def test_state_that_starts_as_the_weight_is_refused() -> None:
    """The optimizer's switcher does not see the weight's collection."""
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    with pytest.raises(OptimizerError, match="starts its state 'anchor' as a copy of the weight"):
        OptimizerFactory(Anchored(model.parameters()), ROWS, DIM, model, "words")


def test_settings_that_make_an_optimizer_keep_more_state_are_noticed() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.0)
    weights = ModelFactory(model["words"], ROWS, DIM)
    weights.zerosInit()
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words")
    state.optInit()
    weights.beforeForwardPass([1, 2])
    optimizer.state[weight_of(weights)]["momentum_buffer"] = torch.zeros(2, DIM)
    with pytest.raises(OptimizerError, match="keeps momentum_buffer for 'words', which it did not"):
        state.afterOptimizerStep([1, 2])


# ---------------------------------------------------------------------- initial values


def test_zeros_uniform_and_normal() -> None:
    factory = ModelFactory(nn.Embedding(2, 50), 2000, 50)
    factory.zerosInit()
    assert not factory.getNumpyVersion().any()
    factory.uniformDistributionInit(-0.5, 0.25)
    values = factory.getNumpyVersion()
    assert values.dtype == np.float32
    assert -0.5 <= values.min() < -0.499
    assert 0.249 < values.max() < 0.25
    assert values.mean() == pytest.approx(-0.125, abs=0.005)
    factory.normalDistributionInit(2.0, 0.5)
    values = factory.getNumpyVersion()
    assert values.mean() == pytest.approx(2.0, abs=0.01)
    assert values.std() == pytest.approx(0.5, abs=0.01)


def test_the_seed_of_torch_decides_the_values() -> None:
    def drawn(seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
        factory.uniformDistributionInit(-1, 1)
        return factory.getNumpyVersion()

    assert np.array_equal(drawn(1), drawn(1))
    assert not np.array_equal(drawn(1), drawn(2))


def test_a_bad_interval_leaves_the_collection_as_it_was() -> None:
    factory = switcher(all_rows())
    with pytest.raises(ValueError, match="low < high"):
        factory.uniformDistributionInit(1.0, 1.0)
    np.testing.assert_array_equal(factory.getNumpyVersion(), all_rows().numpy())


def test_custom_init_takes_functions_of_torch_and_others() -> None:
    factory = ModelFactory(nn.Embedding(2, 10), 3000, 10)
    factory.customInit(nn.init.xavier_uniform_, 2.0)
    bound = 2.0 * (6.0 / 3010) ** 0.5
    values = factory.getNumpyVersion()
    assert 0.99 * bound < np.abs(values).max() <= bound

    factory.customInit(nn.init.orthogonal_)
    values = factory.getNumpyVersion()
    np.testing.assert_allclose(values.T @ values, np.eye(10), atol=1e-5)

    def count_up(tensor: Tensor, by: int) -> None:
        tensor.copy_(torch.arange(0, tensor.numel() * by, by).view(tensor.shape))

    factory.customInit(count_up, 3)
    np.testing.assert_array_equal(factory.getNumpyVersion(), np.arange(0, 90_000, 3).reshape(3000, 10))


@pytest.mark.parametrize("datatype", ["float64", np.dtype("float16"), np.float32, torch.bfloat16, "bfloat16"])
def test_datatypes(datatype: Any) -> None:
    expected = {"float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
    name = str(datatype).removeprefix("torch.")
    factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, datatype=datatype)
    factory.normalDistributionInit(0, 1)
    factory.beforeForwardPass([3, 2])
    assert weight_of(factory).dtype == expected.get(name, torch.float32)
    np.testing.assert_array_equal(factory.getNumpyVersion()[[3, 2]], weight_of(factory).detach().double().numpy())


# ---------------------------------------------------------------------- where the collection is


def test_no_file_is_written_unless_diskname_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
    factory.uniformDistributionInit(-1, 1)
    assert factory.diskname == "variable"
    assert list(tmp_path.iterdir()) == []
    on_disk = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, "variable")
    assert list(tmp_path.iterdir()) == []
    on_disk.uniformDistributionInit(-1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["variable"]


def test_a_collection_on_disk_can_be_opened_again(tmp_path: Path, device: str) -> None:
    path = tmp_path / "rows"
    factory = switcher(all_rows(), device=device, diskname=str(path))
    factory.beforeForwardPass([4, 2])
    with torch.no_grad():
        weight_of(factory).zero_()
    factory.afterOptimizerStep([4, 2])
    with pytest.raises(FileExistsError, match=r"rows', which exists.*loadCupy opens it"):
        factory.zerosInit()
    factory.table.close()

    expected = all_rows()
    expected[[4, 2]] = 0
    again = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, diskname=path, datatype="float64")
    again.loadCupy(path)
    np.testing.assert_array_equal(again.getNumpyVersion(), expected.numpy())
    again.table.close()
    with speedswap.Table.open(path, "r") as table:
        assert torch.equal(table.read(), expected)
    other = ModelFactory(nn.Embedding(2, DIM), ROWS + 1, DIM, diskname=path, datatype="float64")
    with pytest.raises(ValueError, match="rows, width and dtype"):
        other.loadCupy(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableFormatError):
        again.loadCupy(tmp_path / "empty")


@pytest.mark.filterwarnings(NO_GPU)
def test_where_the_collection_lives(tmp_path: Path) -> None:
    embedding = nn.Embedding(2, DIM)
    storages = {}
    for name, options in {
        "plain": {},
        "pinned": {"CPUPinn": True},
        "file": {"diskname": tmp_path / "rows"},
    }.items():
        factory = ModelFactory(embedding, ROWS, DIM, **options)  # type: ignore[arg-type]
        factory.zerosInit()
        storages[name] = factory.table.storage
    assert storages == {"plain": "device", "pinned": "pinned", "file": "disk"}
    model = nn.ModuleDict({"words": embedding})
    optimizer = torch.optim.Adam(model.parameters())
    for pin, storage in ((False, "device"), (True, "pinned")):
        state = OptimizerFactory(optimizer, ROWS, DIM, model, "words", CPUPinn=pin)
        state.optInit()
        assert state.table.storage == storage
        assert len(state.table.columns) == 2


def test_an_optimizer_without_state_needs_no_collection() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    state = OptimizerFactory(torch.optim.SGD(model.parameters()), ROWS, DIM, model, "words")
    state.optInit()
    state.beforeForwardPass([1])
    state.afterOptimizerStep([1])
    assert state.getNumpyVersion() == {}
    with pytest.raises(IdError):
        state.beforeForwardPass([ROWS])


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["", ".npy"])
@pytest.mark.parametrize("datatype", ["float32", "float64", "bfloat16"])
def test_weights_are_saved_as_numpy_does(tmp_path: Path, ending: str, datatype: str) -> None:
    factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, datatype=datatype)
    factory.normalDistributionInit(0, 1)
    factory.saveCupy(f"{tmp_path}/rows{ending}")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), factory.getNumpyVersion())
    fresh = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, datatype=datatype)
    fresh.loadCupy(f"{tmp_path}/rows{ending}")
    np.testing.assert_array_equal(fresh.getNumpyVersion(), factory.getNumpyVersion())


def test_arrays_of_numpy_can_be_loaded(tmp_path: Path) -> None:
    values = np.asfortranarray(np.random.default_rng(0).normal(size=(ROWS, DIM)))
    np.save(tmp_path / "rows.npy", values)
    factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, datatype="float64")
    factory.loadCupy(tmp_path / "rows.npy")
    np.testing.assert_array_equal(factory.getNumpyVersion(), values)


def files_that_do_not_fit(directory: Path) -> dict[str, tuple[Path, type[Exception], str]]:
    np.save(directory / "shape.npy", np.zeros((ROWS, DIM + 1)))
    np.save(directory / "dtype.npy", np.zeros((ROWS, DIM), np.float32))
    np.save(directory / "pickled.npy", np.array([[{"a": 1}]]), allow_pickle=True)
    np.savez(directory / "several.npz", np.zeros((ROWS, DIM)), np.zeros(3))
    np.save(directory / "short.npy", np.zeros((ROWS, DIM)))
    with open(directory / "short.npy", "r+b") as file:
        file.truncate(200)
    return {
        "shape": (directory / "shape.npy", ValueError, r"shape \(40, 7\), but the collection has \(40, 6\)"),
        "dtype": (directory / "dtype.npy", TypeError, "holds float32, but the collection is saved as float64"),
        "pickled": (directory / "pickled.npy", ValueError, "(?i)python objects|allow_pickle"),
        "several": (directory / "several.npz", ValueError, "holds several arrays"),
        "short": (directory / "short.npy", ValueError, "greater than file size"),
        "missing": (directory / "missing.npy", FileNotFoundError, "missing.npy"),
    }


@pytest.mark.parametrize("problem", ["shape", "dtype", "pickled", "several", "short", "missing"])
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, problem: str) -> None:
    path, error, message = files_that_do_not_fit(tmp_path)[problem]
    factory = switcher(all_rows())
    with pytest.raises(error, match=message):
        factory.loadCupy(path)
    np.testing.assert_array_equal(factory.getNumpyVersion(), all_rows().numpy())
    on_disk = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM, tmp_path / "rows", datatype="float64")
    with pytest.raises(error, match=message):
        on_disk.loadCupy(path)
    assert not (tmp_path / "rows").exists()


def trained(seed: int, steps: int = 3) -> tuple[ModelFactory, OptimizerFactory, Any]:
    """Train a model; return its switchers and a function that does one more step."""
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM, dtype=torch.float64)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weights = ModelFactory(model["words"], ROWS, DIM, datatype="float64")
    weights.zerosInit()
    weights.table.write(0, all_rows())
    state = OptimizerFactory(optimizer, ROWS, DIM, model, "words", "float64")
    state.optInit()
    rng = np.random.default_rng(seed)

    def step() -> None:
        ids = rng.choice(ROWS, 5, replace=False)
        weights.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        optimizer.zero_grad()
        model["words"](torch.arange(5)).pow(4).sum().backward()
        optimizer.step()
        weights.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)

    for _ in range(steps):
        step()
    return weights, state, step


def test_training_goes_on_from_saved_weights_and_state(tmp_path: Path) -> None:
    """The step count is saved too: without it Adam would correct its bias as at the start."""
    weights, state, step = trained(seed=5)
    weights.saveCupy(tmp_path / "weights")
    state.saveCupy(tmp_path / "state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.npz", "weights.npy"]
    with np.load(tmp_path / "state.npz", allow_pickle=False) as saved:
        assert sorted(saved) == ["exp_avg", "exp_avg_sq", "step"]
        assert saved["step"] == 3
        np.testing.assert_array_equal(saved["exp_avg"], state.getNumpyVersion()["exp_avg"])
    np.random.default_rng(5)
    other_weights, other_state, other_step = trained(seed=5, steps=0)
    for _ in range(3):  # the same batches as the other from here on
        other_step()
    other_weights.customInit(nn.init.zeros_)
    other_state.optInit()
    other_weights.loadCupy(tmp_path / "weights.npy")
    del other_state.given_optimizer.state[weight_of(other_weights)]
    other_state.loadCupy(tmp_path / "state")
    for _ in range(2):
        step()
        other_step()
    np.testing.assert_array_equal(other_weights.getNumpyVersion(), weights.getNumpyVersion())
    for name, values in state.getNumpyVersion().items():
        np.testing.assert_array_equal(other_state.getNumpyVersion()[name], values)


@pytest.mark.parametrize("problem", ["missing array", "shape", "dtype", "step", "damaged", "not a zip"])
def test_optimizer_state_that_does_not_fit_changes_nothing(tmp_path: Path, problem: str) -> None:
    _, state, _ = trained(seed=2)
    before = state.getNumpyVersion()
    path = tmp_path / "state.npz"
    good = np.ones((ROWS, DIM))
    messages = {
        "missing array": r"\['exp_avg_sq'\] is needed",
        "shape": "exp_avg_sq in state.npz has shape",
        "dtype": "exp_avg_sq in state.npz holds float32",
        "step": "'step' in .* is an array of float64 and shape \\(2,\\), but a number is needed",
        "damaged": "Bad CRC",
        "not a zip": "is not a .npz file",
    }
    second = {"shape": good[:3], "dtype": good.astype(np.float32)}.get(problem, good)
    np.savez(
        path,
        exp_avg=good,
        **({} if problem == "missing array" else {"exp_avg_sq": second}),
        step=np.ones(2 if problem == "step" else ()),
    )
    if problem == "damaged":
        content = bytearray(path.read_bytes())
        content[content.index(b"exp_avg_sq") + 1000] ^= 1  # in the second array's data
        path.write_bytes(content)
    if problem == "not a zip":
        path.write_bytes(b"no state at all")
    with pytest.raises((ValueError, TypeError), match=messages[problem]):
        state.loadCupy(path)
    for name, values in before.items():
        np.testing.assert_array_equal(state.getNumpyVersion()[name], values)


def test_a_bit_that_flipped_in_a_large_file_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(2, DIM)})
    state = OptimizerFactory(torch.optim.Adam(model.parameters()), 20_000, DIM, model, "words")
    path = tmp_path / "state.npz"
    np.savez(path, exp_avg=np.ones((20_000, DIM), np.float32), exp_avg_sq=np.ones((20_000, DIM), np.float32))
    state.loadCupy(path)
    state.optInit()
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"checksum of exp_avg_sq\.npy does not match"):
        state.loadCupy(path)
    assert not state.getNumpyVersion()["exp_avg"].any()


def test_a_failed_save_leaves_the_file_before(tmp_path: Path) -> None:
    factory = switcher(all_rows())
    factory.saveCupy(tmp_path / "rows.npy")
    factory.table.close()
    with pytest.raises(ValueError, match="closed"):
        factory.saveCupy(tmp_path / "rows.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), all_rows().numpy())


# ---------------------------------------------------------------------- the interface


def test_static_dummy_inputs() -> None:
    factory = ModelFactory(nn.Embedding(2, DIM), ROWS, DIM)
    only = factory.variableTransformer(2, 3)
    assert only.tolist() == [[0, 1, 2], [3, 4, 5]]
    positive, negative = factory.variableTransformer(2, 1, negPerBatch=3)
    assert positive.tolist() == [[0], [1]]
    assert negative.tolist() == [[2, 3, 4], [5, 6, 7]]


def arguments_of(function: Any) -> list[tuple[str, Any]]:
    parameters = list(inspect.signature(function).parameters.values())
    return [(p.name, p.default) for p in parameters if p.name != "self"]


REQUIRED = inspect.Parameter.empty
INDEX_ARGUMENTS = [("retrievedPosIndexes", REQUIRED), ("retrievedNegIndexes", None)]


def test_the_documented_signatures() -> None:
    assert arguments_of(ModelFactory) == [
        ("model_variable", REQUIRED),
        ("total_classes", REQUIRED),
        ("embed_dimension", REQUIRED),
        ("diskname", "variable"),
        ("datatype", "float32"),
        ("CPUPinn", False),
        ("storage", None),
    ]
    assert arguments_of(OptimizerFactory) == [
        ("given_optimizer", REQUIRED),
        ("total_classes", REQUIRED),
        ("embed_dimension", REQUIRED),
        ("model", REQUIRED),
        ("variable_name", REQUIRED),
        ("dtype", "float32"),
        ("CPUPinn", False),
        ("diskname", None),
        ("storage", None),
    ]
    assert arguments_of(ModelFactory.zerosInit) == []
    assert arguments_of(ModelFactory.uniformDistributionInit) == [("low", REQUIRED), ("high", REQUIRED)]
    assert arguments_of(ModelFactory.normalDistributionInit) == [("mean", REQUIRED), ("stdDev", REQUIRED)]
    assert arguments_of(ModelFactory.customInit) == [("initFunction", REQUIRED), ("args", REQUIRED)]
    assert arguments_of(ModelFactory.variableTransformer) == [
        ("batchSize", REQUIRED),
        ("posPerBatch", REQUIRED),
        ("negPerBatch", None),
    ]
    assert arguments_of(OptimizerFactory.optInit) == []
    for factory in (ModelFactory, OptimizerFactory):
        assert arguments_of(factory.beforeForwardPass) == INDEX_ARGUMENTS
        assert arguments_of(factory.afterOptimizerStep) == INDEX_ARGUMENTS
        assert arguments_of(factory.getNumpyVersion) == []
        assert arguments_of(factory.saveCupy) == [("saveFileName", REQUIRED)]
        assert arguments_of(factory.loadCupy) == [("loadFileName", REQUIRED)]
