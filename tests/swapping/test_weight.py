"""Answers of ``weight``, fills of the table through it, and refusals."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import speedswap
from speedswap.errors import LostUpdateError, SpeedswapWarning, WeightError

ROWS, DIM = 11, 4
Make = Callable[..., speedswap.Embedding | speedswap.EmbeddingBag]


@pytest.fixture(params=[speedswap.Embedding, speedswap.EmbeddingBag], ids=["Embedding", "EmbeddingBag"])
def items(request: pytest.FixtureRequest) -> speedswap.Embedding | speedswap.EmbeddingBag:
    module: speedswap.Embedding | speedswap.EmbeddingBag = request.param(ROWS, DIM, name="items", seed=1)
    return module


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        module(torch.tensor([[1, 3], [3, 5 + step]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------- what is refused

HEAD = nn.Linear(DIM, ROWS, bias=False)
USES: dict[str, Callable[[Any], Any]] = {
    "scores of every item": lambda w: torch.ones(2, DIM) @ w.T,
    "scores, mT": lambda w: torch.ones(2, DIM) @ w.mT,
    "matmul": lambda w: torch.matmul(w, torch.ones(DIM)),
    "a tied head": lambda w: F.linear(torch.ones(2, DIM), w),
    "L2 term": lambda w: w.pow(2).sum(),
    "L2 norm": lambda w: w.norm(),
    "another norm": lambda w: torch.linalg.vector_norm(w),
    "propagation over a graph": lambda w: torch.sparse.mm(torch.eye(ROWS).to_sparse(), w),
    "joined with another": lambda w: torch.cat([w, torch.ones(1, DIM)]),
    "times a number": lambda w: 2 * w,
    "functional lookup": lambda w: F.embedding(torch.tensor([1]), w),
    "rows by a tensor": lambda w: w[torch.tensor([1, 2])],
    "rows by a tuple": lambda w: w[1, 2],
    "index_select": lambda w: w.index_select(0, torch.tensor([1])),
    "a copy": lambda w: w.clone(),
    "detached, to NumPy": lambda w: w.detach().cpu().numpy(),
    "np.asarray": np.asarray,
    "a list": lambda w: w.tolist(),
    "one value": lambda w: w[0].sum(),
    "iterated": list,
    "compared": lambda w: w == w,
    "as a flat vector": lambda w: nn.utils.parameters_to_vector([w]),
    "foreach": lambda w: torch._foreach_norm([w]),
    "an ATen operator": lambda w: torch.ops.aten.sum(w),
    "copied": copy.deepcopy,
    "empty_like": torch.empty_like,
    "a hook on its gradient": lambda w: w.register_hook(print),
    "an optimizer in its backward pass": lambda w: w.register_post_accumulate_grad_hook(print),
    "backward into it": lambda w: torch.ones((), requires_grad=True).backward(inputs=[w]),
    "backward into it, by function": lambda w: torch.autograd.backward(torch.ones((), requires_grad=True), inputs=[w]),
    "a hook of several gradients": lambda w: torch.autograd.graph.register_multi_grad_hook((w,), print),
    "its place in a graph": lambda w: torch.autograd.graph.get_gradient_edge(w),
    "its gradient kept": lambda w: w.retain_grad(),
    "backward from it": lambda w: w.backward(),
    "unused gradients for it": lambda w: torch.autograd.grad(
        torch.ones((), requires_grad=True) * 2, [w], allow_unused=True
    ),
    "gradients for it": lambda w: torch.autograd.grad(torch.ones((), requires_grad=True) * 2, w),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "rows assigned": lambda w: w.data.__setitem__(torch.tensor([1, 2]), 0.0),
    "rows filled": lambda w: w.data.index_fill_(0, torch.tensor([1]), 0.0),
    "copied from": lambda w: torch.empty(ROWS, DIM).copy_(w),
    "an average": lambda w: w.data.lerp_(torch.ones(ROWS, DIM), 0.1),
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "torch.tensor": torch.tensor,
    "torch.as_tensor": lambda w: torch.as_tensor(w, dtype=torch.float64),
    "torch.asarray": lambda w: torch.asarray(w, copy=True),
    "torch.Tensor": torch.Tensor,
    "new_tensor": lambda w: torch.ones(1).new_tensor(w),
    "as_subclass": lambda w: w.as_subclass(Tensor),
    "torch.func.grad": torch.func.grad(lambda w: w.square().sum()),
    "torch.vmap": torch.vmap(lambda row: row.norm()),
    "a parameter of it": nn.Parameter,
    "frozen in another module": nn.Embedding.from_pretrained,
    "a hook on several gradients": lambda w: torch.autograd.graph.register_multi_grad_hook([w], print),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_using_the_weight_as_a_tensor_is_an_error(use: Callable[[Any], Any], items: Any) -> None:
    """Fresh, after a backward pass, and after a step; the table and the training are unchanged."""
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    with pytest.raises(WeightError, match=r"table 'items' \(11 × 4\)"):
        use(items.weight)
    items(torch.tensor([[1, 3]])).sum().backward()
    with pytest.raises(WeightError, match="its rows are not on the device"):
        use(items.weight)
    optimizer.step()
    with pytest.raises(WeightError, match="its rows are not on the device"):
        use(items.weight)
    twin = type(items)(ROWS, DIM, seed=1)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.tensor([[1, 3]])).sum().backward()
    twin_optimizer.step()
    assert torch.equal(items.table.read(), twin.table.read())


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        ("scores of every item", r"embedding\.score\(queries"),
        ("a tied head", r"embedding\.score\(queries"),
        ("rows by a tensor", r"embedding\.read\(ids\) copies these rows, embedding\(ids\) gives them with gradients"),
        ("functional lookup", r"embedding\.read\(ids\) copies these rows, embedding\(ids\) gives them with gradients$"),
        ("index_select", r"embedding\.read\(ids\) copies these rows, embedding\(ids\) gives them with gradients$"),
        ("rows assigned", r"embedding\.table\.scatter\(ids, \{\"weight\": rows\}\) writes these rows"),
        ("rows filled", r"embedding\.table\.scatter\(ids, \{\"weight\": rows\}\) writes these rows"),
        (
            "L2 term",
            r"compute its value from embedding\.read\(\), .* In a loss, .*: no penalty reaches the whole table",
        ),
        (
            "L2 norm",
            r"compute its value from embedding\.read\(\), .* In a loss, .*: no penalty reaches the whole table",
        ),
        ("detached, to NumPy", r"embedding\.read\(\) copies all rows to ordinary memory, .*only some$"),
        ("a list", r"embedding\.read\(\) copies all rows to ordinary memory, .*only some$"),
        ("a copy", r"embedding\.read\(\) copies all rows to ordinary memory, .*; an average of a model"),
        ("copied from", r"embedding\.table\.write\(0, rows\) copies rows in; embedding\.read\(\) copies all"),
        ("an average", r"an average of a model over its steps is speedswap\.optim\.Averaged\(model\)"),
        ("a hook on its gradient", r"it is in no graph; take gradients of embedding\(ids\)"),
        ("times a number", r"compute its value from embedding\.read\(\), .*no penalty reaches the whole table"),
        ("joined with another", r"embedding\.read\(\) is a copy of all rows .*embedding\(ids\) gives rows"),
        ("compared", r"embedding\.read\(\) is a copy of all rows that any function takes"),
        ("orthogonal_", r"torch\.nn\.init\..* call embedding\.reset_parameters\(speedswap\.init\.from_torch"),
        ("eye_", r"torch\.nn\.init\..* call embedding\.reset_parameters\(speedswap\.init\.from_torch"),
        ("torch.tensor", r"embedding\.read\(\) is a copy of all rows that any function takes"),
        ("a parameter of it", r"embedding\.read\(\) is a copy of all rows that any function takes"),
        ("a hook on several gradients", r"torch\.nn\.init\..* A hook goes on what embedding\(ids\) returns"),
    ],
)
def test_the_error_names_what_to_call_instead_first(use: str, remedy: str, items: Any) -> None:
    with pytest.raises(WeightError, match=f"its rows are not on the device: {remedy}"):
        (USES | CHANGES)[use](items.weight)


def test_a_device_without_memory_is_refused(items: Any) -> None:
    """Torch would put another parameter in the weight's place there, and training that has no effect."""
    weight = items.weight
    with pytest.raises(TypeError, match="'items' cannot be looked up on device meta"):
        nn.Sequential(items).to("meta")
    assert items.weight is weight
    train(items, torch.optim.SGD(items.parameters(), lr=0.1))


