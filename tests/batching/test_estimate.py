"""Memory estimated from a few samples, against what torch's profiler sees of whole training steps."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import same_bits
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import speedswap
from speedswap.errors import BatchError, MemoryBudgetError, OptimizerError

CLASSES = 10


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(24, 48, num_layers=2, batch_first=True)
        self.out = nn.Linear(48, CLASSES)

    def forward(self, inputs):
        return self.out(self.lstm(inputs)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 4, 96, dropout=0.1, batch_first=True)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, inputs):
        return self.out(self.block(inputs).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def cnn():
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, CLASSES))


MODELS = {
    "mlp": (mlp, (64,)),
    "cnn": (cnn, (3, 16, 16)),
    "lstm": (Recurrent, (20, 24)),
    "transformer": (Attention, (20, 32)),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads on a busy machine spend most of their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(shape, samples):
    return torch.randn(samples, *shape), torch.randint(CLASSES, (samples,))


def bytes_of(*tensors):
    return sum(tensor.nbytes for tensor in tensors)


def allocated_at_most(run) -> int:
    """Return the peak of the CPU allocator's bytes, less those allocated before."""
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
            time.sleep(0.01)  # the profiler loses events at its session's edges
            held = run()
            time.sleep(0.01)
        events = sorted(session.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        if sizes:
            break
        del held
    assert sizes
    now = most = 0
    for size in sizes:
        now += size
        most = max(most, now)
    return most


def measured_peak(model, optimizer_class, inputs, targets, passes) -> int:
    """Return the bytes alive at the peak of a training step after the first, with ``passes`` passes per step."""
    optimizer = optimizer_class(model.parameters())

    def step():
        for _ in range(passes):
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loss = step()
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor)]
    before = bytes_of(*model.parameters(), *model.buffers(), *state, inputs, targets, loss)
    # Other allocations of the process can only add to it.
    return before + min(allocated_at_most(step) for _ in range(2))


def estimated(model, shape, optimizer, samples=4, **options):
    return speedswap.batching.estimate_memory(
        model,
        batch(shape, samples),
        optimizer,
        loss_fn=lambda inputs, targets: functional.cross_entropy(model(inputs), targets),
        **options,
    )


@pytest.mark.sweep(5)
@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "accumulating"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_p23_never_under_the_measured_peak_and_at_most_a_quarter_over(name, optimizer, passes):
    make, shape = MODELS[name]
    model = make()
    estimate = estimated(model, shape, optimizer, accumulate=passes > 1)
    for samples in (2, 7, 33, 400):
        measured = measured_peak(model, optimizer, *batch(shape, samples), passes)
        assert measured <= estimate.total(samples) <= 1.25 * measured, samples


@pytest.mark.parametrize("name", MODELS)
def test_p23_largest_size_fits_what_it_was_asked_for_and_wastes_little(name):
    """Sizes are measured, one after the other, until one does not fit."""
    make, shape = MODELS[name]
    model = make()
    budget = measured_peak(model, torch.optim.Adam, *batch(shape, 150), 2)
    predicted = estimated(model, shape, torch.optim.Adam).largest_micro_batch_size(budget)

    def fits(samples):
        return measured_peak(model, torch.optim.Adam, *batch(shape, samples), 2) <= budget

    largest = max(samples for samples in (predicted, 130, 140, 149, 150, 151) if fits(samples))
    assert fits(predicted)
    assert 0.75 * largest <= predicted <= largest


def contrastive_loss(encoder):
    def loss_fn(inputs):
        codes = encoder(inputs)
        return functional.cross_entropy(codes @ codes.T, torch.arange(len(inputs)))

    return loss_fn


def two_tower_loss(encoder):
    """Compare in both directions, with a temperature, as for images and their captions."""
    other = copy.deepcopy(encoder)

    def loss_fn(inputs):
        logits = functional.normalize(encoder(inputs)) @ functional.normalize(other(inputs)).T / 0.1
        targets = torch.arange(len(inputs))
        return (functional.cross_entropy(logits, targets) + functional.cross_entropy(logits.T, targets)) / 2

    return loss_fn


