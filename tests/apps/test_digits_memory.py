"""The measured memory of a micro-batch, and what a limit allows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import speedswap
from speedswap.apps.digits import DigitsNet, Images, measure_footprint
from speedswap.batching import Callback, LimitedMemory


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return Images(torch.rand(400, 1, 8, 8, generator=generator), torch.randint(10, (400,), generator=generator))


def test_budget_for_100_samples_lets_100_through_and_not_101(images):
    model = DigitsNet(8)
    footprint = measure_footprint(model, images)
    assert all(parameter.grad is None for parameter in model.parameters())
    memory = LimitedMemory(footprint.bytes_for(100))

    def train(size):
        model.zero_grad()
        splitter = speedswap.BatchSplitter(model, micro_batch_size=size)
        two = images[torch.arange(2 * size)]
        with memory:
            splitter.backward(lambda x, y: F.cross_entropy(model(x), y), two.pixels, two.labels)

    train(100)
    with pytest.raises(torch.OutOfMemoryError):
        train(101)
    train(100)
    memory.limit_bytes = footprint.bytes_for(101)
    train(101)


def test_p17_nothing_of_the_failed_attempt_is_alive_before_the_next_one(images):
    model = DigitsNet(8)
    memory = LimitedMemory(measure_footprint(model, images).bytes_for(100))
    alive = []

    class Look(Callback):
        def before_batch(self, event):
            alive.append(memory.live_bytes)

        def on_out_of_memory(self, event):
            alive.append(memory.live_bytes)

    splitter = speedswap.BatchSplitter(model, callbacks=[Look()])
    with memory:
        splitter.backward(lambda x, y: F.cross_entropy(model(x), y), images.pixels, images.labels)
    assert splitter.micro_batch_size == 100
    assert len(alive) == 5  # 400, out of memory, 200, out of memory, 100
    assert len(set(alive)) == 1


def test_p21_peak_does_not_depend_on_the_batch(images):
    model = DigitsNet(8)
    peaks = {}
    for size in (64, 128, 256):
        model.zero_grad()
        splitter = speedswap.BatchSplitter(model, micro_batch_size=32)
        with LimitedMemory() as memory:
            splitter.backward(lambda x, y: F.cross_entropy(model(x), y), images.pixels[:size], images.labels[:size])
        peaks[size] = memory.peak_bytes
    whole = LimitedMemory()
    model.zero_grad()
    with whole:
        F.cross_entropy(model(images.pixels[:256]), images.labels[:256]).backward()
    assert max(peaks.values()) - min(peaks.values()) <= 4 * 256  # each micro-batch's loss is kept for the sum
    assert max(peaks.values()) < whole.peak_bytes / 4