def test_a_head_tied_to_the_weight_is_an_error_when_it_is_used(items: Any) -> None:
    head = nn.Linear(DIM, ROWS, bias=False)
    head.weight = items.weight
    with pytest.raises(WeightError, match="used in linear"):
        head(torch.ones(2, DIM))


def test_a_weight_cannot_be_assigned(items: Any) -> None:
    """nn.Embedding takes another parameter; here it would be trained, and never looked up."""
    before, weight = items.table.read(), items.weight
    with pytest.raises(WeightError, match=r"cannot be tied to another tensor; copy values with"):
        items.weight = HEAD.weight
    assert items.weight is weight
    assert torch.equal(items.table.read(), before)


# ---------------------------------------------------------------------------- what it answers


def test_what_it_says_of_itself_is_true_of_the_table(items: Any) -> None:
    theirs = nn.Embedding(ROWS, DIM).weight
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    for _ in range(2):
        ours = items.weight
        assert (ours.shape, ours.size(), ours.size(0), ours.size(-1)) == ((ROWS, DIM), (ROWS, DIM), ROWS, DIM)
        assert (len(ours), ours.dim(), ours.ndim, ours.ndimension()) == (ROWS, 2, 2, 2)
        assert (ours.numel(), torch.numel(ours), ours.nelement()) == (ROWS * DIM,) * 3
        assert (ours.nbytes, ours.itemsize, ours.element_size()) == (theirs.nbytes, 4, 4)
        for name in ("dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_sparse"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.is_floating_point(), torch.is_complex(ours)) == (True, False)
        assert isinstance(ours, nn.Parameter)
        assert "11 × 4" in repr(ours)
        assert f"{ours}" == repr(ours)
        train(items, optimizer)


