"""Values returned with a loss come back for the whole batch, each sample once and in order."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from splitting import OutOfMemoryBeyond, classifier, gradients, relative_error, same_bits
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.batching import PerSample, Whole
from speedswap.batching.ranks import TrainingRanks
from speedswap.collectives import PeerOutOfMemory
from speedswap.errors import BatchError


def batch(samples: int = 23, device: str = "cpu"):
    return torch.randn(samples, 6, dtype=torch.float64, device=device), torch.randint(4, (samples,), device=device)


@pytest.mark.parametrize("size", [1, 5, 22, 23, "auto"])
def test_logits_of_all_micro_batches_come_back_in_order(device, size):
    """With gradients and loss as without them; the logits keep no graph alive."""
    model, (inputs, targets) = classifier().to(device), batch(device=device)
    expected = model(inputs)
    functional.cross_entropy(expected, targets).backward()
    wanted = gradients(model)
    model.zero_grad()

    def loss_fn(x, y):
        logits = model(x)
        return functional.cross_entropy(logits, y), logits

    loss, logits = speedswap.BatchSplitter(model, micro_batch_size=size).backward(loss_fn, inputs, targets)
    assert torch.allclose(logits, expected, rtol=1e-12)
    assert torch.allclose(loss, functional.cross_entropy(expected, targets), rtol=1e-12)
    assert not logits.requires_grad
    assert relative_error(gradients(model), wanted) <= 1e-12


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_failed_attempts_leave_nothing_in_aux(calls):
    model, (inputs, targets) = classifier(), batch()

    def loss_fn(x, y):
        logits = model(x)
        return functional.cross_entropy(logits, y), {"first": x[:, 0], "index": y}

    limited = OutOfMemoryBeyond(loss_fn, limit=4, calls=calls)
    splitter = speedswap.BatchSplitter(model, check=False)
    splitter.load_state_dict({"micro_batch_size": 8})
    _, aux = splitter.backward(limited, inputs, targets)
    assert torch.equal(aux["first"], inputs[:, 0])
    assert torch.equal(aux["index"], targets)
    assert len(limited.sizes) > 6 + calls


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    values: object
    name: object


@pytest.mark.parametrize(
    "aux_of, expected",
    [
        (lambda x: x, torch.arange(5.0)),
        (lambda x: x.sum(), torch.tensor([3.0, 7.0])),
        (lambda x: float(x.sum()), [3.0, 7.0]),
        (lambda x: None, None),
        (lambda x: "name", ["name", "name"]),
        (lambda x: x.numpy(), np.arange(5.0)),
        (lambda x: [x, x.sum()], [torch.arange(5.0), torch.tensor([3.0, 7.0])]),
        (lambda x: x.tolist(), [0.0, 1.0, 2.0, 3.0, 4.0]),
        (lambda x: ["a"], [["a"], ["a"]]),
        (lambda x: {"a": (x, 3)}, {"a": (torch.arange(5.0), [3, 3])}),
        (lambda x: Pair(x, None), Pair(torch.arange(5.0), None)),
        (lambda x: Record(x, "n"), Record(torch.arange(5.0), ["n", "n"])),
        (lambda x: Whole(x[:2]), [torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0])]),
        (
            lambda x: PerSample([row.expand(int(row) + 1) for row in x]),
            [torch.full((size + 1,), float(size)) for size in range(5)],
        ),
    ],
    ids=[
        "tensor", "0-d", "number", "None", "string", "array", "list of tensors", "list a sample", "list", "nested",
        "named tuple", "dataclass", "Whole", "PerSample",
    ],
)  # fmt: skip
def test_containers_are_joined_as_batches_are_split(aux_of, expected):
    """Five samples, in micro-batches of 3 and 2."""
    weight = torch.ones((), requires_grad=True)
    splitter = speedswap.BatchSplitter(micro_batch_size=3, check=False)
    _, aux = splitter.backward(lambda x: ((x * weight).mean(), aux_of(x)), torch.arange(5.0))
    assert_same(aux, expected)


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


def test_losses_a_sample_have_an_aux_too():
    model, (inputs, targets) = classifier(), batch()

    def loss_fn(x, y):
        logits = model(x)
        return functional.cross_entropy(logits, y, reduction="none"), logits.argmax(1)

    losses, predicted = speedswap.BatchSplitter(model, micro_batch_size=4, reduction="none").backward(
        loss_fn, inputs, targets
    )
    assert losses.shape == predicted.shape == (23,)
    assert torch.equal(predicted, model(inputs).argmax(1))


def test_micro_batches_that_count_nothing_have_an_aux_all_the_same():
    """The second of three has ignored targets only; it is run for its logits, and gives no gradient."""
    model, (inputs, targets) = classifier(), batch(12)
    targets[4:8] = -100
    graphs = []

    def loss_fn(x, y):
        logits = model(x)
        graphs.append((len(x), logits.requires_grad))
        return functional.cross_entropy(logits, y), logits

    splitter = speedswap.BatchSplitter(
        model, micro_batch_size=4, normalizer=lambda x, y: (y != -100).sum(), check=False
    )
    loss, logits = splitter.backward(loss_fn, inputs, targets)
    assert torch.allclose(logits, model(inputs), rtol=1e-12)
    assert torch.allclose(loss, functional.cross_entropy(model(inputs), targets), rtol=1e-12)
    assert graphs == [(4, True), (4, True), (4, False)]
    targets[:] = -100
    loss, logits = splitter.backward(loss_fn, inputs, targets)
    assert loss == 0
    assert torch.allclose(logits, model(inputs), rtol=1e-12)


def test_batch_that_counts_nothing_is_not_run_for_an_aux_that_there_never_is():
    model, (inputs, targets) = classifier(), batch(12)
    calls = []

    def loss_fn(x, y):
        calls.append(len(x))
        return functional.cross_entropy(model(x), y)

    splitter = speedswap.BatchSplitter(
        model, micro_batch_size=6, normalizer=lambda x, y: (y != -100).sum(), check=False
    )
    assert splitter.backward(loss_fn, inputs, torch.full_like(targets, -100)) == 0
    assert calls == [6]
    splitter.backward(loss_fn, inputs, targets)
    del calls[:]
    assert splitter.backward(loss_fn, inputs, torch.full_like(targets, -100)) == 0
    assert calls == []


def test_aux_of_an_attempt_that_another_rank_gave_up_is_released():
    class Aux:
        pass

    class GivesUpOnce(TrainingRanks):
        attempts = 0

        @contextlib.contextmanager
        def attempt(self, size):
            self.attempts += 1
            yield size
            if self.attempts == 1:
                raise PeerOutOfMemory("rank 1 has run out of memory")

    made, alive = [], []

    def loss_fn(x):
        alive.append([reference() is not None for reference in made])
        aux = Aux()
        made.append(weakref.ref(aux))
        return (x * weight).sum(), aux

    weight = torch.ones(3, requires_grad=True)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    splitter._ranks = GivesUpOnce()
    splitter._common = dataclasses.replace(splitter._common, ranks=splitter._ranks)
    _, kept = splitter.backward(loss_fn, torch.ones(4, 3))
    assert alive == [[], [False]]
    assert kept == [made[1]()]
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


def test_views_of_activations_do_not_keep_them():
    """One column of a wide activation, for each micro-batch, is copied."""
    model, (inputs, _) = nn.Linear(6, 1000).double(), batch()
    pieces = []

    def loss_fn(x):
        wide = model(x)
        return wide.square().mean(), Whole(wide[:, 0])

    _, pieces = speedswap.BatchSplitter(model, micro_batch_size=4).backward(loss_fn, inputs)
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [8 * len(piece) for piece in pieces]
    assert sum(map(len, pieces)) == 23


@pytest.mark.parametrize(
    "aux_of, message",
    [
        (lambda x: torch.zeros(len(x), len(x)), r"the result has shapes \(3, 3\), \(2, 2\).*PerSample"),
        (lambda x: 3 if len(x) == 2 else None, "of different types in the micro-batches: NoneType, int"),
        (lambda x: {"a": x} if len(x) == 2 else {"b": x}, "of another structure"),
    ],
    ids=["shapes", "types", "keys"],
)
def test_aux_that_cannot_be_joined_is_an_error_and_undone(aux_of, message):
    weight = torch.ones((), requires_grad=True)
    splitter = speedswap.BatchSplitter(micro_batch_size=3, check=False)
    with pytest.raises(BatchError, match=message):
        splitter.backward(lambda x: ((x * weight).mean(), aux_of(x)), torch.arange(5.0))
    assert weight.grad is None


def test_aux_in_some_micro_batches_alone_is_an_error():
    weight = torch.ones((), requires_grad=True)

    def loss_fn(x):
        loss = (x * weight).mean()
        return (loss, x) if len(x) == 2 else loss

    with pytest.raises(BatchError, match=r"returned \(loss, aux\) for one micro-batch and a loss alone for another"):
        speedswap.BatchSplitter(micro_batch_size=3, check=False).backward(loss_fn, torch.arange(5.0))
    assert weight.grad is None


def test_wrong_loss_beside_an_aux_is_an_error():
    with pytest.raises(BatchError, match=r"returned shape \(4, 3\)"):
        speedswap.BatchSplitter().backward(lambda x: (x, x), torch.ones(4, 3, requires_grad=True))


def test_coupled_loss_may_return_an_aux():
    """It is computed once, over all representations, so it comes back as it is."""
    model, (inputs, _) = classifier(), batch()

    def loss_fn(features):
        scores = features @ features.T
        return scores.logsumexp(1).mean(), {"scores": scores, "temperature": 0.1}

    loss, aux = speedswap.BatchSplitter(model, micro_batch_size=5).backward_coupled(model, loss_fn, inputs)
    expected = model(inputs) @ model(inputs).T
    assert torch.allclose(aux["scores"], expected, rtol=1e-12)
    assert not aux["scores"].requires_grad
    assert aux["temperature"] == 0.1
    assert torch.allclose(loss, expected.logsumexp(1).mean(), rtol=1e-12)


def test_loss_with_an_aux_is_checked():
    model, (inputs, _) = classifier(), batch()

    def loss_fn(x):
        features = model(x)
        return torch.pdist(features).mean(), features

    with pytest.raises(speedswap.errors.CoupledLossError):
        speedswap.BatchSplitter(model, micro_batch_size=8).backward(loss_fn, inputs)


def test_aux_in_half_precision_keeps_its_bits():
    model, inputs = nn.Linear(6, 4).to(torch.bfloat16), torch.randn(8, 6).to(torch.bfloat16)
    given = []

    def loss_fn(x):
        outputs = model(x)
        given.append(outputs.detach().clone())
        return outputs.float().square().mean(), outputs

    _, outputs = speedswap.BatchSplitter(model, micro_batch_size=2, check=False).backward(loss_fn, inputs)
    assert same_bits(list(outputs.split(2)), given)
