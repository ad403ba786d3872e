"""Memory predicted from micro-batches of other sizes, and batches packed by it."""

from __future__ import annotations

import random

import pytest
from splitting import gradients, relative_error
from test_packing import Reader, text, token_loss

import speedswap
from speedswap.batching import Callback, Padded
from speedswap.batching.attempts import BatchAttempts
from speedswap.batching.packing import MemoryModel


@pytest.mark.parametrize(
    "need",
    [
        lambda n, c: 5000 + 300 * n * c,
        lambda n, c: 100 + n * (40 * c + 3 * c * c),
        lambda n, c: 1000 * n,
        lambda n, c: 7 * n * c * c,
    ],
)
def test_the_form_of_growth_is_found(need):
    model = MemoryModel()
    for samples, cost in [(16, 3), (8, 6), (4, 12), (2, 25), (1, 25), (3, 14)]:
        model.add(samples, cost, need(samples, cost))
    for cost in (1, 5, 50, 200):
        most = model.most(cost, nbytes=10**6)
        assert need(most, cost) <= 10**6 < need(int(1.12 * most) + 2, cost)


def test_nothing_is_predicted_from_too_little():
    model = MemoryModel()
    for samples in (1, 2):
        model.add(samples, 10, 1000 * samples)
        assert model.most(10, 10**6) is None


def test_no_prediction_is_below_what_was_seen():
    generator = random.Random(1)
    for _ in range(50):
        model = MemoryModel()
        seen = [(generator.randint(1, 60), generator.randint(1, 60)) for _ in range(6)]
        taken = {one: int(generator.uniform(1, 2) * (1000 + 50 * one[0] * one[1])) for one in seen}
        for (samples, cost), nbytes in taken.items():
            model.add(samples, cost, nbytes)
        kept = {(samples.bit_length(), cost.bit_length()): (samples, cost) for samples, cost in taken}
        for samples, cost in kept.values():
            most = model.most(cost, taken[samples, cost] - 1)
            assert most is None or most < samples


class Failures(Callback):
    """Counts attempts that have run out of memory."""

    def __init__(self) -> None:
        self.count = 0

    def on_out_of_memory(self, event) -> None:
        self.count += 1


def train(batches: list[list[int]], memory: int, *, exact: bool = True) -> list[int]:
    """Return the number of failed attempts at each batch of these lengths."""
    model, failures = Reader(), Failures()
    splitter = speedswap.BatchSplitter(
        model, micro_batch_tokens="auto", memory=memory, reduction="sum", check=False, callbacks=[failures]
    )
    counts = []
    for lengths in batches:
        ids, targets = text(lengths)
        before = failures.count
        splitter.backward(
            lambda ids, targets: token_loss(model, ids, targets, "sum"), Padded(ids, lengths), Padded(targets, lengths)
        )
        counts.append(failures.count - before)
        if exact:
            found = gradients(model)
            model.zero_grad()
            token_loss(model, ids, targets, "sum").backward()
            assert relative_error(found, gradients(model)) <= 1e-11
        model.zero_grad()
    return counts


def drawn(seed: int) -> tuple[list[list[int]], int]:
    """Return the lengths of samples in some batches, short ones first, and a memory in which any single one fits."""
    generator = random.Random(seed)
    longest = sorted(generator.choice([4, 8, 16, 32, 64]) for _ in range(6))
    batches = [[generator.randint(1, most) for _ in range(generator.randint(2, 40))] for most in longest]
    return batches, generator.choice([200_000, 400_000, 800_000])


def test_the_first_large_batch_is_split_before_it_runs_out_of_memory(monkeypatch):
    generator = random.Random(0)
    short = [[generator.randint(1, most) for _ in range(count)] for most, count in [(6, 4), (12, 4), (12, 16), (20, 8)]]
    batches = [*short, [generator.randint(30, 64) for _ in range(40)]]
    assert train(batches, 800_000) == [0] * 5
    monkeypatch.setattr(BatchAttempts, "predict", lambda self: None)
    assert train(batches, 800_000)[-1] >= 2


def compare(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the failures of all runs, with prediction and without, and check each batch's."""
    totals = [0, 0]
    for seed in seeds:
        batches, memory = drawn(seed)
        with_prediction = train(batches, memory)
        with monkeypatch.context() as patch:
            patch.setattr(BatchAttempts, "predict", lambda self: None)
            without = train(batches, memory, exact=False)
        for one, other in zip(with_prediction, without, strict=True):
            assert one <= other + 1, (seed, with_prediction, without)
        totals = [totals[0] + sum(with_prediction), totals[1] + sum(without)]
    return totals[0], totals[1]


def test_no_batch_takes_more_than_one_attempt_more_than_without_prediction(monkeypatch):
    predicted, halved = compare(range(2), monkeypatch)
    assert predicted < halved


@pytest.mark.release
def test_no_batch_takes_more_than_one_attempt_more_than_without_prediction_in_many_runs(monkeypatch):
    predicted, halved = compare(range(2, 400), monkeypatch)
    assert predicted < halved / 2
