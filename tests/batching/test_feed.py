"""Samples are read lazily, each once an epoch, within a budget of host memory."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
import weakref
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speedswap
from speedswap.errors import BatchError, MemoryBudgetError

SAMPLE_BYTES = 800_000
NOISE = 80_000  # Python's own objects, far less than one sample


def number(identity):
    return np.array([identity])


def numbers(epoch):
    return [batch[:, 0].tolist() for batch in epoch]


class Files:
    """Readers of large samples, which count what they have read and what is still alive."""

    def __init__(self):
        self.read = Counter()
        self.alive = weakref.WeakSet()

    def __call__(self, identity):
        self.read[identity] += 1
        sample = np.full(SAMPLE_BYTES // 8, float(identity)).view(Watched)
        self.alive.add(sample)
        return sample

    def twice(self, identity):
        for _ in range(2):
            yield self(identity)


class Watched(np.ndarray):
    """An array that can be referred to weakly and hashed."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("epochs", [1, 2, 7])
@pytest.mark.parametrize("batches_in_budget", [1, 4])
def test_p22_resident_memory_is_the_budget_and_one_batch_for_any_number_of_epochs(epochs, batches_in_budget):
    files = Files()
    batch_bytes = 5 * SAMPLE_BYTES
    budget = batches_in_budget * batch_bytes + SAMPLE_BYTES
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for epoch in speedswap.batching.feed(range(60), files, 5, budget_bytes=budget, epochs=epochs):
            for batch in epoch:
                assert batch.nbytes == batch_bytes
        del batch, epoch
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert most <= budget + batch_bytes + NOISE
    assert most > batch_bytes
    assert not files.alive


def test_p22_each_epoch_reads_every_sample_again_once():
    files = Files()
    for index, epoch in enumerate(speedswap.batching.feed(range(13), files, 4, budget_bytes=10**7, epochs=3), start=1):
        seen = [value for batch in epoch for value in batch[:, 0]]
        assert sorted(seen) == list(range(13))
        assert set(files.read.values()) == {index}


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    drop_last=st.booleans(),
    variants=st.sampled_from([None, 1, 2, 3]),
)
def test_p22_no_empty_batch_and_every_sample_once(count, batch_size, drop_last, variants):
    def read(identity):
        return number(identity) if variants is None else [number(identity)] * variants

    batches = speedswap.batching.feed(
        range(count),
        read,
        batch_size,
        budget_bytes=10**5,
        epochs=2,
        drop_last=drop_last,
        variants=variants,
    )
    total = count * (variants or 1)
    for epoch in batches:
        sizes, seen = [], Counter()
        for batch in epoch:
            sizes.append(len(batch))
            seen.update(batch[:, 0].tolist())
        full, rest = divmod(total, batch_size)
        assert sizes == [batch_size] * full + [rest] * (rest > 0 and not drop_last)
        assert len(sizes) == batches.batches_per_epoch
        if not (drop_last and rest):
            assert seen == dict.fromkeys(range(count), variants or 1)
        assert max(seen.values(), default=0) <= (variants or 1)


def test_orders_depend_on_seed_and_epoch_alone():
    def orders(seed):
        feed = speedswap.batching.feed(range(20), number, 3, budget_bytes=10**4, epochs=3, seed=seed)
        return [list(itertools.chain(*numbers(epoch))) for epoch in feed]

    first = orders(1)
    np.random.seed(5)  # noqa: NPY002
    assert orders(1) == first
    assert orders(2) != first
    assert len({tuple(order) for order in first}) == 3


def test_without_shuffling_the_order_is_given():
    feed = speedswap.batching.feed("abc", lambda name: name.upper(), 2, budget_bytes=1000, shuffle=False)
    assert [list(epoch) for epoch in feed] == [[["A", "B"], ["C"]]]


def test_epochs_for_ever():
    feed = speedswap.batching.feed([1, 2], number, 2, budget_bytes=1000, epochs=None)
    assert [sorted(itertools.chain(*numbers(epoch))) for epoch in itertools.islice(feed, 50)] == [[1, 2]] * 50


def test_targets_go_with_their_samples():
    names, labels = [f"{index}.png" for index in range(9)], [f"{index}.txt" for index in range(9)]

    def read(name):
        return torch.tensor([float(name.split(".")[0])])

    feed = speedswap.batching.feed(
        names, read, 4, budget_bytes=1000, targets=labels, read_target=lambda name: int(name.split(".")[0])
    )
    for inputs, targets in feed.epoch(0):
        assert isinstance(inputs, torch.Tensor)
        assert inputs[:, 0].tolist() == targets.tolist()


def test_target_may_be_read_by_the_same_identity():
    feed = speedswap.batching.feed([3, 4], number, 2, budget_bytes=1000, read_target=lambda identity: identity * 10)
    inputs, targets = next(feed.epoch(0))
    assert (inputs[:, 0] * 10 == targets).all()


Point = namedtuple("Point", "x label")


def test_structures_are_stacked_part_by_part():
    def read(identity):
        return Point(torch.full((2,), identity), {"number": 0.5, "flag": True, "name": str(identity), "many": [1]})

    batch = next(speedswap.batching.feed([1, 2], read, 2, budget_bytes=10**4, shuffle=False).epoch(0))
    assert isinstance(batch, Point)
    assert batch.x.tolist() == [[1, 1], [2, 2]]
    assert batch.label["number"].dtype == np.float64
    assert batch.label["flag"].tolist() == [True, True]
    assert batch.label["name"] == ["1", "2"]
    assert batch.label["many"] == [[1], [1]]