@pytest.mark.parametrize("make_loss", [contrastive_loss, two_tower_loss])
def test_p23_loss_that_compares_all_samples_grows_with_the_square_of_the_batch(make_loss):
    encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    loss_fn = make_loss(encoder)
    estimate = speedswap.batching.estimate_memory(encoder, torch.randn(5, 8), loss_fn=loss_fn)
    for samples in (100, 300, 1024, 4096):
        inputs = torch.randn(samples, 8)

        def run(inputs=inputs):
            loss_fn(inputs).backward()

        run()
        towers = 2 if make_loss is two_tower_loss else 1
        there = bytes_of(inputs) + 2 * towers * bytes_of(*encoder.parameters())  # and gradients
        measured = there + allocated_at_most(run)
        assert measured <= estimate.total(samples) <= 1.25 * measured, samples
    assert estimate.activations(4096) >= 4 * 4096**2


def test_attention_grows_with_the_square_of_its_length_and_not_of_the_batch():
    estimate = estimated(Attention(), (20, 32), None)
    assert estimate.total(3000) - estimate.total(2000) == pytest.approx(estimate.total(2000) - estimate.total(1000))


class Shared(nn.Module):
    """110 parameters in nested modules, two of which are the same, and 1,000 at the root."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(10, 10)))
        self.same = self.inner[0]
        self.root = nn.Parameter(torch.zeros(1000))
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, inputs):
        return self.same(self.inner(inputs)) + self.root.sum() + self.mean.sum()


def test_p23_shared_nested_and_root_parameters_count_once():
    estimate = speedswap.batching.estimate_memory(Shared(), torch.randn(3, 10), torch.optim.Adam)
    assert estimate.parameters == 4 * 1110
    assert estimate.gradients == 4 * 1110
    assert estimate.buffers == 4 * 7
    assert estimate.optimizer_state == 2 * 4 * 1110 + 3 * 4  # and a step for each of three parameters
    assert [estimate.inputs(size) for size in (1, 100)] == [40, 4000]


def test_tied_weights_in_a_module_with_two_names_count_once_and_stay_tied():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10, bias=False)), nn.Linear(10, 7))
    model[2].requires_grad_(False)
    model[1].append(model[0])
    model[1][0].weight = weight = model[0].weight
    model[0].register_buffer("offset", torch.zeros(10))
    model[1].register_buffer("same_offset", model[0].offset)
    offset, names = model[0].offset, [name for name, _ in model.named_parameters()]
    estimate = speedswap.batching.estimate_memory(model, torch.randn(4, 10), torch.optim.Adam(model.parameters()))
    assert (estimate.parameters, estimate.buffers) == (4 * (110 + 77), 40)
    assert estimate.gradients == 4 * 110
    assert estimate.optimizer_state == 2 * 4 * 110 + 2 * 4
    assert model[0].weight is model[1][0].weight is model[1][1].weight is weight
    assert model[0].offset is model[1].same_offset is offset
    assert [name for name, _ in model.named_parameters()] == names


def test_weights_that_share_memory_count_once():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    estimate = speedswap.batching.estimate_memory(model, torch.randint(50, (4, 3)), torch.optim.SGD)
    assert estimate.parameters == estimate.gradients == 50 * 8 * 4


def test_parameters_that_are_views_of_one_memory_count_once_and_have_gradients_of_their_own():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    estimate = speedswap.batching.estimate_memory(model, torch.randint(50, (4, 3)), torch.optim.SGD)
    assert (estimate.parameters, estimate.gradients) == (50 * 8 * 4, 2 * 50 * 8 * 4)


def test_frozen_parameters_have_no_gradients_and_no_state():
    model = mlp()
    model[0].requires_grad_(False)
    estimate = estimated(model, (64,), torch.optim.Adam)
    trained = bytes_of(*model[2].parameters(), *model[4].parameters())
    assert estimate.gradients == trained
    assert estimate.optimizer_state == 2 * trained + 4 * 4


def test_frozen_parameters_that_the_optimizer_holds_have_no_state():
    """Most parameters are frozen, and the optimizer was given all of them."""
    model = nn.Sequential(nn.Linear(500, 500).requires_grad_(False), nn.ReLU(), nn.Linear(500, 5))
    optimizer = torch.optim.Adam(model.parameters())
    estimate = speedswap.batching.estimate_memory(model, torch.randn(4, 500), optimizer)
    model(torch.randn(4, 500)).sum().backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    assert estimate.optimizer_state == bytes_of(*held) == 20_048
    assert estimate.gradients == bytes_of(*model[2].parameters())


OPTIMIZERS = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta ASGD Rprop RMSprop Adafactor".split()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_that_of_the_optimizer_itself(name):
    optimizer_class = getattr(torch.optim, name)
    if name == "SGD":
        optimizer_class = functools.partial(optimizer_class, momentum=0.9)
    model = mlp()
    estimate = estimated(model, (64,), optimizer_class)
    twin = copy.deepcopy(model)
    optimizer = optimizer_class(twin.parameters())
    for _ in range(2):
        functional.cross_entropy(twin(torch.randn(4, 64)), torch.randint(CLASSES, (4,))).backward()
        optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert estimate.optimizer_state == bytes_of(*held)


def test_optimizer_that_needs_real_tensors_leaves_none_behind():
    """ASGD fails on fake tensors first; that error must not keep the real ones until a collection."""
    model, seen = nn.Linear(31, 31), []

    class Seen(torch.optim.ASGD):
        def step(self, closure=None):
            super().step(closure)
            seen.extend(map(weakref.ref, self.param_groups[0]["params"]))

    gc.disable()
    try:
        speedswap.batching.estimate_memory(model, torch.randn(4, 31), Seen)
        alive = [one() for one in seen]
    finally:
        gc.enable()
    assert seen
    assert not any(type(one) is nn.Parameter for one in alive)


def test_optimizer_object_lends_its_settings_and_groups_and_is_not_stepped():
    model = mlp()
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters(), "momentum": 0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    steps = []
    optimizer.register_step_pre_hook(lambda *arguments: steps.append(arguments))
    before = copy.deepcopy(optimizer.state_dict())
    estimate = estimated(model, (64,), optimizer)
    assert estimate.optimizer_state == bytes_of(*model[0].parameters())
    assert optimizer.state_dict() == before
    assert not steps


def test_sparse_gradients_and_their_optimizer():
    model = nn.Embedding(1000, 8, sparse=True)
    estimate = speedswap.batching.estimate_memory(model, torch.randint(1000, (4,)), torch.optim.SparseAdam)
    assert estimate.optimizer_state == 2 * 1000 * 8 * 4
    assert estimate.gradients < 1000 * 8 * 4


def test_optimizer_that_evaluates_the_loss_is_refused_by_name():
    with pytest.raises(OptimizerError, match=r"LBFGS evaluates the loss.*optimizer=None"):
        estimated(mlp(), (64,), torch.optim.LBFGS)


@pytest.mark.parametrize("training", [True, False])
def test_model_gradients_and_random_numbers_are_as_before(training):
    model = cnn().train(training)
    model.append(nn.Dropout(0.5))
    functional.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.randint(CLASSES, (4,))).backward()
    parameters = dict(model.named_parameters())
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    values = [one.clone() for one in (*model.state_dict().values(), *grads.values())]
    called = []
    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(called.append)
    estimated(model, (3, 16, 16), torch.optim.Adam(model.parameters()))
    assert model.training is training
    assert dict(model.named_parameters()) == parameters
    assert all(parameter.grad is grads[name] for name, parameter in parameters.items())
    assert same_bits([*model.state_dict().values(), *grads.values()], values)
    assert not called


def test_random_numbers_are_as_before():
    model, example = Attention(), (torch.randn(4, 20, 32),)
    before = torch.get_rng_state()
    speedswap.batching.estimate_memory(model, example, torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_loss_refers_to_keeps_its_gradient():
    model, temperature = mlp(), torch.ones((), requires_grad=True)
    speedswap.batching.estimate_memory(model, torch.randn(4, 64), loss_fn=lambda x: (model(x) * temperature).sum())
    assert temperature.grad is None


class Counting(nn.Module):
    """Replaces its buffer, where BatchNorm changes its own in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes = self.passes + 1
        return inputs


