"""Running out of memory: the batch is tried again in smaller parts, as if nothing had happened."""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
import weakref

import pytest
import torch
from children import run_script
from splitting import OutOfMemoryBeyond, classifier, gradients, same_bits, state
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.batching import Callback
from speedswap.batching.attempts import Limits
from speedswap.batching.memory import release_cached_memory
from speedswap.errors import BatchError


def stateful_model() -> nn.Module:
    """Return one that draws random numbers and keeps running statistics."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))


def batch(samples: int):
    return torch.randn(samples, 6), torch.randint(4, (samples,))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("calls", [0, 1, 3], ids=lambda calls: f"fails at micro-batch {calls}")
def test_p08_retried_batch_is_a_clean_run_at_the_smaller_size(known, calls):
    """Gradients, buffers and random numbers, bit for bit; the failure comes at different micro-batches."""
    model = stateful_model()
    clean = copy.deepcopy(model)
    first, second = batch(40), batch(40)

    loss_fn = OutOfMemoryBeyond(lambda x, y: functional.cross_entropy(model(x), y), limit=12)
    splitter = speedswap.BatchSplitter(model if known else None, check=False)
    torch.manual_seed(5)
    splitter.backward(loss_fn, *first)
    loss_fn.limit, loss_fn.calls = 6, calls
    loss = splitter.backward(loss_fn, *second)
    numbers = torch.get_rng_state()

    torch.manual_seed(5)
    for size, inputs in ((10, first), (5, second)):
        splitter = speedswap.BatchSplitter(clean if known else None, micro_batch_size=size, check=False)
        expected = splitter.backward(lambda x, y: functional.cross_entropy(clean(x), y), *inputs)
    assert loss_fn.sizes == [40, 20, *[10] * 4, *[10] * (calls + 1), *[5] * 8]
    assert torch.equal(loss, expected)
    assert same_bits(state(model), state(clean))
    assert torch.equal(torch.get_rng_state(), numbers)


def test_p08_python_and_numpy_random_numbers_are_put_back():
    import random

    import numpy as np

    drawn = []

    def loss_fn(x):
        drawn.append((len(x), random.random(), float(np.random.rand())))  # noqa: NPY002
        return (x * weight).sum()

    weight = torch.ones(3, requires_grad=True)
    speedswap.BatchSplitter(reduction="sum", check=False).backward(
        OutOfMemoryBeyond(loss_fn, limit=2), torch.ones(4, 3)
    )
    whole, first, _ = drawn
    assert whole[1:] == first[1:]


def test_p09_running_out_in_the_optimizers_step_is_the_callers(monkeypatch):
    """The splitter has no part in the step, and so cannot do it twice; the next batch trains on."""
    model, twin = classifier(), classifier()
    twin.load_state_dict(model.state_dict())
    splitter = speedswap.BatchSplitter(model, check=False)
    inputs = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))

    class Failing(torch.optim.SGD):
        failures = 1

        def step(self, closure=None):
            super().step()
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer, theirs = Failing(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        splitter.backward(lambda x, y: functional.cross_entropy(model(x), y), *inputs)
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step()
        theirs.zero_grad()
        functional.cross_entropy(twin(inputs[0]), inputs[1]).backward()
        theirs.step()
    assert same_bits(list(model.parameters()), list(twin.parameters()))
    assert splitter.micro_batch_size == 8


class Fails(torch.autograd.Function):
    """An operation whose backward pass runs out of memory when it is given more than two samples."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        if len(grad) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return grad


def test_running_out_in_the_backward_pass_is_recovered_from():
    model = classifier()
    clean = copy.deepcopy(model)
    inputs = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    splitter = speedswap.BatchSplitter(model, check=False)
    splitter.backward(lambda x, y: functional.cross_entropy(Fails.apply(model(x)), y), *inputs)
    assert splitter.micro_batch_size == 2
    speedswap.BatchSplitter(clean, micro_batch_size=2).backward(
        lambda x, y: functional.cross_entropy(clean(x), y), *inputs
    )
    assert same_bits(gradients(model), gradients(clean))


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_p17_nothing_of_a_failed_attempt_is_alive_when_memory_is_released(monkeypatch, fails_in):
    model = classifier()
    activations, alive = [], []

    def loss_fn(x, y):
        hidden = model(x)
        activations.append(weakref.ref(hidden))
        if fails_in == "forward" and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return functional.cross_entropy(Fails.apply(hidden), y)

    def released():
        alive.append([reference() is not None for reference in activations])
        release_cached_memory()

    monkeypatch.setattr("speedswap.batching.attempts.release_cached_memory", released)
    gc.disable()  # memory is freed by reference counts, not by a collection that happens to run
    try:
        splitter = speedswap.BatchSplitter(model, check=False)
        splitter.backward(loss_fn, torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,)))
    finally:
        gc.enable()
    assert alive == [[False], [False, False]]


