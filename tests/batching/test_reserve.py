"""Sizes that leave room: for the optimizer's first state, for other processes, for whatever else takes memory later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedswap
from speedswap.batching import Callback, LimitedMemory
from speedswap.batching.estimate import Reserve
from speedswap.errors import BatchError


class Failures(Callback):
    """Counts attempts that have run out of memory."""

    def __init__(self) -> None:
        self.count = 0

    def on_out_of_memory(self, event) -> None:
        self.count += 1


def wide() -> nn.Module:
    """Return a model whose activations take more than the optimizer's state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(6)], nn.Linear(64, 1))


def peak_of(size: int) -> int:
    """Return the bytes that a splitter's batch of 64 takes in micro-batches of this size."""
    model = wide()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=size, check=False)
    with LimitedMemory() as counted:
        splitter.backward(lambda x: model(x).square().mean(), torch.ones(64, 8))
    return counted.peak_bytes


def trained(limit: int, shrinks: int = 0, **options) -> tuple[list[int], list[int | None]]:
    """Train three steps on a counted device; return failures and size after each.

    Args:
        limit: bytes of the device beyond model and batch.
        shrinks: bytes that another process takes of it after the first step.
        options: of the splitter.
    """
    model, failures = wide(), Failures()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    if options.pop("knows_optimizer", False):
        options["optimizer"] = optimizer
    splitter = speedswap.BatchSplitter(model, check=False, callbacks=[failures], **options)
    counts, sizes = [], []
    with LimitedMemory(limit) as device:
        for _ in range(3):
            splitter.backward(lambda x: model(x).square().mean(), torch.ones(64, 8))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(failures.count)
            sizes.append(splitter.micro_batch_size)
            device.limit_bytes = limit - shrinks
    return counts, sizes


def test_the_optimizers_first_state_is_part_of_the_trial():
    """Without it the size found first does not fit any more once the state is there."""
    limit = peak_of(32)
    assert trained(limit) == ([1, 2, 2], [32, 16, 16])
    assert trained(limit, knows_optimizer=True) == ([2, 2, 2], [16, 16, 16])


def test_other_processes_may_take_the_reserve():
    state = 2 * sum(parameter.nbytes for parameter in wide().parameters()) + 4 * 4
    limit = peak_of(32) + state
    assert trained(limit, shrinks=2000, knows_optimizer=True) == ([1, 2, 2], [32, 16, 16])
    assert trained(limit, shrinks=2000, knows_optimizer=True, reserve=2000) == ([2, 2, 2], [16, 16, 16])


def test_a_reserve_is_of_the_memory_that_a_call_may_take():
    model = wide()
    for reserve, size in ((None, 32), ("4KB", 16)):
        splitter = speedswap.BatchSplitter(model, memory=peak_of(32), reserve=reserve, check=False)
        splitter.backward(lambda x: model(x).square().mean(), torch.ones(64, 8))
        model.zero_grad()
        assert splitter.micro_batch_size == size


def test_single_samples_leave_nothing():
    """Training with less room to spare is better than none."""
    model = wide()
    splitter = speedswap.BatchSplitter(model, memory=peak_of(1) + 100, reserve="1GiB", check=False)
    splitter.backward(lambda x: model(x).square().mean(), torch.ones(8, 8))
    assert splitter.micro_batch_size == 1


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_room_for_the_state_until_it_is_there(make):
    model = wide()
    optimizer = make(model.parameters(), lr=0.1)
    reserve = Reserve(100, [optimizer])
    expected = reserve.on(torch.device("cpu"))
    if make is torch.optim.Adagrad:  # makes its state at once
        assert expected == 100
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    kept = [one for states in optimizer.state.values() for one in states.values() if isinstance(one, torch.Tensor)]
    state = sum(one.nbytes for one in kept)
    if make is torch.optim.Adam:
        assert expected == 100 + state
        assert reserve.on(torch.device("cpu")) == 100
    if make is torch.optim.SGD:
        assert expected == 100


@pytest.mark.parametrize("reserve", [0, -1, "much"])
def test_a_reserve_that_is_no_amount_is_an_error(reserve):
    with pytest.raises(BatchError, match="reserve is"):
        speedswap.BatchSplitter(reserve=reserve)