@pytest.mark.parametrize("fails_at", [None, 1, 2, 3])
def test_modules_that_only_the_loss_knows_count_and_are_as_before(fails_at):
    first = nn.Linear(6, 6)
    second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counting(), nn.Linear(6, 3).requires_grad_(False))
    second[0].weight.grad = given = torch.ones(6, 6)
    parameters, passes = list(second.parameters()), second[2].passes
    before = [value.clone() for value in second.state_dict().values()]
    calls = []

    def loss_fn(inputs):
        calls.append(len(inputs))
        loss = second(first(inputs)).square().sum()
        if len(calls) == fails_at:
            raise ZeroDivisionError
        return loss

    if fails_at:
        with pytest.raises(ZeroDivisionError):
            speedswap.batching.estimate_memory(first, torch.randn(4, 6), torch.optim.SGD, loss_fn=loss_fn)
    else:
        estimate = speedswap.batching.estimate_memory(first, torch.randn(4, 6), torch.optim.Adam, loss_fn=loss_fn)
        assert estimate.parameters == bytes_of(*first.parameters(), *second.parameters())
        assert estimate.buffers == bytes_of(*second.buffers())
        trained = bytes_of(*first.parameters(), *second[:2].parameters())
        assert estimate.gradients == trained
        assert estimate.optimizer_state == 2 * trained + 6 * 4
    assert all(one is other for one, other in zip(second.parameters(), parameters, strict=True))
    assert second[0].weight.grad is given
    assert all(parameter.grad is None for parameter in parameters[1:])
    assert bool((given == 1).all())
    assert second[2].passes is passes
    assert same_bits(list(second.state_dict().values()), before)