def test_a_models_summary_counts_the_tables_parameters(items: Any) -> None:
    model = nn.Sequential(items, nn.Linear(DIM, 3))
    assert sum(parameter.numel() for parameter in model.parameters()) == ROWS * DIM + 3 * DIM + 3
    assert [tuple(parameter.shape) for _, parameter in model.named_parameters()] == [(ROWS, DIM), (3, DIM), (3,)]


def test_tensors_like_it_have_the_tables_shape_and_the_memory_of_one_value() -> None:
    items = speedswap.Embedding(ROWS, DIM, dtype=torch.float64)
    weight = items.weight
    for ours, value in (
        (torch.zeros_like(weight), 0),
        (torch.ones_like(weight), 1),
        (torch.full_like(weight, 7, memory_format=torch.preserve_format), 7),
    ):
        assert torch.equal(ours, torch.full((ROWS, DIM), value, dtype=torch.float64))
        assert ours.untyped_storage().nbytes() == 8
    assert torch.zeros_like(weight, dtype=torch.int32).dtype == torch.int32


def test_a_gradient_of_zeros_is_no_gradient(items: Any) -> None:
    """As some loops give one to parameters that took no part."""
    before = items.table.read()
    items.weight.grad = torch.zeros_like(items.weight)
    assert items.weight.grad is None
    torch.optim.Adam(items.parameters()).step()
    assert torch.equal(items.table.read(), before)
    with pytest.raises(WeightError, match=r"weight\.grad was set to a tensor of shape \(11, 4\)"):
        items.weight.grad = torch.ones_like(items.weight)


