"""Micro-batches packed by tokens or cost: what is in them, and the results of the whole batch."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from splitting import gradients, relative_error, same_bits
from torch import Tensor, nn

import speedswap
from speedswap.batching import Batch, Padded, PerSample
from speedswap.batching.packing import SamplePacking
from speedswap.errors import BatchError


def packed(costs: list[int], limit: int) -> list[tuple[list[int], int]]:
    """Return the samples and the cost of each micro-batch."""
    packing = SamplePacking(Batch((torch.arange(len(costs)),)), costs)
    parts = packing.parts(packing.count(limit))
    everything = list(range(len(costs)))
    return [
        (everything[part.samples] if isinstance(part.samples, slice) else part.samples, part.cost) for part in parts
    ]


def least_count(costs: list[int], limit: int) -> int:
    """Return the least number of micro-batches, tried by hand: any subsets of the samples."""
    if not costs:
        return 0
    first, *others = sorted(costs, reverse=True)
    most = max(1, limit // first)
    return 1 + min(
        least_count([cost for place, cost in enumerate(others) if place not in chosen], limit)
        for count in range(min(most, len(costs)))
        for chosen in itertools.combinations(range(len(others)), count)
    )


def test_samples_of_similar_length_share_a_micro_batch():
    assert packed([3, 8, 2, 7, 3, 1], 16) == [([1, 3], 16), ([0, 4, 2, 5], 12)]
    assert packed([3, 8, 2, 7, 3, 1], 48) == [([0, 1, 2, 3, 4, 5], 48)]


def test_a_sample_above_the_limit_is_alone():
    assert packed([3, 100, 2], 6) == [([1], 100), ([0, 2], 6)]


def test_parts_hold_each_sample_once_within_the_limit_and_are_as_few_as_can_be():
    generator = random.Random(0)
    for _ in range(60):
        costs = [generator.randint(1, 9) for _ in range(generator.randint(1, 6))]
        limit = generator.randint(1, 30)
        found = packed(costs, limit)
        assert sorted(sample for samples, _ in found for sample in samples) == list(range(len(costs)))
        for samples, cost in found:
            assert cost == len(samples) * max(costs[sample] for sample in samples)
            assert cost <= limit or len(samples) == 1
        assert len(found) == least_count(costs, limit)


def test_any_number_of_parts_can_be_asked_for():
    packing = SamplePacking(Batch((torch.arange(5),)), [4, 4, 1, 1, 1])
    for count in range(2, 8):
        parts = packing.parts(count)
        assert [part.size for part in parts[5:]] == [0] * max(0, count - 5)
        assert sum(part.size for part in parts) == 5
        assert len(parts) == count


# ---- gradients of the whole batch ------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Attention over tokens, and a score for each token; nothing depends on padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 6)
        self.query, self.out = nn.Linear(6, 6), nn.Linear(6, 5)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden, is_there = self.embed(ids), ids > 0
        attention = (self.query(hidden) @ hidden.transpose(1, 2)).masked_fill(~is_there[:, None], -1e9).softmax(-1)
        return self.out(attention @ hidden)


def text(lengths: list[int], side: str = "right") -> tuple[Tensor, Tensor]:
    """Return ids and targets with padding, 0 and -100."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(max(lengths) - length, None)
        ids[row, where] = torch.randint(1, 20, (length,), generator=generator)
        targets[row, where] = torch.randint(0, 5, (length,), generator=generator)
    return ids, targets


LENGTHS = [3, 11, 2, 7, 7, 1, 12, 5]


def token_loss(model: nn.Module, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction=reduction)