def test_own_collate_gets_samples_of_any_shape():
    feed = speedswap.batching.feed(
        [3, 1, 2], np.zeros, 3, budget_bytes=10**4, collate=lambda samples: sorted(len(sample) for sample in samples)
    )
    assert list(feed.epoch(0)) == [[1, 2, 3]]


def test_own_collate_stays_within_the_budget():
    batch_bytes = 5 * SAMPLE_BYTES
    budget = 2 * batch_bytes + SAMPLE_BYTES
    tracemalloc.start()
    try:
        for batch in speedswap.batching.feed(range(30), Files(), 5, budget_bytes=budget, collate=np.stack).epoch(0):
            assert batch.nbytes == batch_bytes
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most <= budget + batch_bytes + NOISE


@pytest.mark.parametrize(
    "budget, batch_size, variants, text",
    [
        (SAMPLE_BYTES - 1, 1, None, rf"budget_bytes is {SAMPLE_BYTES - 1}.*one identity takes {SAMPLE_BYTES}"),
        (2 * SAMPLE_BYTES - 1, 1, 2, f"one identity takes {2 * SAMPLE_BYTES}"),
        (4 * SAMPLE_BYTES, 4, None, f"batch of 4 samples of {SAMPLE_BYTES} bytes takes {5 * SAMPLE_BYTES}"),
    ],
)
def test_budget_too_small_is_said_before_anything_is_handed_out(budget, batch_size, variants, text):
    files = Files()
    feed = speedswap.batching.feed(
        range(10),
        files.twice if variants else files,
        batch_size,
        budget_bytes=budget,
        variants=variants,
    )
    with pytest.raises(MemoryBudgetError, match=text):
        next(feed.epoch(0))
    assert files.read.total() == 1


def test_readers_failure_names_the_identity_and_comes_after_what_was_read_before():
    def read(identity):
        if identity == "c.png":
            raise FileNotFoundError("no such file")
        return 0

    epoch = speedswap.batching.feed(
        ["a.png", "b.png", "c.png", "d.png"], read, 2, budget_bytes=10**4, shuffle=False
    ).epoch(0)
    assert len(next(epoch)) == 2
    with pytest.raises(BatchError, match=r"reading 'c\.png' failed: FileNotFoundError: no such file") as caught:
        next(epoch)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_out_of_memory_in_a_reader_stays_what_it_is():
    def read(identity):
        raise MemoryError

    with pytest.raises(MemoryError):
        next(speedswap.batching.feed([1], read, 1, budget_bytes=100).epoch(0))


@pytest.mark.parametrize("given, text", [(1, "gave 1 samples, but variants is 2"), (3, "gave more samples than 2")])
def test_number_of_variants_is_checked(given, text):
    feed = speedswap.batching.feed(["a"], lambda name: [number(1)] * given, 2, budget_bytes=1000, variants=2)
    with pytest.raises(BatchError, match=rf"reading 'a' {text}"):
        list(feed.epoch(0))


def test_samples_of_different_shapes_are_refused_by_name():
    with pytest.raises(BatchError, match=r"sample 4 has shape \(4,\).*others in its batch shape \(3,\).*collate"):
        next(speedswap.batching.feed([3, 4], np.zeros, 2, budget_bytes=1000, shuffle=False).epoch(0))


@pytest.mark.parametrize("other", [{"b": 1}, (1,), {"a": 1, "b": 1}])
def test_samples_of_different_structures_are_refused_by_name(other):
    samples = {"first": {"a": 1}, "second": other}
    with pytest.raises(BatchError, match="sample 'second' has another structure"):
        next(speedswap.batching.feed(["first", "second"], samples.get, 2, budget_bytes=10**4, shuffle=False).epoch(0))


def test_abandoned_epoch_frees_everything():
    files = Files()
    epoch = speedswap.batching.feed(range(50), files, 2, budget_bytes=20 * SAMPLE_BYTES).epoch(0)
    next(epoch)
    epoch.close()
    gc.collect()
    assert not files.alive


def test_batch_that_was_handed_out_is_its_users_alone():
    def collate(samples):
        return np.stack(samples).view(Watched)

    feed = speedswap.batching.feed(range(50), number, 2, budget_bytes=1000, collate=collate)
    epoch = feed.epoch(0)
    batch = next(epoch)
    alive = weakref.ref(batch)
    del batch
    assert alive() is None
    epoch.close()


def test_own_collate_needs_room_for_samples_and_batch():
    feed = speedswap.batching.feed(range(10), np.float64, 4, budget_bytes=8 * 9 - 1, collate=np.stack)
    with pytest.raises(MemoryBudgetError, match="batch of 4 samples of 8 bytes takes 72"):
        next(feed.epoch(0))


def test_feed_can_be_iterated_again():
    feed = speedswap.batching.feed(range(5), number, 2, budget_bytes=1000, epochs=2)
    first = [numbers(epoch) for epoch in feed]
    assert [numbers(epoch) for epoch in feed] == first


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"identities": []}, "identities is empty"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"budget_bytes": 0}, "budget_bytes is 0"),
        ({"variants": 0}, "variants is 0"),
        ({"targets": [1], "read_target": number}, "1 targets, but 2 identities"),
        ({"targets": [1, 2]}, "read_target is None"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(changes, text):
    files = Files()
    arguments = {"identities": [1, 2], "read": files, "batch_size": 1, "budget_bytes": 10**7} | changes
    with pytest.raises(BatchError, match=text):
        speedswap.batching.feed(**arguments)
    assert not files.read


def test_ten_thousand_batches_need_no_deep_stack():
    limit = sys.getrecursionlimit()
    assert (
        sum(len(batch) for batch in speedswap.batching.feed(range(10_000), number, 1, budget_bytes=1000).epoch(0))
        == 10_000
    )
    assert sys.getrecursionlimit() == limit
