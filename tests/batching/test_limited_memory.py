"""Memory with a limit: its counts, one tensor too many wherever it is made, and a splitter that stays below it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import classifier, gradients, relative_error
from torch import Tensor, nn

import speedswap
from speedswap.batching import Callback, LimitedMemory
from speedswap.batching.memory import limited
from speedswap.errors import BatchError


def test_counts_what_is_alive_and_the_most_that_was(device):
    memory = LimitedMemory()
    outside = torch.ones(1000, device=device)
    with memory:
        first = torch.ones(10, device=device)
        second = torch.ones(5, dtype=torch.float64, device=device)
        del second
        third = torch.zeros(3, device=device)
    assert outside.numel() == 1000
    assert memory.live_bytes == first.nbytes + third.nbytes == 52
    assert memory.peak_bytes == 80
    memory.reset_peak()
    assert memory.peak_bytes == 52
    del first, third  # outside of it, which counts all the same
    assert memory.live_bytes == 0


def test_views_and_writes_in_place_are_no_new_memory(device):
    outside = torch.ones(6, 4, device=device)
    memory = LimitedMemory()
    with memory:
        kept = [outside.T, outside[2:], outside.add_(1), outside.view(24).unsqueeze(0), outside.detach()]
        assert memory.live_bytes == 0
        made = outside * 2
        kept += [made.T, made[1:], made.mul_(3)]
        assert memory.live_bytes == made.nbytes == 96


def test_backward_pass_is_counted_and_limited(device):
    x = torch.randn(1000, device=device, requires_grad=True)

    def loss():
        return x.relu().square().relu().sum()

    memory = LimitedMemory()
    with memory:
        forward = loss()
        before = memory.peak_bytes
        forward.backward()
    assert memory.peak_bytes > before
    needed, x.grad = memory.peak_bytes, None
    del forward
    assert memory.live_bytes == 0

    with LimitedMemory(needed):
        loss().backward()
    x.grad = None
    with pytest.raises(torch.OutOfMemoryError, match=f"the limit is {needed - 1:,}"), LimitedMemory(needed - 1):
        loss().backward()


def test_what_did_not_fit_is_not_counted():
    memory = LimitedMemory(1000)
    with memory:
        kept = torch.ones(100)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="604 bytes more would make it 1,004"):
                torch.ones(151)
        again = torch.ones(150)
    assert memory.live_bytes == memory.peak_bytes == kept.nbytes + again.nbytes == 1000


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x @ x.T,
        lambda x: torch.cat([x, x, x, x]),
        lambda x: F.conv2d(x.view(1, 1, 30, 30), torch.ones(9, 1, 3, 3)),
        lambda x: torch.zeros(3600),
        lambda x: torch.rand(60, 60),
        lambda x: x[:, :, None].expand(30, 30, 4).contiguous(),
    ],
)
def test_an_operation_whose_results_will_not_fit_does_not_begin(make: Any) -> None:
    """Nothing of its results is ever made, nor a random number drawn; views and values in place need nothing."""
    memory, outer = LimitedMemory(limit_bytes=3200), LimitedMemory()
    memory.looks_ahead = True
    x = torch.ones(30, 30)
    random = torch.get_rng_state()
    with outer, memory:
        assert x.add_(1).view(-1, 10).T.detach().sum() == 1800
        outer.reset_peak()
        with pytest.raises(torch.OutOfMemoryError, match="the limit is 3,200"):
            make(x)
    assert outer.peak_bytes < 500  # the filter of the convolution
    assert torch.equal(torch.get_rng_state(), random)


def test_results_whose_shape_depends_on_values_are_counted_when_they_are_there() -> None:
    memory = LimitedMemory(limit_bytes=800)
    memory.looks_ahead = True
    with memory:
        assert len(torch.arange(50).nonzero()) == 49
        with pytest.raises(torch.OutOfMemoryError, match="480 bytes more would make it 960"):
            torch.arange(1, 61).nonzero()


def test_trained_results_are_the_same_when_looking_ahead() -> None:
    results = []
    for looks_ahead in (False, True):
        torch.manual_seed(3)
        memory = LimitedMemory()
        memory.looks_ahead = looks_ahead
        model = classifier(torch.float32, dropout=0.5)
        with memory:
            model(torch.rand(40, 6)).square().mean().backward()
        results.append([memory.peak_bytes, *[grad.tolist() for grad in gradients(model)], torch.rand(1).item()])
    assert results[0] == results[1]


# ---- a splitter's limit ----------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 4)).double()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator, dtype=torch.float64), torch.randint(
        4, (size,), generator=generator
    )


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("memory", [2**20, "1MiB"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_splitter_stays_below_its_memory(named: bool, memory: int | str, earlier: bool) -> None:
    """At every moment of its first batch, attempts that fail included; earlier gradients are copied within it."""
    model, (inputs, targets) = wide(), batch_of(1000)
    F.cross_entropy(model(inputs), targets).backward()
    expected = [grad * (2 if earlier else 1) for grad in gradients(model)]
    if not earlier:
        model.zero_grad()
    splitter = speedswap.BatchSplitter(model if named else None, memory=memory)
    with LimitedMemory() as counted:
        for _ in range(2):
            splitter.backward(lambda x, y: F.cross_entropy(model(x), y), inputs, targets)
            if counted.peak_bytes > 2**20:
                break
            if not earlier:
                assert relative_error(gradients(model), expected) < 1e-12
                model.zero_grad()
    assert counted.peak_bytes <= 2**20 + (1 << 10)  # and the losses of the call before
    assert splitter.micro_batch_size is not None
    assert 125 <= splitter.micro_batch_size < 1000


def test_all_calls_of_a_splitter_stay_below_its_memory() -> None:
    model, (inputs, targets) = wide(), batch_of(1000)
    splitter = speedswap.BatchSplitter(model, memory="1MiB")

    def loss(outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    for call in (
        lambda: splitter.map(model, inputs),
        lambda: loss(splitter.forward(model, inputs)).backward(),
        lambda: splitter.backward_coupled(model, loss, inputs),
    ):
        with LimitedMemory() as counted:
            call()
        assert 2**17 < counted.peak_bytes <= 2**20 + 4 * 1000 * 4 * 8  # outputs and their gradients are the caller's
        model.zero_grad()


def test_one_sample_that_does_not_fit_is_out_of_memory() -> None:
    model, (inputs, targets) = wide(), batch_of(8)
    splitter = speedswap.BatchSplitter(model, memory="80KiB")
    with pytest.raises(torch.OutOfMemoryError, match="and the limit is 81,920"):
        splitter.backward(lambda x, y: F.cross_entropy(model(x), y), inputs, targets)
    assert not gradients(model)


def test_a_given_size_that_does_not_fit_is_out_of_memory() -> None:
    model, (inputs, targets) = wide(), batch_of(1000)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=500, memory="1MiB")
    with pytest.raises(torch.OutOfMemoryError, match="the limit is 1,048,576"):
        splitter.backward(lambda x, y: F.cross_entropy(model(x), y), inputs, targets)


def test_sizes_that_have_fitted_are_not_looked_ahead_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    model, (inputs, targets) = wide(), batch_of(1000)
    splitter = speedswap.BatchSplitter(model, memory="1MiB", callbacks=[Callback()])

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        seen.append([mode.looks_ahead for mode in modes if isinstance(mode, LimitedMemory)])
        return F.cross_entropy(model(x), y)

    splitter.backward(loss_fn, inputs, targets)
    assert all(each == [True] for each in seen)
    seen.clear()
    splitter.backward(loss_fn, inputs, targets)
    assert seen
    assert all(each == [False] for each in seen)


@pytest.mark.parametrize("memory", ["2 GiBB", "lots", "", 0, -1, True, 1.5, "0B", "-1GiB"])
def test_memory_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(BatchError, match=r"memory is .*; give bytes, such as 2147483648, or a text with a unit"):
        speedswap.BatchSplitter(memory=memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_allocator_stays_below_the_limit() -> None:
    model, batch = wide().cuda(), [each.cuda() for each in batch_of(200_000)]
    splitter = speedswap.BatchSplitter(model, memory="256MiB")
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        splitter.backward(lambda x, y: F.cross_entropy(model(x), y), *batch)
        assert torch.cuda.max_memory_allocated() - before <= 252**20
        model.zero_grad()
    assert torch.empty(2**29, dtype=torch.uint8, device="cuda").nbytes == 2**29  # there is no limit outside


class FakeGpu:
    """torch.cuda's interface to the allocator of a GPU of 1000 bytes, 200 of them in use and 500 taken."""

    def __init__(self) -> None:
        self.fraction, self.reserved = 0.9, 500
        self.calls: list[Any] = []

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=1000)

    def memory_allocated(self, device: torch.device) -> int:
        return 200

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.reserved = 250

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction


@pytest.mark.parametrize(
    ("nbytes", "taken", "allowed", "reserved"), [(400, 50, 0.55, 500), (100, 0, 0.3, 250), (10**6, 0, 0.9, 500)]
)
def test_a_gpus_allocator_gets_the_limit_and_its_own_back(
    nbytes: int, taken: int, allowed: float, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    for name in dir(FakeGpu):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(gpu, name), raising=False)
    with limited(nbytes, [torch.device("cuda:0"), torch.device("cpu")], taken=taken):
        assert (gpu.fraction, gpu.reserved) == (allowed, reserved)
    assert gpu.fraction == 0.9