def sample_losses(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none")
    return losses.sum(1) / (targets >= 0).sum(1)


CASES = {
    "mean of tokens": (token_loss, {"normalizer": lambda ids, targets: (targets >= 0).sum()}),
    "sum": (lambda *given: token_loss(*given, reduction="sum"), {"reduction": "sum"}),
    "mean of samples": (lambda *given: sample_losses(*given).mean(), {}),
    "none": (sample_losses, {"reduction": "none"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [1, 13, 24, 40, 1000])
def test_gradients_and_losses_are_those_of_the_whole_batch(case, side, limit):
    loss_fn, options = CASES[case]
    ids, targets = text(LENGTHS, side)
    model = Reader()
    wanted = loss_fn(model, ids, targets)
    wanted.sum().backward()
    expected = gradients(model)
    model.zero_grad()

    widths: list[tuple[int, int]] = []

    def counted(ids: Tensor, targets: Tensor) -> Tensor:
        widths.append(tuple(ids.shape))
        return loss_fn(model, ids, targets)

    splitter = speedswap.BatchSplitter(model, micro_batch_tokens=limit, check=False, **options)
    loss = splitter.backward(counted, Padded(ids, LENGTHS, side), targets=Padded(targets, LENGTHS, side))
    assert relative_error(gradients(model), expected) <= 1e-12
    assert torch.allclose(loss, wanted.detach(), rtol=1e-12)
    for samples, longest in widths:
        assert samples * longest <= limit or samples == 1
    assert sum(samples for samples, _ in widths) == len(LENGTHS)
    assert splitter.micro_batch_size == max(samples * longest for samples, longest in widths)


@pytest.mark.parametrize("form", ["jagged", "per sample"])
def test_lists_are_padded_to_the_longest_of_the_micro_batch_alone(form):
    ids, targets = text(LENGTHS)
    rows = [row[:length] for row, length in zip(ids, LENGTHS, strict=True)]
    labels = [row[:length] for row, length in zip(targets, LENGTHS, strict=True)]
    model = Reader()
    token_loss(model, ids, targets, "sum").backward()
    expected = gradients(model)
    model.zero_grad()
    widths = []

    def loss_fn(lists, labels):
        padded = lists.to_padded_tensor(0) if form == "jagged" else nn.utils.rnn.pad_sequence(lists, batch_first=True)
        widths.append(padded.shape[1])
        targets = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return token_loss(model, padded, targets, "sum")

    lists = torch.nested.as_nested_tensor(rows, layout=torch.jagged) if form == "jagged" else PerSample(rows)
    splitter = speedswap.BatchSplitter(model, micro_batch_tokens=24, reduction="sum", check=False)
    splitter.backward(loss_fn, lists, PerSample(labels))
    assert relative_error(gradients(model), expected) <= 1e-12
    assert widths == [12, 7, 3]


def test_costs_are_any_numbers():
    """By the square of the length, long samples are alone and short ones together."""
    ids, _ = text(LENGTHS)
    sizes = []
    splitter = speedswap.BatchSplitter(
        micro_batch_size=150, cost=lambda ids: ((ids > 0).sum(1) ** 2).double() - 0.5, check=False
    )
    splitter.map(lambda ids: sizes.append(len(ids)), ids)
    assert sizes == [1, 1, 2, 4]


# ---- the order of the samples ----------------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_samples():
    ids, targets = text(LENGTHS)
    model = Reader()

    def loss_fn(ids, targets):
        scores = model(ids)
        aux = {
            "scores": Padded(scores, (ids > 0).sum(1)),
            "first": ids[:, 0],
            "twice": ids[:, 0].repeat_interleave(2),
            "array": ids[:, 0].numpy(),
            "list": ids[:, 0].tolist(),
            "items": PerSample([row[row > 0] for row in ids]),
        }
        return token_loss(model, ids, targets, "sum"), aux

    splitter = speedswap.BatchSplitter(model, micro_batch_tokens=24, reduction="sum", check=False)
    batch = Padded(ids, LENGTHS), Padded(targets, LENGTHS)
    for aux in (splitter.backward(loss_fn, *batch)[1], splitter.map(loss_fn, *batch)[1]):
        assert torch.equal(aux["scores"].lengths, torch.tensor(LENGTHS))
        is_there = (ids > 0)[:, :, None]
        assert torch.allclose(aux["scores"].value * is_there, model(ids).detach() * is_there, atol=1e-12)
        assert torch.equal(aux["first"], ids[:, 0])
        assert torch.equal(aux["twice"], ids[:, 0].repeat_interleave(2))
        assert aux["array"].tolist() == aux["list"] == ids[:, 0].tolist()
        assert [len(item) for item in aux["items"]] == LENGTHS
    with pytest.raises(BatchError, match="were packed in another order"):
        splitter.map(lambda ids, targets: ids[ids > 0], *batch)


def test_jagged_results_are_in_the_order_of_the_samples():
    rows = [torch.arange(float(length)) for length in LENGTHS]
    lists = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = speedswap.BatchSplitter(micro_batch_tokens=12).map(lambda x: x * 2, lists)
    assert all(torch.equal(one, row * 2) for one, row in zip(found.unbind(), rows, strict=True))


@pytest.mark.parametrize("how", ["coupled", "forward"])
def test_losses_that_couple_samples_get_their_order_and_gradients(how):
    ids, _ = text(LENGTHS)
    model = Reader()
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]

    def encode(ids):
        return (model(ids) * (ids > 0)[:, :, None]).sum(1)

    def loss_fn(encoded):
        return ((encoded * weights) @ encoded.T).logsumexp(1).mean()

    wanted = loss_fn(encode(ids))
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    splitter = speedswap.BatchSplitter(model, micro_batch_tokens=24)
    if how == "coupled":
        loss = splitter.backward_coupled(encode, loss_fn, Padded(ids, LENGTHS))
    else:
        loss = loss_fn(splitter.forward(encode, Padded(ids, LENGTHS)))
        loss.backward()
    assert torch.allclose(loss.detach(), wanted.detach(), rtol=1e-12)
    assert relative_error(gradients(model), expected) <= 1e-12


# ---- running out of memory -------------------------------------------------------------------------------------------


def test_a_size_in_tokens_is_found_and_kept():
    """Keep it for batches of other lengths and other padding, too."""
    model, seen = Reader(), []

    def loss_fn(ids, targets):
        seen.append(ids.numel())
        if ids.numel() > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return token_loss(model, ids, targets, "sum")

    splitter = speedswap.BatchSplitter(model, micro_batch_tokens="auto", reduction="sum", check=False)
    for lengths in (LENGTHS, LENGTHS[::-1], [1, 2, 3, 6, 6, 6, 9], LENGTHS):
        ids, targets = text(lengths)
        token_loss(model, ids, targets, "sum").backward()
        expected = gradients(model)
        model.zero_grad()
        splitter.backward(loss_fn, Padded(ids, lengths), Padded(targets, lengths))
        assert relative_error(gradients(model), expected) <= 1e-12
        model.zero_grad()
    assert [tokens for tokens in seen if tokens > 30] == [96, 36]


def test_jagged_batches_are_one_situation():
    """A jagged tensor's shape names its list lengths by a symbol that no other tensor has."""
    seen = []

    def loss_fn(lists):
        seen.append(len(lists.offsets()) - 1)
        if seen[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (lists.values() * weight).sum()

    weight = torch.ones((), requires_grad=True)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    for _ in range(3):
        lists = torch.nested.as_nested_tensor([torch.ones(n) for n in (3, 1, 4, 2)], layout=torch.jagged)
        splitter.backward(loss_fn, lists)
    assert seen == [4, 2, 2, 2, 2, 2, 2]


def test_one_sample_that_does_not_fit_is_not_tried_in_vain():
    def loss_fn(ids):
        seen.append(tuple(ids.shape))
        if ids.shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return ids.sum()

    seen: list[tuple[int, int]] = []
    ids, _ = text(LENGTHS)
    splitter = speedswap.BatchSplitter(micro_batch_tokens="auto", check=False)
    with pytest.raises(torch.OutOfMemoryError):
        splitter.map(loss_fn, Padded(ids, LENGTHS))
    assert seen == [(8, 12), (3, 12), (1, 12)]


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0; it must be at least 1"),
        ({"micro_batch_tokens": 8, "micro_batch_size": 4}, "without micro_batch_size and cost"),
        ({"micro_batch_tokens": 8, "cost": len}, "without micro_batch_size and cost"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(BatchError, match=message):
        speedswap.BatchSplitter(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro_batch_tokens": 8}, "nothing in the batch has samples of different lengths"),
        ({"cost": len}, r"cost\(…\) returned \[3.0\] of shape \(\) for 3 samples"),
        ({"cost": lambda x: -x[:, 0]}, r"returned \[-1.0, -1.0, -1.0\]"),
    ],
)
def test_batches_without_costs_are_errors(options, message):
    with pytest.raises(BatchError, match=message):
        speedswap.BatchSplitter(**options).map(lambda x: x, torch.ones(3, 2))


@pytest.mark.parametrize("given", [([1, 2],), ([1, 2, 4],), ([1, -1, 2],), ([1, 2, 3], "top")])
def test_lengths_that_do_not_match_are_errors(given):
    with pytest.raises(BatchError, match=r"Padded has a value of shape \(3, 3\)"):
        Padded(torch.ones(3, 3), *given)


def test_packed_by_one_limit_for_equal_samples_is_as_by_samples():
    """The bits, too: neighbours share a micro-batch."""
    model = Reader()
    ids, targets = text([4] * 8)
    found = []
    for options in ({"micro_batch_tokens": 8}, {"micro_batch_size": 2}):
        speedswap.BatchSplitter(model, check=False, **options).backward(
            lambda ids, targets: token_loss(model, ids, targets), Padded(ids, [4] * 8), Padded(targets, [4] * 8)
        )
        found.append(gradients(model))
        model.zero_grad()
    assert same_bits(*found)