def test_in_a_step_it_is_an_ordinary_parameter_with_the_batchs_rows(items: Any) -> None:
    """So that torch's own code chooses and computes as it does anywhere."""
    seen = []

    class Looking(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            (weight,) = self.param_groups[0]["params"]
            seen.append((type(weight), weight.shape, weight.grad.shape))
            if self is optimizer:  # else a copy that is tried out
                assert torch.equal(items.weight.as_subclass(Tensor), weight)
            return super().step(closure)

    optimizer = Looking(items.parameters(), lr=0.1)
    train(items, optimizer)
    assert seen[-1] == (nn.Parameter, (3, DIM), (3, DIM))
    with pytest.raises(WeightError):
        items.weight.sum()


def test_a_step_that_raises_leaves_a_weight_that_refuses_from_the_next_forward_on(items: Any) -> None:
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if fails:
                self.param_groups[0]["params"][0].add_(1)
                raise KeyError("later")
            return super().step(closure)

    before, fails = items.table.read(), False
    optimizer = Failing(items.parameters(), lr=0.1)
    speedswap.attach(optimizer, items)
    fails = True
    with pytest.raises(KeyError):
        train(items, optimizer)
    items(torch.tensor([[1]]))
    with pytest.raises(WeightError):
        items.weight.sum()
    assert items.weight.shape == (ROWS, DIM)
    assert torch.equal(items.table.read(), before)


def test_a_weight_does_not_keep_its_table_alive() -> None:
    items = speedswap.Embedding(ROWS, DIM)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    table = weakref.ref(items.table)
    del items
    gc.collect()
    assert table() is None
    (weight,) = optimizer.param_groups[0]["params"]
    assert "freed" in repr(weight)
    with pytest.raises(WeightError, match="freed"):
        weight.data.zero_()


# ---------------------------------------------------------------------------- what fills the table

FILLS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(w, mean=1.0, std=0.01),
    "uniform_": lambda w: nn.init.uniform_(w, -2, 2),
    "constant_": lambda w: nn.init.constant_(w, 0.5),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w, gain=2),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, mode="fan_out"),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "data.uniform_": lambda w: w.data.uniform_(-1, 1),
    "data.normal_": lambda w: w.data.normal_(0, 0.02),
    "data.zero_": lambda w: w.data.zero_(),
    "data.fill_": lambda w: w.data.fill_(3),
    "data.copy_": lambda w: w.data.copy_(torch.arange(ROWS * DIM).view(ROWS, DIM)),
    "data =": lambda w: setattr(w, "data", torch.arange(ROWS * DIM).view(ROWS, DIM).float()),
    "detach().fill_": lambda w: w.detach().fill_(2),
    "data.mul_": lambda w: w.data.fill_(3).mul_(0.5).add_(1),
    "data.clamp_": lambda w: w.data.normal_().clamp_(-0.1, 0.1),
    "data *=": lambda w: w.data.fill_(2).__imul__(torch.tensor(1.5)),
    "data[3].zero_": lambda w: w.data.fill_(1)[3].zero_(),
    "data[-1] = 0": lambda w: w.data.fill_(1).__setitem__(-1, 0),
    "data[2] = row": lambda w: w.data.fill_(1).__setitem__(2, torch.arange(4.0)),
    "data[2:5] = rows": lambda w: w.data.fill_(1).__setitem__(slice(2, 5), torch.arange(12.0).view(3, 4)),
    "data[:3].uniform_": lambda w: w.data.zero_()[:3].uniform_(),
    "data[...] = 4": lambda w: w.data.__setitem__(..., 4),
    "data[4:2]": lambda w: w.data.zero_()[4:2].fill_(1),
}


def _with_no_grad(fill: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return torch.no_grad()(lambda weight: fill(weight))


@pytest.mark.parametrize("storage", ["auto", "disk"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS.keys())
def test_filling_the_weight_in_place_fills_the_table(
    fill: Callable[[Tensor], Any], storage: str, tmp_path: Path
) -> None:
    """With the values that torch gives to nn.Embedding, from the same random numbers."""
    theirs = nn.Embedding(ROWS, DIM)
    path = tmp_path / "items" if storage == "disk" else None
    ours = speedswap.Embedding(ROWS, DIM, storage=storage, path=path)
    for weight in (theirs.weight, ours.weight):
        torch.manual_seed(7)
        fill(weight)
    assert torch.equal(ours.table.read(), theirs.weight.detach())
    ours.table.close()


def test_filling_goes_by_chunks_and_converts_to_the_tables_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedswap.init, "CHUNK_ROWS", 3)
    items = speedswap.Embedding(ROWS, DIM, dtype=torch.float64)
    values = torch.arange(ROWS * DIM, dtype=torch.int64).view(ROWS, DIM)
    items.weight.data.copy_(values)
    assert torch.equal(items.table.read(), values.double())
    items.weight.data[1:10].mul_(2)
    values[1:10] *= 2
    assert torch.equal(items.table.read(), values.double())
    nn.init.xavier_uniform_(items.weight)
    bound = (6 / (ROWS + DIM)) ** 0.5
    assert 0.8 * bound < items.table.read().abs().max() <= bound  # fans are the whole table's, not a chunk's


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)
def test_filling_a_compact_table_rounds(stored: torch.dtype) -> None:
    items = speedswap.Embedding.from_pretrained(torch.zeros(ROWS, DIM), stored_dtype=stored)
    items.weight.data.fill_(0.3)
    torch.testing.assert_close(items.table.read(), torch.full((ROWS, DIM), 0.3), rtol=1 / 128, atol=0)