def test_batch_norm_needs_no_second_sample_of_the_user():
    estimate = estimated(cnn(), (3, 16, 16), None, samples=1)
    assert estimate.total(2) > estimate.total(1) > 0


def test_example_by_name_and_without_a_loss():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5))

        def forward(self, values, scale):
            return {"out": values * self.weight * scale}

    estimate = speedswap.batching.estimate_memory(Named(), {"values": torch.randn(6, 5), "scale": 2.0}, torch.optim.SGD)
    assert estimate.inputs(1) == 20
    assert estimate.optimizer_state == 0


def test_half_precision_sums_count_as_float32():
    model = mlp().bfloat16()
    example = torch.randn(4, 64).bfloat16()
    accumulating = speedswap.batching.estimate_memory(model, example, torch.optim.SGD)
    once = speedswap.batching.estimate_memory(model, example, torch.optim.SGD, accumulate=False)
    assert accumulating.gradients == 2 * accumulating.parameters
    assert once.gradients == once.parameters


def test_autocast_makes_activations_smaller():
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    full = speedswap.batching.estimate_memory(model, torch.randn(4, 64))
    cast = torch.autocast("cpu", torch.bfloat16)
    half = speedswap.batching.estimate_memory(model, torch.randn(4, 64), loss_fn=cast(lambda x: model(x).sum()))
    assert half.activations(1000) < 0.8 * full.activations(1000)  # and the weights, once


def test_splitter_stays_within_the_estimate():
    """Half-precision parameters, whose gradients the splitter sums in float32."""
    model = mlp().bfloat16()
    inputs, targets = torch.randn(128, 64).bfloat16(), torch.randint(CLASSES, (128,))
    estimate = speedswap.batching.estimate_memory(
        model, (inputs, targets), loss_fn=lambda x, y: functional.cross_entropy(model(x), y)
    )
    splitter = speedswap.BatchSplitter(model, micro_batch_size=32)
    run = functools.partial(splitter.backward, lambda x, y: functional.cross_entropy(model(x), y), inputs, targets)
    run()
    model.zero_grad()
    measured = bytes_of(*model.parameters(), inputs[:32], targets[:32]) + allocated_at_most(run)
    assert measured <= estimate.total(32)


