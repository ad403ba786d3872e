"""Training through Embedding gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import speedswap

ROWS, DIM = 40, 6
MakeOptimizer = Callable[[Any], Optimizer]


def sgd(**settings: Any) -> MakeOptimizer:
    return lambda params: torch.optim.SGD(params, **{"lr": 0.05, **settings})


def adagrad(**settings: Any) -> MakeOptimizer:
    return lambda params: torch.optim.Adagrad(params, **{"lr": 0.1, **settings})


def make(cls: type[Optimizer], **settings: Any) -> MakeOptimizer:
    return lambda params: cls(params, **settings)


def twins(
    device: str, *, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> tuple[speedswap.Embedding, nn.Embedding]:
    """Return our embedding and torch's, with the same rows."""
    ours = speedswap.Embedding(ROWS, DIM, dtype=dtype, **kwargs).to(device)
    theirs = nn.Embedding(ROWS, DIM, padding_idx=ours.padding_idx, dtype=dtype, device=device)
    theirs.weight.data.copy_(ours.table.read())
    return ours, theirs


def batch(step: int, device: str, *, all_rows: bool = False, size: int = 25) -> tuple[Tensor, Tensor]:
    """Return ids with duplicates, and targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (size,), generator=generator)
    if all_rows:
        ids = torch.cat([torch.arange(ROWS), ids])[torch.randperm(ROWS + size, generator=generator)]
    target = torch.randn(len(ids), DIM, generator=generator, dtype=torch.float64)
    return ids.to(device), target.to(device)


def squared(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).sum()


def train_step(module: nn.Module, optimizer: Optimizer, ids: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = squared(module(ids), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


class RowsAlone:
    """Torch's optimizer applied to the batch's rows alone: what lazy training is by definition.

    Every row has its weight and state in plain tensors; a step makes a parameter of the batch's rows, gives the
    optimizer their state, and puts back what it made of them.
    """

    def __init__(self, weight: Tensor, make_optimizer: MakeOptimizer, device: str) -> None:
        self.weight = weight.clone().to(device)
        self.make_optimizer = make_optimizer
        self.columns: dict[str, Tensor] = {}
        self.scalars: dict[str, Any] = {}
        self.initial: dict[str, float] = {}

    def step(self, ids: Tensor, target: Tensor, initial: dict[str, float]) -> None:
        rows, local = torch.unique(ids, return_inverse=True)
        parameter = nn.Parameter(self.weight[rows].clone())
        optimizer = self.make_optimizer([parameter])
        if self.columns or self.scalars:
            optimizer.state[parameter] = {
                **{k: v.clone() if isinstance(v, Tensor) else v for k, v in self.scalars.items()},
                **{k: v[rows].clone() for k, v in self.columns.items()},
            }
        squared(nn.functional.embedding(local, parameter), target).backward()
        optimizer.step()
        self.weight[rows] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.dim() == 2:
                if key not in self.columns:
                    self.columns[key] = torch.full_like(self.weight, initial.get(key, 0.0))
                self.columns[key][rows] = value
            else:
                self.scalars[key] = value


# ---------------------------------------------------------------------------- against dense torch


@pytest.mark.parametrize("storage", ["pageable", "device"])
@pytest.mark.parametrize(
    ("make_optimizer", "all_rows"),
    [
        pytest.param(sgd(), False, id="sgd"),
        pytest.param(sgd(momentum=0.9), True, id="sgd-momentum"),
        pytest.param(sgd(momentum=0.9, dampening=0.2), True, id="sgd-dampening"),
        pytest.param(sgd(momentum=0.9, nesterov=True), True, id="sgd-nesterov"),
        pytest.param(sgd(momentum=0.9, weight_decay=0.01, foreach=True), True, id="sgd-foreach"),
        pytest.param(adagrad(), False, id="adagrad"),
        pytest.param(adagrad(initial_accumulator_value=0.1), False, id="adagrad-initial"),
        pytest.param(adagrad(lr_decay=0.01, foreach=True), False, id="adagrad-foreach"),
        pytest.param(make(torch.optim.Adam, lr=0.01), True, id="adam-all-rows"),
    ],
)
def test_fifty_steps_equal_dense_torch(
    make_optimizer: MakeOptimizer, all_rows: bool, storage: str, device: str
) -> None:
    ours, theirs = twins(device, storage=storage)
    our_optimizer, their_optimizer = make_optimizer(ours.parameters()), make_optimizer(theirs.parameters())
    for step in range(50):
        ids, target = batch(step, device, all_rows=all_rows)
        our_loss = train_step(ours, our_optimizer, ids, target)
        their_loss = train_step(theirs, their_optimizer, ids, target)
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.table.read(), theirs.weight.detach().cpu(), rtol=1e-12, atol=1e-12)


def test_sgd_is_equal_to_the_last_bit() -> None:
    ours, theirs = twins("cpu")
    optimizers = [sgd()(module.parameters()) for module in (ours, theirs)]
    for step in range(50):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            train_step(module, optimizer, *batch(step, "cpu"))
    assert torch.equal(ours.table.read(), theirs.weight.detach())


# ---------------------------------------------------------------------------- against the rows alone

LAZY = {
    "adam": (make(torch.optim.Adam, lr=0.01), {}),
    "adam-amsgrad": (make(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1), {}),
    "adam-foreach": (make(torch.optim.Adam, lr=0.01, foreach=True), {}),
    "adam-fused": (make(torch.optim.Adam, lr=0.01, fused=True), {}),
    "adamw": (make(torch.optim.AdamW, lr=0.01), {}),
    "adamw-fused": (make(torch.optim.AdamW, lr=0.01, fused=True), {}),
    "nadam": (make(torch.optim.NAdam, lr=0.01), {}),
    "nadam-foreach": (make(torch.optim.NAdam, lr=0.01, foreach=True), {}),
    "radam": (make(torch.optim.RAdam, lr=0.01), {}),
    "radam-foreach": (make(torch.optim.RAdam, lr=0.01, foreach=True), {}),
    "adamax": (make(torch.optim.Adamax, lr=0.01), {}),
    "adamax-foreach": (make(torch.optim.Adamax, lr=0.01, foreach=True), {}),
    "rmsprop": (make(torch.optim.RMSprop, lr=0.01), {}),
    "rmsprop-centered": (make(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9, foreach=True), {}),
    "adadelta": (make(torch.optim.Adadelta, lr=0.5), {}),
    "adadelta-foreach": (make(torch.optim.Adadelta, lr=0.5, foreach=True), {}),
    "rprop": (make(torch.optim.Rprop, lr=0.01), {"step_size": 0.01}),
    "rprop-foreach": (make(torch.optim.Rprop, lr=0.01, foreach=True), {"step_size": 0.01}),
    "asgd": (make(torch.optim.ASGD, lr=0.01), {}),
    "asgd-foreach": (make(torch.optim.ASGD, lr=0.01, foreach=True), {}),
    "sgd-momentum": (sgd(momentum=0.9), {}),
    "sgd-fused": (sgd(momentum=0.9, fused=True), {}),
    "adagrad-fused": (adagrad(fused=True), {}),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("attach_first", [True, False], ids=["attached", "attaches-itself"])
def test_fifty_steps_equal_torch_on_the_rows_alone(name: str, attach_first: bool, device: str) -> None:
    make_optimizer, initial = LAZY[name]
    if name == "adagrad-fused" and device == "cuda":
        pytest.skip("torch has fused Adagrad for the CPU alone")
    ours, _ = twins(device)
    reference = RowsAlone(ours.table.read(), make_optimizer, device)
    optimizer = make_optimizer(ours.parameters())
    if attach_first:
        speedswap.attach(optimizer, ours)
    for step in range(50):
        ids, target = batch(step, device)
        train_step(ours, optimizer, ids, target)
        reference.step(ids, target, initial)
    torch.testing.assert_close(ours.table.read(), reference.weight.cpu(), rtol=1e-12, atol=1e-12)
    for key, value in reference.columns.items():
        torch.testing.assert_close(ours.table.read(column=key), value.cpu(), rtol=1e-12, atol=1e-12)
    assert set(ours.table.columns) == {"weight", *reference.columns}


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("towards", [True, False], ids=["to the device", "from it"])
def test_training_goes_on_where_the_module_is_moved(towards: bool, settings: dict[str, Any], device: str) -> None:
    """The count of steps goes with it where kernels read it, as those of fused optimizers do."""
    places = ("cpu", device) if towards else (device, "cpu")
    tables = []
    for devices in (places, ("cpu", "cpu")):
        items = speedswap.Embedding(ROWS, DIM, seed=3)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.05, **settings)
        for number, place in enumerate(devices):
            items.to(place)
            for step in range(2):
                ids, target = batch(2 * number + step, place)
                train_step(items, optimizer, ids, target.float())
        tables.append(items.table)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(*(table.read(column=name) for table in tables))


def test_weight_and_state_share_one_record_when_attached_first() -> None:
    ours, _ = twins("cpu")
    speedswap.attach(torch.optim.Adam(ours.parameters()), ours)
    assert len(ours.table.store.groups) == 1
    assert list(ours.table.columns) == ["weight", "exp_avg", "exp_avg_sq"]


# ---------------------------------------------------------------------------- what loops do


class TwoTower(nn.Module):
    def __init__(self, embedding: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.users, self.items = embedding(), embedding()
        self.dense = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        out: Tensor = self.dense(self.users(users) * self.items(items)).squeeze(1)
        return out


def two_towers(device: str) -> tuple[TwoTower, TwoTower]:
    ours = TwoTower(lambda: speedswap.Embedding(ROWS, DIM, dtype=torch.float64)).to(device)
    theirs = TwoTower(lambda: nn.Embedding(ROWS, DIM, dtype=torch.float64)).to(device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[key].cpu(), rtol=1e-12, atol=1e-12)


# Steps of a training loop by what they do, and how often, under which optimizer, with which pair of models.
LOOPS: dict[str, tuple[Callable[..., None], int, MakeOptimizer, Callable[[str], Any]]] = {}


def loop(steps: int, make_optimizer: MakeOptimizer, models: Callable[[str], Any] = twins) -> Callable[..., Any]:
    """Let ours and torch's train by a function, which is given a model, its optimizer, ids and targets."""

    def noted(step: Callable[..., None]) -> Callable[..., None]:
        LOOPS[step.__name__] = step, steps, make_optimizer, models
        return step

    return noted