def test_zeros_after_a_step_are_not_lost(items: Any) -> None:
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    train(items, optimizer, steps=2)
    items.weight.data.zero_()
    assert not items.table.read().any()
    train(items, optimizer)


def test_filling_between_backward_and_step_is_what_the_step_starts_from(items: Any) -> None:
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    items(torch.tensor([[1, 2]])).sum().backward()
    grad = items.weight.grad.clone()
    items.weight.data.fill_(1)
    optimizer.step()
    torch.testing.assert_close(items.table.read(1, 3), 1 - 0.1 * grad)
    assert (items.table.read(3) == 1).all()


def test_a_change_in_place_outside_no_grad_is_an_error_as_in_torch(items: Any) -> None:
    before = items.table.read()
    for change in (lambda w: w.uniform_(), lambda w: w.copy_(torch.ones(ROWS, DIM)), lambda w: w.__setitem__(2, 0.0)):
        with pytest.raises(WeightError, match=r"torch\.no_grad\(\), or to weight\.data"):
            change(items.weight)
    assert torch.equal(items.table.read(), before)
    with torch.no_grad():
        items.weight.fill_(2)
    assert (items.table.read() == 2).all()


@pytest.mark.parametrize(
    "fill",
    [nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_],
    ids=["trunc_normal_", "orthogonal_", "eye_"],
)
def test_initializers_that_look_at_the_whole_matrix_are_refused_before_anything_is_drawn(
    fill: Callable[[Tensor], Any], items: Any
) -> None:
    before = items.table.read()
    with pytest.raises(WeightError):
        fill(items.weight)
    assert torch.equal(items.table.read(), before)


def test_an_initializer_that_draws_before_it_looks_is_refused_as_it_looks(items: Any) -> None:
    with pytest.raises(WeightError, match="used in __setitem__"):
        nn.init.sparse_(items.weight, 0.5)


@pytest.mark.parametrize(
    ("fill", "error", "message"),
    [
        (
            lambda w: w.copy_(torch.ones(1, DIM)),
            ValueError,
            r"\(1, 4\) was copied into a weight of shape \(11, 4\)",
        ),
        (lambda w: w.mul_(torch.ones(1, DIM)), WeightError, "used in mul_"),
        (lambda w: w.copy_(w), WeightError, "used in copy_"),
        (lambda w: w.add_(w), WeightError, "used in add_"),
        (lambda w: w[99], IndexError, "index is 99, but the weight has 11 rows"),
        (lambda w: w[3][2], WeightError, "used in __getitem__"),
        (lambda w: w[::2].zero_(), WeightError, "used in __getitem__"),
        (lambda w: w.cumsum_(0), WeightError, "used in cumsum_"),
    ],
)
def test_what_cannot_fill_the_table_leaves_it_as_it_was(
    fill: Callable[[Tensor], Any], error: type[Exception], message: str, items: Any
) -> None:
    before = items.table.read()
    with pytest.raises(error, match=message):
        fill(items.weight.data)
    assert torch.equal(items.table.read(), before)


def test_a_models_own_initialization_reaches_the_table() -> None:
    """The usual function, which asks for nn.Embedding and clears the padding row."""

    def init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    tables = []
    for kind in (speedswap, nn):
        torch.manual_seed(3)
        model = nn.ModuleList(
            [kind.Embedding(ROWS, DIM, padding_idx=2), kind.EmbeddingBag(ROWS, DIM)]  # type: ignore[attr-defined]
        )
        torch.manual_seed(4)
        model.apply(init_weights)
        tables.append([values.clone() for values in model.state_dict().values()])
    assert all(map(torch.equal, *tables))


def test_reset_parameters_gives_the_initial_values_again(items: Any) -> None:
    fresh = items.table.read()
    train(items, torch.optim.SGD(items.parameters(), lr=0.1), steps=2)
    assert not torch.equal(items.table.read(), fresh)
    items.reset_parameters()
    assert torch.equal(items.table.read(), fresh)
    items.reset_parameters(speedswap.init.constant(3))
    assert (items.table.read() == 3).all()
    items.reset_parameters(speedswap.init.from_torch(nn.init.trunc_normal_, std=0.02, a=-0.03, b=0.03))
    assert 0 < items.table.read().abs().max() <= 0.03