def test_p17_the_callers_frame_is_left_alone():
    """Variables of the function that calls the splitter are not cleared with those of the failed one."""
    mine = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    loss_fn = OutOfMemoryBeyond(lambda x: (x * weight).sum(), limit=1)
    speedswap.BatchSplitter(reduction="sum", check=False).backward(loss_fn, torch.ones(4, 3))
    assert mine.sum() == 3
    assert weight.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "error",
    [ValueError("CUDA out of memory"), RuntimeError("CUDA error: device-side assert triggered"), IndexError("x")],
    ids=lambda error: type(error).__name__,
)
def test_p18_other_errors_are_never_swallowed(error):
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        raise error

    with pytest.raises(type(error)) as raised:
        speedswap.BatchSplitter(check=False).backward(loss_fn, torch.ones(4, 3))
    assert raised.value is error
    assert calls == [4]


def test_p18_one_sample_that_does_not_fit_raises_the_original_with_its_history():
    model = classifier()
    loss_fn = OutOfMemoryBeyond(lambda x, y: functional.cross_entropy(model(x), y), limit=0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        speedswap.BatchSplitter(model, escalate=False, check=False).backward(
            loss_fn, torch.randn(9, 6, dtype=torch.float64), torch.randint(4, (9,))
        )
    assert loss_fn.sizes == [9, 3, 1]  # 9 in two parts of at most 4 would be 5 and 4
    causes = []
    error = raised.value.__cause__
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert [type(cause) for cause in causes] == [torch.OutOfMemoryError, torch.OutOfMemoryError, BatchError]
    assert str(causes[-1]) == "micro-batches of 9, 3 samples had run out of memory before"
    assert raised.traceback[-1].name == "__call__"
    assert gradients(model) == []


def test_p18_one_error_object_raised_again_and_again_ends():
    error = torch.OutOfMemoryError("CUDA out of memory")
    reason = KeyError("why")

    def loss_fn(x):
        raise error from reason

    with pytest.raises(torch.OutOfMemoryError) as raised:
        speedswap.BatchSplitter(check=False).backward(loss_fn, torch.ones(8, 3))
    assert raised.value is error
    assert error.__cause__ is reason
    assert isinstance(reason.__cause__, BatchError)
    assert reason.__cause__.__cause__ is None


def test_given_size_is_not_changed():
    loss_fn = OutOfMemoryBeyond(lambda x: x.sum(), limit=2)
    with pytest.raises(torch.OutOfMemoryError):
        speedswap.BatchSplitter(micro_batch_size=4, check=False).backward(loss_fn, torch.ones(8, 3, requires_grad=True))
    assert loss_fn.sizes == [4]


def test_p19_success_collects_no_garbage_and_empties_no_cache(monkeypatch):
    model = classifier()
    called = []
    monkeypatch.setattr(gc, "collect", lambda *args: called.append("gc.collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    splitter = speedswap.BatchSplitter(model, grow_after=1)
    inputs = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    for _ in range(5):
        splitter.backward(lambda x, y: functional.cross_entropy(model(x), y), *inputs)
    assert called == []


def split_sizes(splitter, loss_fn, samples, times):
    """Return the micro-batches of some batches in turn, and the number of attempts at each."""
    found = []
    for _ in range(times):
        del loss_fn.sizes[:]
        splitter.backward(loss_fn, torch.ones(samples, 3))
        failures = [size for size in loss_fn.sizes if size > loss_fn.limit]
        found.append(([size for size in loss_fn.sizes if size <= loss_fn.limit], len(failures) + 1))
    return found


def limited(limit: int) -> OutOfMemoryBeyond:
    weight = torch.ones(3, requires_grad=True)
    return OutOfMemoryBeyond(lambda x: (x * weight).sum(), limit)


def test_size_is_remembered_and_closes_in_on_the_limit_without_swinging(caplog):
    """37 samples fit, 64 in whole: 32 by halving, 37 by trials, each failed one twice as long after the one before."""
    loss_fn = limited(37)
    splitter = speedswap.BatchSplitter(reduction="sum", grow_after=3, check=False)
    caplog.set_level("INFO", logger="speedswap")
    found = split_sizes(splitter, loss_fn, 1024, 100)
    assert [attempts for _, attempts in found[:3]] == [6, 1, 1]  # 1024, 512, 256, 128, 64, 32
    largest = [max(sizes) for sizes, _ in found]
    assert largest[0] == 32
    assert largest[-1] == 37
    assert largest == sorted(largest)
    failed = [index for index, (_, attempts) in enumerate(found) if attempts > 1][1:]
    assert len(failed) <= 5
    assert failed[-1] - failed[-2] == 2 * (failed[-2] - failed[-3])
    changes = [record.message.split(":")[0] for record in caplog.records]
    assert len(changes) == len(set(changes))  # each is said once
    assert changes[:5] == [f"micro-batch size {2 * size} → {size}" for size in (512, 256, 128, 64, 32)]


def test_size_grows_to_the_whole_batch_when_memory_is_free_again():
    loss_fn = limited(10)
    splitter = speedswap.BatchSplitter(reduction="sum", grow_after=3, check=False)
    split_sizes(splitter, loss_fn, 64, 12)
    loss_fn.limit = 64
    assert split_sizes(splitter, loss_fn, 64, 60)[-1][0] == [64]


@pytest.mark.parametrize("resumed", [False, True])
def test_failure_that_is_no_trial_does_not_put_off_the_next_trial(resumed):
    """Memory was short once: after ``grow_after`` batches a larger size is tried, not after twice as many."""
    loss_fn = limited(32)
    splitter = speedswap.BatchSplitter(reduction="sum", grow_after=3, check=False)
    if resumed:
        splitter.load_state_dict({"micro_batch_size": 32})
    else:
        split_sizes(splitter, loss_fn, 64, 1)
    loss_fn.limit = 16
    assert split_sizes(splitter, loss_fn, 64, 1) == [([16] * 4, 2)]
    loss_fn.limit = 64
    assert [max(sizes) for sizes, _ in split_sizes(splitter, loss_fn, 64, 3)] == [16, 16, 22]


def test_functions_and_shapes_have_sizes_of_their_own():
    small = limited(8)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    assert split_sizes(splitter, small, 64, 1)[0][0] == [8] * 8
    narrow = torch.ones(64, 2)
    weight = torch.ones(2, requires_grad=True)
    sizes = []

    def other(x):
        sizes.append(len(x))
        return (x * weight).sum()

    splitter.backward(other, narrow)
    assert sizes == [64]
    assert split_sizes(splitter, small, 64, 1) == [([8] * 8, 1)]


def test_objects_without_weak_references_have_sizes_of_their_own():
    weight = torch.ones(3, requires_grad=True)

    class Wide:
        __slots__ = ("sizes",)

        def __call__(self, x):
            self.sizes.append(len(x))
            return (x * weight).sum()

    class Narrow(Wide):
        __slots__ = ()

        def __call__(self, x):
            loss = super().__call__(x)
            if len(x) > 16:
                raise MemoryError
            return loss

    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    narrow, wide = Narrow(), Wide()
    narrow.sizes, wide.sizes = [], []
    for loss_fn in (narrow, wide):
        splitter.backward(loss_fn, torch.ones(64, 3))
    assert narrow.sizes == [64, 32, *[16] * 4]
    assert wide.sizes == [64]


def test_lambda_in_a_loop_is_one_function():
    weight = torch.ones(3, requires_grad=True)
    loss_of = OutOfMemoryBeyond(lambda x: (x * weight).sum(), limit=16)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    for _ in range(3):
        splitter.backward(lambda x: loss_of(x), torch.ones(64, 3))
    assert loss_of.sizes == [64, 32, *[16] * 12]


def test_resumed_run_begins_with_the_size_that_fitted():
    loss_fn = limited(10)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    split_sizes(splitter, loss_fn, 64, 1)
    resumed = speedswap.BatchSplitter(reduction="sum", check=False)
    resumed.load_state_dict(splitter.state_dict())
    assert resumed.micro_batch_size == 8
    assert split_sizes(resumed, loss_fn, 64, 1) == [([8] * 8, 1)]
    with pytest.raises(BatchError, match="micro_batch_size"):
        resumed.load_state_dict({"micro_batch_size": -1})


def test_copied_splitter_begins_with_what_is_known_and_learns_by_itself():
    loss_fn = limited(10)
    splitter = speedswap.BatchSplitter(reduction="sum", check=False)
    split_sizes(splitter, loss_fn, 64, 1)
    copied = copy.deepcopy(splitter)
    assert split_sizes(copied, loss_fn, 64, 1) == [([8] * 8, 1)]
    loss_fn.limit = 4
    assert split_sizes(copied, loss_fn, 64, 1)[0][0] == [4] * 16
    assert (copied.micro_batch_size, splitter.micro_batch_size) == (4, 8)


def test_callbacks_are_told_what_happens():
    told = []

    class Listener(Callback):
        def before_batch(self, event):
            told.append(("before_batch", event.batch_size, event.micro_batch_sizes))

        def before_micro_batch(self, event):
            told.append(("before", event.index))

        def before_backward(self, event):
            told.append(("loss", float(event.loss)))

        def after_micro_batch(self, event):
            told.append(("after", event.index))

        def on_out_of_memory(self, event):
            told.append(("out of memory", event.old_size, event.new_size, type(event.error).__name__))

        def on_resize(self, event):
            told.append(("resize", event.old_size, event.new_size))

        def after_batch(self, event):
            told.append(("after_batch", float(event.loss)))

    splitter = speedswap.BatchSplitter(reduction="sum", callbacks=[Listener()], check=False)
    splitter.backward(limited(2), torch.ones(4, 3))
    assert told == [
        ("before_batch", 4, (4,)),
        ("before", 0),
        ("out of memory", 4, 2, "OutOfMemoryError"),
        ("resize", 4, 2),
        ("before_batch", 4, (2, 2)),
        *[("before", 0), ("loss", 6.0), ("after", 0), ("before", 1), ("loss", 6.0), ("after", 1)],
        ("after_batch", 12.0),
    ]


def test_known_size_of_another_class_of_memory_is_where_a_new_one_begins():
    limits = Limits()
    limit = limits.find("key", 30, 4)
    assert limit.choose(64) == 64
    limit.shrink(limit.failed(64), failed=64)
    assert limit.choose(64) == 32
    assert limits.find("key", 32, 4).choose(64) == 32
    assert limits.find("other", 30, 4).choose(64) == 64
    assert limits.find("key", 30, 4).choose(20) == 20


def test_forgotten_situations_begin_anew():
    limits = Limits()
    limits.find("key", 0, 4).shrink(32, failed=64)
    for index in range(2000):
        limits.find(index, 0, 4)
    assert limits.find("key", 0, 4).choose(64) == 64


@pytest.mark.slow
def test_real_allocator_out_of_memory_is_recovered_from():
    """torch's own CPU allocator fails under a limit of the process's address space."""
    code = """
        import resource, torch, speedswap
        torch.set_num_threads(1)
        weight = torch.ones(1024, requires_grad=True)
        data = torch.ones(64, 1024)
        torch.nn.functional.relu(torch.ones(4)).sum()
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 400 * 2**20,) * 2)
        def loss_fn(x):
            wide = (x * weight).repeat(1, 1024)  # 4 MiB a sample, kept for the backward pass
            return wide.square().mean()
        splitter = speedswap.BatchSplitter()
        loss = splitter.backward(loss_fn, data)
        assert splitter.micro_batch_size < 64, splitter.micro_batch_size
        assert torch.allclose(loss, torch.ones(())), loss
        assert torch.allclose(weight.grad, torch.full((1024,), 2 / 1024)), weight.grad
        print("recovered at", splitter.micro_batch_size)
    """
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    done = run_script(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("recovered at")


@pytest.mark.parametrize("known", [True, False])
def test_a_buffer_that_a_module_replaces_is_rolled_back(known):
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            return self.layer(x - self.mean)

    model, (x, y) = Averaged(), batch(8)
    clean = copy.deepcopy(model)
    splitter = speedswap.BatchSplitter(model if known else None, check=False)
    splitter.backward(OutOfMemoryBeyond(lambda x, y: functional.cross_entropy(model(x), y), limit=2), x, y)
    speedswap.BatchSplitter(clean, micro_batch_size=2).backward(
        lambda x, y: functional.cross_entropy(clean(x), y), x, y
    )
    assert same_bits(state(model), state(clean))


@pytest.mark.parametrize("known", [True, False])
def test_a_second_pass_that_runs_out_of_memory_leaves_buffers_as_the_first_one_did(known):
    model, inputs = nn.BatchNorm1d(3).double(), torch.randn(8, 3, dtype=torch.float64)
    calls = iter([False, True, False, False])  # of the second call, in the backward pass

    def function(x):
        result = model(x)
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    result = speedswap.BatchSplitter(model if known else None).forward(function, inputs)
    after = [buffer.clone() for buffer in model.buffers()]
    result.square().sum().backward()
    assert next(calls, None) is None
    assert same_bits([*model.buffers()], after)
