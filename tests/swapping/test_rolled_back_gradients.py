"""Gradients of embeddings are put back exactly where a batch that was split runs out of memory in its middle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedswap
from speedswap.errors import LostUpdateError

ROWS, DIM = 12, 3


class Points:
    """Places in a computation at which memory may run out; one of them, by its number, does."""

    def __init__(self, fails_at: int | None = None, largest: int | None = None) -> None:
        self.passed = 0
        self.fails_at = fails_at
        self.largest = largest

    def __call__(self, *_: Any) -> None:
        self.passed += 1
        if self.passed == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def sized(self, samples: int) -> None:
        if self.largest is not None and samples > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self()


class Net(nn.Module):
    """Lookups of one or two embeddings and a bag, with a dense part; whole numbers throughout, so that sums are exact.

    Without ``points``, the same in plain torch.
    """

    def __init__(self, kinds: str, seed: int, points: Points | None) -> None:
        super().__init__()
        self.points = points
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).double()

        self.parts = nn.ModuleList()
        for kind in kinds:
            rows = numbers(ROWS, DIM)
            package: Any = nn if points is None else speedswap
            if kind == "e":
                self.parts.append(package.Embedding.from_pretrained(rows, freeze=False))
            else:
                self.parts.append(package.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum"))
        self.dense = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.dense.load_state_dict({"weight": numbers(DIM, DIM), "bias": numbers(DIM)})

    def encode(self, ids: Tensor) -> Tensor:
        total = torch.zeros(len(ids), DIM, dtype=torch.float64)
        for part in self.parts:
            if self.points is not None:
                self.points.sized(len(ids))
            found = part(ids)
            found = found if found.dim() == 2 else found.sum(1)
            if self.points is not None and found.requires_grad:
                found.register_hook(self.points)
            total = total + found
        out = self.dense(total)
        if self.points is not None:
            self.points()
        return out

    def loss(self, ids: Tensor) -> Tensor:
        return self.encode(ids).sum() + 2 * self.encode(ids.flip(1)[:, :2]).sum()

    def rows(self) -> list[Tensor]:
        tables = [part.weight.detach() if self.points is None else part.table.read() for part in self.parts]
        return [*tables, self.dense.weight.detach(), self.dense.bias.detach()]


def coupled(encoded: Tensor) -> Tensor:
    return (encoded * encoded.roll(1, 0)).sum()


class Case(NamedTuple):
    """A way to train a batch.

    Attributes:
        kinds: of the lookups: embeddings (e) and bags (b).
        knows_model: whether the splitter is told of the model, or of its dense part alone.
        before: batches whose gradient is there when the batch comes.
        passes: one pass, or the two of a loss that couples its samples.
        largest: samples that always fit.
    """

    kinds: str
    knows_model: str
    before: int
    passes: int
    largest: int
    scaled: bool
    ahead: bool
    seed: int


def cases() -> Iterator[Case]:
    draw = random.Random(11)
    for seed in range(16):
        yield Case(
            draw.choice(["e", "ee", "eb", "b"]),
            draw.choice(["all", "dense", "none"]),
            draw.choice([0, 0, 1, 2]),
            draw.choice([1, 1, 2]),
            draw.choice([3, 4, 8]),
            draw.random() < 0.3,
            draw.random() < 0.3,
            seed,
        )


def batches_of(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + case.seed)
    return [torch.randint(ROWS, (8, 3), generator=generator) for _ in range(case.before + 1)]


def expected_of(case: Case) -> list[Tensor]:
    net = Net(case.kinds, case.seed, None)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    for _ in range(2):
        for ids in batches_of(case):
            (net.loss(ids) if case.passes == 1 else coupled(net.encode(ids))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.rows()


def trained(case: Case, fails_at: int | None) -> tuple[list[Tensor], int]:
    """Return the rows after two windows, and the points passed by the first window's last batch, which fails at one."""
    net = Net(case.kinds, case.seed, Points())
    assert net.points is not None
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if case.scaled else None
    splitter = speedswap.BatchSplitter(
        {"all": net, "dense": net.dense, "none": None}[case.knows_model], reduction="sum", scaler=scaler, check=False
    )
    batches = batches_of(case)
    loader: Any = batches * 2
    if case.ahead:
        loader = speedswap.lookahead(loader, {net.parts[0]: lambda ids: ids})
    passed = 0
    for place, ids in enumerate(loader):
        last = place == len(batches) - 1
        net.points = points = Points(fails_at if last else None, case.largest if last else None)
        if case.passes == 1:
            splitter.backward(net.loss, ids)
        else:
            splitter.backward_coupled(net.encode, coupled, ids)
        if last:
            passed = points.passed
        if (place + 1) % len(batches) == 0:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return net.rows(), passed


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore:SW407")  # parts of a batch are not what a lookahead was told of
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: "-".join(map(str, case)))
def test_running_out_of_memory_at_any_point_trains_as_torch_does(case: Case) -> None:
    """Not one gradient twice, and none lost: the tables are those of nn.Embedding with whole batches, bit for bit."""
    expected = expected_of(case)
    found, passed = trained(case, None)
    assert all(map(torch.equal, found, expected))
    points = range(1, passed + 1)
    for fails_at in random.Random(case.seed).sample(points, min(12, passed)):
        found, _ = trained(case, fails_at)
        assert all(map(torch.equal, found, expected)), fails_at