def test_reset_parameters_keeps_the_padding_row_and_refuses_to_guess() -> None:
    items = speedswap.Embedding(ROWS, DIM, padding_idx=2)
    items.reset_parameters(nn.init.ones_)
    assert items.table.read().sum(1).tolist() == [4.0, 4.0, 0.0, *[4.0] * 8]
    for module in (
        speedswap.Embedding.from_pretrained(torch.ones(ROWS, DIM)),
        speedswap.Embedding(ROWS, DIM, table=items.table),
    ):
        with pytest.raises(ValueError, match=r"init is None, but the rows of table .* came from"):
            module.reset_parameters()


# ---------------------------------------------------------------------------- copies of models


def test_a_copied_model_trains_as_the_original() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(speedswap.Embedding(ROWS, DIM, padding_idx=2), nn.Linear(DIM, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, steps=2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin[0].weight is twin_optimizer.param_groups[0]["params"][0] is not model[0].weight
    before = model[0].table.read()
    train(twin, twin_optimizer, steps=2)
    assert torch.equal(model[0].table.read(), before)
    train(model, optimizer, steps=2)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    for column in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(model[0].table.read(column=column), twin[0].table.read(column=column))


@pytest.mark.parametrize("copied", ["model first", "optimizer first", "optimizer alone"])
@pytest.mark.parametrize("name", ["Adam", "SGD", "momentum", "Adagrad"])
def test_a_copied_optimizer_has_the_state_of_the_tables_at_once(name: str, copied: str) -> None:
    """As for the best model so far, kept while training goes on, and saved at its end."""
    model = nn.Sequential(speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    settings = {"lr": 0.1, "momentum": 0.9} if name == "momentum" else {"lr": 0.1}
    optimizer = getattr(torch.optim, "SGD" if name == "momentum" else name)(model.parameters(), **settings)
    train(model, optimizer, steps=2)
    expected = copy.deepcopy(optimizer.state_dict())
    if copied == "optimizer alone":
        best = copy.deepcopy(optimizer)
    elif copied == "model first":
        twin, best = copy.deepcopy((model, optimizer))
    else:
        best, twin = copy.deepcopy((optimizer, model))
        assert best.param_groups[0]["params"][0] is twin[0].weight
    best = copy.deepcopy(best) if copied == "optimizer alone" else best
    train(model, optimizer, steps=2)
    found = best.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for place, state in expected["state"].items():
        assert found["state"][place].keys() == state.keys()
        assert all(torch.equal(found["state"][place][key], value) for key, value in state.items() if value is not None)


def test_a_copy_keeps_what_the_module_was_told() -> None:
    items = speedswap.Embedding(ROWS, DIM, padding_idx=2, state_dtype=torch.bfloat16).eval()
    items.weight.requires_grad_(False)
    items.remark = ["mine"]  # type: ignore[assignment]
    twin = copy.deepcopy(items)
    assert (twin.padding_idx, twin.training, twin.weight.requires_grad, twin.remark) == (2, False, False, ["mine"])
    assert twin.remark is not items.remark
    twin.weight.requires_grad_(True)
    train(twin, torch.optim.Adam(twin.parameters()))
    assert twin.table.columns["exp_avg"].stored_dtype == torch.bfloat16
    assert set(items.table.columns) == {"weight"}


def test_a_table_in_files_is_not_copied_implicitly(tmp_path: Path) -> None:
    items = speedswap.Embedding(ROWS, DIM, path=tmp_path / "items")
    with pytest.raises(TypeError, match=r"lies in files.*Table\.save\(path\)"):
        copy.deepcopy(nn.Sequential(items))
    items.table.close()


AVERAGES: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "AveragedModel": lambda twin, model: AveragedModel(model).update_parameters(model),
    "an EMA of torch": lambda twin, model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn()).update_parameters(
        model
    ),
    "lerp": lambda twin, model: twin[0].weight.lerp_(model[0].weight, 0.1),
    "foreach": lambda twin, model: torch._foreach_lerp_([*twin.parameters()], [*model.parameters()], 0.1),
    "a sum": lambda twin, model: twin[0].weight.mul_(0.9).add_(model[0].weight, alpha=0.1),
    "a mean": lambda twin, model: twin[0].weight.copy_(0.9 * twin[0].weight + 0.1 * model[0].weight),
    "a shadow": lambda twin, model: {name: each.data.clone() for name, each in model.named_parameters()},
}


@pytest.mark.parametrize("way", AVERAGES)
def test_averaging_a_model_says_how_to_average_its_dense_part(way: str, tmp_path: Path) -> None:
    model = nn.Sequential(speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    remedy = r"average a module without the embedding, or all parameters but speedswap\.parameters_to_ignore\(model\)"
    with pytest.raises(WeightError, match=remedy), torch.no_grad():
        AVERAGES[way](copy.deepcopy(model), model)
    dense = AveragedModel(model[1])
    dense.update_parameters(model[1])
    assert {*model.parameters()} - speedswap.parameters_to_ignore(model) == {*model[1].parameters()}
    with speedswap.Table.create(ROWS, DIM, path=tmp_path / "items") as table, pytest.raises(TypeError, match=remedy):
        AveragedModel(nn.Sequential(speedswap.Embedding(ROWS, DIM, table=table)))


def test_a_change_of_a_copied_state_dict_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As timm averages models. Rows that are changed and loaded are what was meant."""
    config = speedswap.EmbeddingConfig(name="items", num_embeddings=ROWS, embedding_dim=DIM)
    for items, ids in (
        (speedswap.Embedding(ROWS, DIM, name="items"), torch.tensor([1])),
        (speedswap.EmbeddingCollection([config]), {"items": torch.tensor([1])}),
    ):
        before = next(iter(items.state_dict().values()))
        copied = items.state_dict()
        for values in copied.values():
            values.add_(1)
        items.load_state_dict(copied)
        items(ids)
        monkeypatch.setattr("speedswap._words._said", set())
        average = copy.deepcopy(items)
        for values, newer in zip(average.state_dict().values(), items.state_dict().values(), strict=True):
            values.copy_(0.9 * values + 0.1 * newer)
        items.state_dict()
        with pytest.warns(
            SpeedswapWarning, match=r"^SW402: .* 'items' .* load the state_dict, .* average a module without"
        ):
            average.state_dict()
        assert torch.equal(next(iter(average.state_dict().values())), before + 1)
    items = speedswap.Embedding(ROWS, DIM, name="items")
    items.state_dict()["weight"][3] = 0
    monkeypatch.setattr("speedswap._words._said", set())
    with pytest.warns(SpeedswapWarning, match="^SW402"):
        items(torch.tensor([3]))


# ---------------------------------------------------------------------------- lost updates stay errors


def test_training_whose_weight_is_in_no_optimizer_is_still_an_error(items: Any) -> None:
    head = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head(items(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    with pytest.raises(LostUpdateError, match="in no optimizer"):
        items(torch.tensor([[1, 2]]))


def test_exporting_a_model_with_a_table_is_an_error_of_one_line() -> None:
    model = nn.Sequential(speedswap.Embedding(ROWS, DIM), nn.Linear(DIM, 2)).eval()
    with pytest.raises(WeightError, match=r"^.*export the part of the model that takes embedding\(ids\) as its input$"):
        torch.export.export(model, (torch.tensor([1, 2]),), strict=False)
    torch.export.export(model[1], (model[0](torch.tensor([1, 2])),))


@pytest.mark.parametrize("kind", [speedswap.Embedding, speedswap.EmbeddingBag])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_tracing_a_table_is_an_error(kind: Any, frozen: bool) -> None:
    """A trace would have the rows of its example as constants for all ids."""
    model = nn.Sequential(kind.from_pretrained(torch.ones(ROWS, DIM), freeze=frozen), nn.Linear(DIM, 2)).eval()
    ids = torch.tensor([[1, 2]])
    with pytest.raises(WeightError, match="export the part of the model that takes"), torch.no_grad():
        torch.jit.trace(model, ids, check_trace=False)
    with pytest.raises(WeightError, match="export the part of the model that takes"):
        make_fx(model)(ids)
    torch.jit.trace(model[1], model[0](ids).detach())


@pytest.mark.parametrize("make", [speedswap.Embedding, speedswap.EmbeddingBag])
def test_a_table_is_not_shared_between_processes(make: Any) -> None:
    """A forked process would train its own copy of the rows, where torch shares them."""
    model = nn.Sequential(make(ROWS, DIM), nn.Linear(DIM, 1))
    with pytest.raises(TypeError, match=r"cannot be shared between processes.*with storage=speedswap.Ranks"):
        model.share_memory()
    model[1].share_memory()