def test_model_that_takes_another_path_for_each_size():
    """Another sequence of operations for each number of samples."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs):
            for _ in range(len(inputs)):
                inputs = torch.tanh(self.layer(inputs))
            return inputs

    estimate = speedswap.batching.estimate_memory(Loop(), torch.randn(4, 8), torch.optim.SGD)
    assert estimate.total(200) > estimate.total(20)


@pytest.mark.parametrize("trial_mib, sizes", [(9, {2, 4}), (17, {2, 4, 8}), (3, {2, 3})])
def test_samples_count_among_the_bytes_of_a_trial(trial_mib, sizes):
    """A sample of 2 MiB whose pass takes almost nothing; up to 256 of them used to be tried."""
    shape, seen = (2, 512, 512), set()
    model = nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(128, CLASSES))
    hook = model.register_forward_pre_hook(lambda _, args: seen.add(len(args[0])))
    estimate = estimated(model, shape, torch.optim.Adam, samples=1, accumulate=False, trial_bytes=trial_mib << 20)
    assert seen == sizes
    hook.remove()
    assert estimate.inputs(1) == (2 << 20) + 8
    for samples in (3, 20):
        measured = measured_peak(model, torch.optim.Adam, *batch(shape, samples), 1)
        assert measured <= estimate.total(samples) <= 1.25 * measured, samples


def test_large_activations_are_foreseen_from_two_and_three_samples():
    shape, seen = (3, 96, 96), set()
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(8, CLASSES))
    hook = model.register_forward_pre_hook(lambda _, args: seen.add(len(args[0])))
    estimate = estimated(model, shape, torch.optim.Adam, trial_bytes=1 << 20)
    assert seen == {2, 3}
    hook.remove()
    for samples in (1, 5, 16, 33, 100):
        measured = measured_peak(model, torch.optim.Adam, *batch(shape, samples), 2)
        assert measured <= estimate.total(samples) <= 1.25 * measured, samples


@functools.cache
def an_estimate():
    return estimated(mlp(), (64,), torch.optim.Adam)


@settings(max_examples=200, deadline=None)
@given(st.integers(2 * 10**6, 10**12))
def test_largest_size_is_the_largest(budget):
    size = an_estimate().largest_micro_batch_size(budget)
    assert an_estimate().total(size) <= budget < an_estimate().total(size + 1)


def test_budget_below_one_sample_says_what_one_sample_takes():
    with pytest.raises(MemoryBudgetError, match=rf"1000000.*one sample takes {an_estimate().total(1)}"):
        an_estimate().largest_micro_batch_size(1_000_000)


def test_table_adds_up():
    estimate = an_estimate()
    parts = estimate.parameters + estimate.buffers + estimate.gradients + estimate.optimizer_state
    for size in (1, 8, 64, 512):
        rest = estimate.inputs(size) + estimate.activations(size) + estimate.temporaries(size)
        assert parts + rest == estimate.total(size)
    lines = str(estimate).splitlines()
    assert lines[0].split() == ["micro-batch", "size", "1", "8", "64", "512"]
    assert lines[-1].startswith("total")
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    "example, loss_fn, error, text",
    [
        (torch.zeros(0, 64), None, BatchError, "no samples"),
        ((torch.zeros(4, 64),), lambda x: x.detach().sum(), BatchError, "needs a gradient"),
        ((torch.zeros(4, 64, requires_grad=True),), lambda x: x * 2, BatchError, "one number"),
    ],
)
def test_what_cannot_be_estimated_says_why(example, loss_fn, error, text):
    with pytest.raises(error, match=text):
        speedswap.batching.estimate_memory(mlp(), example, loss_fn=loss_fn)


def test_size_must_be_positive():
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        an_estimate().total(0)


def test_loss_whose_module_writes_a_buffer_of_another_leaves_no_trace():
    """The other module never runs itself, so that nothing else tells that it is part of the loss."""

    class Tally(nn.Module):
        def __init__(self):
            super().__init__()
            self.counts = nn.Module()
            self.counts.register_buffer("passes", torch.zeros(()))

        def forward(self, outputs):
            self.counts.passes += 1
            return outputs.mean()

    model, loss = nn.Linear(4, 1), Tally()
    speedswap.batching.estimate_memory(model, torch.randn(4, 4), loss_fn=lambda inputs: loss(model(inputs)))
    assert loss.counts.passes == 0


def test_failure_of_the_model_is_its_own_and_leaves_no_trace():
    model, example = mlp(), torch.randn(4, 63)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        speedswap.batching.estimate_memory(model, example, torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_p23_on_a_gpu_never_under_what_its_allocator_gave_out(name):
    make, shape = MODELS[name]
    model = make().cuda()
    inputs, targets = (tensor.cuda() for tensor in batch(shape, 4))
    estimate = speedswap.batching.estimate_memory(
        model, (inputs, targets), torch.optim.Adam, loss_fn=lambda x, y: functional.cross_entropy(model(x), y)
    )
    assert estimate.context > 0
    del inputs, targets
    already = torch.cuda.memory_allocated() - bytes_of(*model.parameters(), *model.buffers())
    optimizer = torch.optim.Adam(model.parameters())
    for samples in (64, 500):
        inputs, targets = (tensor.cuda() for tensor in batch(shape, samples))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() - max(0, already) <= estimate.total(samples)


def test_nothing_is_printed() -> None:
    """In a separate process: torch's profiler reads its level once."""
    code = (
        "import torch, speedswap; model = torch.nn.Linear(3, 2); "
        "speedswap.batching.estimate_memory(model, (torch.ones(4, 3),), loss_fn=lambda x: model(x).sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