def test_one_failure_after_a_finished_micro_batch_counts_nothing_twice() -> None:
    """Without a model: the gradient of each row is one."""
    items, calls = speedswap.Embedding(20, 3), []

    def loss(ids: Tensor) -> Tensor:
        calls.append(ids)
        if len(ids) > 4 or len(calls) == 3:
            raise torch.OutOfMemoryError("")
        return items(ids).sum()

    speedswap.BatchSplitter(reduction="sum").backward(loss, torch.arange(8))
    assert len(calls) > 3
    assert torch.equal(items.weight.grad, torch.ones(8, 3))


def failing(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the same loss, with an error in the second micro-batch."""
    calls = []

    def fails(ids: Tensor) -> Tensor:
        calls.append(ids)
        if len(calls) == 2:
            raise RuntimeError("an error of the loss's own")
        return loss(ids)

    return fails


@pytest.mark.parametrize("knows_model", [False, True])
def test_failed_batch_leaves_the_gradient_tensor_that_was_there(knows_model: bool) -> None:
    """With its rows, its values and the optimizer's next step."""
    items = speedswap.Embedding.from_pretrained(torch.zeros(ROWS, DIM), freeze=False)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    items(torch.tensor([1, 5, 5])).sum().backward()
    before = items.weight.grad
    splitter = speedswap.BatchSplitter(items if knows_model else None, micro_batch_size=1, reduction="sum", check=False)
    with pytest.raises(RuntimeError, match="of the loss's own"):
        splitter.backward(failing(lambda ids: items(ids).sum()), torch.tensor([5, 7]))
    assert items.weight.grad is before
    assert torch.equal(before, torch.tensor([[1.0] * DIM, [2.0] * DIM]))
    optimizer.step()
    expected = torch.zeros(ROWS, DIM)
    expected[1], expected[5] = -1, -2
    assert torch.equal(items.table.read(), expected)


def test_failed_batch_after_a_lost_update_is_not_refused_for_ever() -> None:
    """The error says that the gradient is dropped, and dropped it is, though the batch is rolled back."""
    items = speedswap.Embedding(ROWS, DIM)
    splitter = speedswap.BatchSplitter(items, micro_batch_size=2, reduction="sum", check=False)
    dense = nn.Linear(1, 1)
    items(torch.tensor([1])).sum().backward()
    other = torch.optim.SGD(dense.parameters())
    dense(torch.ones(1, 1)).sum().backward()
    other.step()
    with pytest.raises(LostUpdateError, match="in no optimizer"):
        splitter.backward(lambda ids: items(ids).sum(), torch.tensor([3, 4]))
    assert items.weight.grad is None
    splitter.backward(lambda ids: items(ids).sum(), torch.tensor([3, 4]))
    assert torch.equal(items.weight.grad, torch.ones(2, DIM))


@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_in_a_checkpoint_are_rolled_back(reentrant: bool) -> None:
    """They run again in the backward pass, where the loss's graph does not show them."""
    items, calls = speedswap.Embedding(20, 3), []

    def loss(ids: Tensor) -> Tensor:
        calls.append(ids)
        if len(ids) > 4 or len(calls) == 3:
            raise torch.OutOfMemoryError("")
        anchor = torch.ones((), requires_grad=True)
        return checkpoint(lambda one: items(ids).sum() * one, anchor, use_reentrant=reentrant)

    speedswap.BatchSplitter(reduction="sum", check=False).backward(loss, torch.arange(8))
    assert torch.equal(items.weight.grad, torch.ones(8, 3))


@pytest.mark.parametrize("knows_model", [False, True])
def test_half_precision_rows_are_split(knows_model: bool) -> None:
    items = speedswap.Embedding(20, 3, dtype=torch.bfloat16)
    splitter = speedswap.BatchSplitter(items if knows_model else None, micro_batch_size=2, reduction="sum")
    splitter.backward(lambda ids: items(ids).sum(), torch.arange(8))
    assert torch.equal(items.weight.grad, torch.ones(8, 3, dtype=torch.bfloat16))


def test_leaf_outside_the_model_is_put_back_in_every_batch() -> None:
    """Not only in a loss function's first one."""
    model, extra, calls = nn.Linear(3, 1), nn.Parameter(torch.ones(3)), []
    splitter = speedswap.BatchSplitter(model, reduction="sum", check=False)
    nn.init.ones_(model.weight)

    def loss(inputs: Tensor) -> Tensor:
        calls.append(inputs)
        if len(calls) > 1 and (len(inputs) > 4 or len(calls) == 4):
            raise torch.OutOfMemoryError("")
        return model(inputs * extra).sum()

    for _ in range(2):
        extra.grad = None
        splitter.backward(loss, torch.ones(8, 3))
        assert torch.equal(extra.grad, torch.full((3,), 8.0))
    assert len(calls) > 4


@pytest.mark.parametrize("knows_model", [False, True])
def test_activations_of_a_lookup_are_kept_on_the_host(knows_model: bool) -> None:
    """A splitter that asks for the memory of parameters, to leave it where it is, passes a table's over."""
    items = speedswap.Embedding(20, 3)
    splitter = speedswap.BatchSplitter(
        items if knows_model else None, micro_batch_size=2, reduction="sum", offload_activations=True
    )
    splitter.backward(lambda ids: items(ids).square().sum() / 2, torch.arange(4))
    torch.testing.assert_close(items.weight.grad, items.read(torch.arange(4)))