def towers_backward(model, ids, target):
    model.zero_grad()
    squared(model(ids, ids.flip(0)), target[:, 0]).backward()


@loop(20, adagrad(), two_towers)
def two_embeddings_and_dense_layers(model, optimizer, ids, target):
    towers_backward(model, ids, target)
    optimizer.step()


@loop(10, sgd(lr=0.1), two_towers)
def clipping_sees_the_gradient_of_the_batch(model, optimizer, ids, target):
    towers_backward(model, ids, target)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


@loop(20, adagrad())
def two_lookups_in_one_forward(module, optimizer, ids, target):
    optimizer.zero_grad()
    squared(module(ids) * module(ids.flip(0) // 2), target).backward()
    optimizer.step()


@loop(1, sgd(lr=0.1))
def the_same_rows_looked_up_twice(module, optimizer, ids, target):
    squared(module(ids) + module(ids), target).backward()
    optimizer.step()


@loop(5, sgd(lr=0.01))
def without_zero_grad_old_gradients_are_applied_again(module, optimizer, ids, target):
    squared(module(ids), target).backward()
    optimizer.step()


@loop(1, adagrad())
def a_second_step_with_one_gradient(module, optimizer, ids, target):
    squared(module(ids), target).backward()
    optimizer.step()
    optimizer.step()


@loop(1, sgd(lr=0.1))
def backwards_of_a_retained_graph(module, optimizer, ids, target):
    loss = squared(module(ids), target)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


@loop(5, adagrad())
def evaluation_between_backward_and_step(module, optimizer, ids, target):
    optimizer.zero_grad()
    squared(module(ids), target).backward()
    with torch.no_grad():
        module(torch.arange(ROWS, device=ids.device))
    optimizer.step()


@loop(1, sgd(lr=0.1))
def a_checkpointed_forward(module, optimizer, ids, target):
    scale = torch.ones_like(target[0], requires_grad=True)
    squared(checkpoint(lambda ids, scale: module(ids) * scale, ids, scale, use_reentrant=False), target).backward()
    optimizer.step()


@loop(3, adagrad())
def a_batch_of_one_row(module, optimizer, ids, target):
    optimizer.zero_grad()
    module(torch.full_like(ids[:2], 7)).square().sum().backward()
    optimizer.step()


def by_closure(by_name, module, optimizer, ids, target):
    def closure():
        optimizer.zero_grad()
        loss = squared(module(ids), target)
        loss.backward()
        return loss

    assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) > 0


def accumulated(set_to_none, module, optimizer, ids, target):
    for some, wanted in zip(ids.chunk(3), target.chunk(3), strict=True):
        (squared(module(some), wanted) / 3).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def zeroed_first(set_to_none, module, optimizer, ids, target):
    optimizer.zero_grad(set_to_none=set_to_none)
    squared(module(ids), target).backward()
    optimizer.step()


def zeroed_last(set_to_none, module, optimizer, ids, target):
    squared(module(ids), target).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


for step in (by_closure, accumulated, zeroed_first, zeroed_last):
    for is_so in (True, False):
        LOOPS[f"{step.__name__}-{is_so}"] = partial(step, is_so), 10, adagrad(), twins


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_in_torch(name: str, device: str) -> None:
    step, steps, make_optimizer, models = LOOPS[name]
    pair = models(device)
    for model in pair:
        optimizer = make_optimizer(model.parameters())
        for number in range(steps):
            step(model, optimizer, *batch(number, device))
    assert_same(*pair)


def test_parameter_groups_keep_their_own_learning_rate(device: str) -> None:
    models = two_towers(device)
    for model in models:
        groups = [
            {"params": model.users.parameters(), "lr": 0.1},
            {"params": model.items.parameters(), "lr": 0.01},
            {"params": model.dense.parameters()},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        for step in range(20):
            towers_backward(model, *batch(step, device))
            optimizer.step()
            scheduler.step()
    assert_same(*models)


@pytest.mark.parametrize("counts", [True, False])
def test_zeroed_gradients_do_not_touch_rows_outside_the_batch(counts: bool) -> None:
    """Also where the zeros raise no version counter."""
    module, _ = twins("cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train_step(module, optimizer, *batch(0, "cpu"))
    if counts:
        optimizer.zero_grad(set_to_none=False)
    else:
        assert module.weight.grad is not None
        module.weight.grad.data.zero_()
    before = module.table.read()
    ids = torch.tensor([0])
    module(ids).sum().backward()
    optimizer.step()
    changed = (module.table.read() != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("make_optimizer", [sgd(momentum=0.9), make(torch.optim.Adam), make(torch.optim.Adagrad)])
def test_a_gradient_zeroed_in_place_is_no_gradient(make_optimizer: MakeOptimizer) -> None:
    """As after ``set_to_none=True`` in torch, which moves rows by their momentum where the gradient is zeros."""
    ours, theirs = twins("cpu")
    for module, set_to_none in ((ours, False), (theirs, True)):
        optimizer = make_optimizer(module.parameters())
        train_step(module, optimizer, *batch(0, "cpu", all_rows=True))
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        train_step(module, optimizer, *batch(1, "cpu", all_rows=True))
    assert_same(ours, theirs)


def test_a_loss_kept_alive_over_steps_of_other_sizes_can_still_go_backward() -> None:
    module, _ = twins("cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kept = module(torch.tensor([1, 2])).sum()
    for size in (5, 30, 2):
        train_step(module, optimizer, *batch(size, "cpu", size=size))
    before = module.table.read()
    optimizer.zero_grad()
    kept.backward()
    optimizer.step()
    expected = before.clone()
    expected[[1, 2]] -= 0.1
    torch.testing.assert_close(module.table.read(), expected, rtol=1e-12, atol=0)


def test_evaluation_swaps_nothing_out(device: str) -> None:
    module, _ = twins(device)
    optimizer = torch.optim.Adam(module.parameters())
    train_step(module, optimizer, *batch(0, device))
    before = {name: module.table.read(column=name) for name in module.table.columns}
    with torch.no_grad():
        out = module(torch.tensor([[3, 1], [1, 0]], device=device))
    assert torch.equal(out.cpu(), before["weight"][torch.tensor([[3, 1], [1, 0]])])
    module(torch.tensor([3, 1], device=device))  # with a graph, but without a backward pass
    optimizer.zero_grad()
    optimizer.step()
    for name, value in before.items():
        assert torch.equal(module.table.read(column=name), value)


def test_gradient_scaling_unscales_and_a_skipped_step_changes_nothing(device: str) -> None:
    models = twins(device, dtype=torch.float32)
    for module in models:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        for step in range(6):
            ids, target = batch(step, device)
            optimizer.zero_grad()
            loss = squared(module(ids), target.float())
            if step in (0, 3):
                loss = loss * float("inf")
            before = module.table.read() if isinstance(module, speedswap.Embedding) else None
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step in (0, 3) and before is not None:
                assert torch.equal(module.table.read(), before)
    ours, theirs = models
    torch.testing.assert_close(ours.table.read(), theirs.weight.detach().cpu(), rtol=1e-5, atol=1e-6)


def test_autocast_around_the_lookup(device: str) -> None:
    module, _ = twins(device, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    linear = nn.Linear(DIM, 2).to(device)
    before = module.table.read()
    with torch.autocast(device, torch.bfloat16):
        loss = linear(module(torch.tensor([5, 5, 7], device=device))).float().square().sum()
    loss.backward()
    optimizer.step()
    changed = (module.table.read() != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [5, 7]


def test_the_padding_row_is_zero_and_gets_no_gradient(device: str) -> None:
    models = twins(device, padding_idx=3)
    assert torch.equal(models[0].table.read(3, 4), torch.zeros(1, DIM, dtype=torch.float64))
    for module in models:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        for step in range(5):
            ids, target = batch(step, device)
            ids[:4] = 3
            train_step(module, optimizer, ids, target)
    assert_same(*models)
    assert torch.equal(models[0].table.read(3, 4), torch.zeros(1, DIM, dtype=torch.float64))


# Gradients of several items in the memory of one, or of one row in that of many.
EXPANDED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda out: out.sum().backward(),
    "mean": lambda out: out.mean().backward(),
    "sum of items": lambda out: out.sum(-1).square().sum().backward(),
    "expand": lambda out: out[:1].expand(4, *out.shape[1:]).sum().backward(),
    "given": lambda out: out.backward(torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)),
}


@pytest.mark.parametrize("size", [1, 25])
@pytest.mark.parametrize("form", EXPANDED)
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_gradients_without_memory_for_each_item_are_changed_in_place(
    kind: str, form: str, size: int, device: str
) -> None:
    """A padding row's is zeroed, those of two passes are added up, and clipping scales all: as in torch."""
    ours, theirs = twins(device, padding_idx=3)
    if kind == "bags":
        rows = theirs.weight.detach().clone()
        ours = speedswap.EmbeddingBag.from_pretrained(rows.cpu(), freeze=False, padding_idx=3).to(device)
        theirs = nn.EmbeddingBag.from_pretrained(rows, freeze=False, padding_idx=3)
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                ids, _ = batch(2 * step + part, device, size=2 * size)
                ids[0] = 3
                EXPANDED[form](module(ids.view(size, 2)))
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    assert_same(ours, theirs)


def test_ids_of_any_shape_and_both_integer_dtypes(device: str) -> None:
    ours, theirs = twins(device)
    for shape in [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 1, 3)]:
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(ROWS, shape, device=device, dtype=dtype)
            expected = theirs(ids)
            assert torch.equal(ours(ids), expected)
            ours(ids).sum().backward()
            ours.weight.grad = None
