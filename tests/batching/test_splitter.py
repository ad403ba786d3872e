"""Gradients of split batches are those of the whole ones, whatever the loss averages over."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import classifier, gradients, relative_error, same_bits, state
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.errors import BatchError


def batch(samples: int, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    return torch.randn(samples, 6, dtype=dtype, device=device), torch.randint(4, (samples,), device=device)


def full(model, loss_fn, *inputs):
    """Loss and gradients of the unsplit batch, by torch alone."""
    twin = copy.deepcopy(model)
    loss = loss_fn(twin, *inputs)
    loss.sum().backward()
    return loss.detach(), gradients(twin)


def cross_entropy(model, inputs, targets):
    return functional.cross_entropy(model(inputs), targets)


@pytest.mark.parametrize("samples, size", [(100, 32), (100, 99), (7, 3), (5, 1), (8, 8), (8, 100)])
def test_p01_split_gradient_is_the_whole_batchs(device, samples, size):
    model, inputs = classifier().to(device), batch(samples, device=device)
    loss, wanted = full(model, cross_entropy, *inputs)
    sizes = []

    def loss_fn(x, y):
        sizes.append(len(x))
        return cross_entropy(model, x, y)

    found = speedswap.BatchSplitter(model, micro_batch_size=size, check=False).backward(loss_fn, *inputs)
    assert relative_error(gradients(model), wanted) <= 1e-12
    assert torch.allclose(found, loss, rtol=1e-12)
    assert not found.requires_grad
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == samples


def test_unsplit_batch_is_torchs_bit_for_bit(device):
    model, inputs = classifier(torch.float32).to(device), batch(16, torch.float32, device)
    loss, wanted = full(model, cross_entropy, *inputs)
    found = speedswap.BatchSplitter(model).backward(lambda x, y: cross_entropy(model, x, y), *inputs)
    assert torch.equal(found, loss)
    assert same_bits(gradients(model), wanted)


def padded_batch():
    inputs, targets = batch(40)
    targets[torch.rand(40) < 0.6] = -100
    targets[10:20] = -100  # one micro-batch without any
    targets[:2] = torch.tensor([1, 3])
    return inputs, targets


def test_p02_mean_over_valid_targets(device):
    model = classifier().to(device)
    inputs, targets = (tensor.to(device) for tensor in padded_batch())
    loss, wanted = full(model, cross_entropy, inputs, targets)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=10, normalizer=lambda x, y: (y != -100).sum())
    found = splitter.backward(lambda x, y: cross_entropy(model, x, y), inputs, targets)
    assert torch.allclose(found, loss, rtol=1e-12)
    assert relative_error(gradients(model), wanted) <= 1e-12


def test_p02_batch_without_any_valid_target_has_no_gradient():
    model, (inputs, targets) = classifier(), batch(6)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=2, normalizer=lambda x, y: (y != -100).sum())
    found = splitter.backward(lambda x, y: cross_entropy(model, x, y), inputs, torch.full_like(targets, -100))
    assert found == 0
    assert gradients(model) == []


def test_p03_mean_over_class_weights(device):
    model, (inputs, targets) = classifier().to(device), batch(50, device=device)
    weight = torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64, device=device)

    def weighted(model, x, y):
        return functional.cross_entropy(model(x), y, weight=weight)

    loss, wanted = full(model, weighted, inputs, targets)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=8, normalizer=lambda x, y: weight[y].sum())
    found = splitter.backward(lambda x, y: weighted(model, x, y), inputs, targets)
    assert torch.allclose(found, loss, rtol=1e-12)
    assert relative_error(gradients(model), wanted) <= 1e-12


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_p04_sums_are_not_rescaled(reduction):
    model, inputs = classifier(), batch(23)

    def loss_of(model, x, y):
        return functional.cross_entropy(model(x), y, reduction=reduction)

    loss, wanted = full(model, loss_of, *inputs)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=4, reduction=reduction)
    found = splitter.backward(lambda x, y: loss_of(model, x, y), *inputs)
    assert found.shape == loss.shape
    assert torch.allclose(found, loss, rtol=1e-12)
    assert relative_error(gradients(model), wanted) <= 1e-12


def test_p05_smaller_last_batch_has_the_mean_of_its_own_samples():
    model = classifier()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=4)
    for samples in (16, 16, 3):
        inputs = batch(samples)
        model.zero_grad()
        _, wanted = full(model, cross_entropy, *inputs)
        splitter.backward(lambda x, y: cross_entropy(model, x, y), *inputs)
        assert relative_error(gradients(model), wanted) <= 1e-12


def test_gradients_add_to_those_there_were():
    """Several batches before one step, with the gradients' tensors kept."""
    model, first, second = classifier(), batch(12), batch(20)
    apart = [full(model, cross_entropy, *inputs)[1] for inputs in (first, second)]
    wanted = [one + other for one, other in zip(*apart, strict=True)]
    splitter = speedswap.BatchSplitter(model, micro_batch_size=5)
    splitter.backward(lambda x, y: cross_entropy(model, x, y), *first)
    tensors = [parameter.grad for parameter in model.parameters()]
    splitter.backward(lambda x, y: cross_entropy(model, x, y), *second)
    assert relative_error(gradients(model), wanted) <= 1e-12
    assert all(parameter.grad is tensor for parameter, tensor in zip(model.parameters(), tensors, strict=True))


def test_p10_running_statistics_are_updated_with_every_micro_batch(device):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double().to(device)
    inputs = batch(100, device=device)
    apart = copy.deepcopy(model)
    for part in inputs[0].split(25):
        apart(part)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=25)
    splitter.backward(lambda x, y: cross_entropy(model, x, y), *inputs)
    assert model[0].num_batches_tracked == 4
    assert same_bits(list(model.buffers()), list(apart.buffers()))


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_is_said_to_depend_on_the_split_and_by_how_much(caplog, known, tracks):
    """Once, and neither for a whole batch nor in eval mode."""
    model = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=tracks), nn.Linear(6, 4)).double()
    splitter = speedswap.BatchSplitter(model if known else None, micro_batch_size=5)
    splitter.backward(lambda x, y: cross_entropy(model, x, y), *batch(5))
    assert caplog.records == []
    for _ in range(2):
        splitter.backward(lambda x, y: cross_entropy(model, x, y), *batch(10))
    (record,) = caplog.records
    assert record.getMessage().startswith("BatchNorm normalizes each micro-batch by its own statistics")
    assert "off by about 80 % of their norm" in record.getMessage()


def test_batch_norm_in_eval_mode_does_not_depend_on_the_split(caplog):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)).double().eval()
    inputs = batch(10)
    _, wanted = full(model, cross_entropy, *inputs)
    for known in (model, None):
        model.zero_grad()
        splitter = speedswap.BatchSplitter(known, micro_batch_size=5)
        splitter.backward(lambda x, y: cross_entropy(model, x, y), *inputs)
        assert relative_error(gradients(model), wanted) <= 1e-12
    assert caplog.records == []


def bfloat16_error(parts: int) -> float:
    """Return the gradient error of a bfloat16 layer over the same samples in that many parts."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    inputs = torch.randn(512, 16).to(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    exact(inputs.double()).square().mean().backward()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=512 // parts)
    splitter.backward(lambda x: model(x).float().square().mean(), inputs)
    assert model.weight.grad.dtype == torch.bfloat16
    return relative_error([model.weight.grad.double()], [exact.weight.grad])


def test_p11_half_precision_gradients_do_not_lose_with_the_number_of_parts():
    errors = {parts: bfloat16_error(parts) for parts in (1, 8, 64, 512)}
    assert max(errors.values()) < 4e-3
    assert errors[512] < 1.5 * errors[1]


def test_p11_half_precision_gradients_add_to_those_there_were():
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    inputs = torch.randn(8, 4).to(torch.bfloat16)
    model.weight.grad = before = torch.full_like(model.weight, 3.0)
    speedswap.BatchSplitter(model, micro_batch_size=2).backward(lambda x: model(x).float().mean(), inputs)
    assert model.weight.grad is before
    assert torch.equal(before, (3 + inputs.float().mean(0, keepdim=True)).to(torch.bfloat16))


def train(splitter, model, optimizer, scaler, batches, scheduler):
    """Train as users do, with everything that belongs to the optimizer's step once per batch."""
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for inputs in batches:
        optimizer.zero_grad()
        if splitter is None:
            scaler.scale(cross_entropy(model, *inputs)).backward()
        else:
            splitter.backward(lambda x, y: cross_entropy(model, x, y), *inputs)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
    return [*model.parameters(), *average.parameters()]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_p13_what_belongs_to_the_step_happens_once_a_batch(make):
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    batches = [batch(samples) for samples in (20, 20, 6)]
    trained = []
    for split in (True, False):
        torch.manual_seed(1)
        model = classifier()
        optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        splitter = speedswap.BatchSplitter(model, micro_batch_size=3, scaler=scaler)
        trained.append(train(splitter if split else None, model, optimizer, scaler, batches, scheduler))
        if make is torch.optim.AdamW:
            assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}
        assert scheduler.get_last_lr() == [0.1 * 0.5**3]
    assert relative_error([p.detach() for p in trained[0]], [p.detach() for p in trained[1]]) <= 1e-12


def test_p12_scaled_gradients_are_unscaled_once():
    model, inputs = classifier(), batch(20)
    _, wanted = full(model, cross_entropy, *inputs)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=6, scaler=scaler)
    loss = splitter.backward(lambda x, y: cross_entropy(model, x, y), *inputs)
    assert torch.allclose(loss, full(model, cross_entropy, *inputs)[0], rtol=1e-12)
    assert relative_error(gradients(model), [4096 * grad for grad in wanted]) <= 1e-12
    scaler.unscale_(optimizer)
    assert relative_error(gradients(model), wanted) <= 1e-12


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_p12_infinity_in_one_micro_batch_skips_the_whole_step(bad):
    model, (inputs, targets) = classifier(), batch(20)
    inputs[4 * bad] = float("inf")
    before = [parameter.clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=4, scaler=scaler)
    splitter.backward(lambda x, y: cross_entropy(model, x, y), inputs, targets)
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(list(model.parameters()), before)
    assert scaler.get_scale() == 2048.0


def test_leaves_outside_the_model_get_gradients_and_are_rolled_back():
    """A temperature that only the loss knows, and inputs that require gradients."""
    model, (inputs, targets) = classifier(), batch(12)
    temperature = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    inputs.requires_grad_()

    def loss_fn(x, y, fail=False):
        loss = functional.cross_entropy(model(x) * temperature, y)
        if fail and len(x) == 4 and x.storage_offset():
            raise KeyError("late")
        return loss

    splitter = speedswap.BatchSplitter(model, micro_batch_size=4)
    with pytest.raises(KeyError):
        splitter.backward(loss_fn, inputs, targets, fail=True)
    assert temperature.grad is None
    assert inputs.grad is None
    assert gradients(model) == []
    splitter.backward(loss_fn, inputs, targets)
    found = [temperature.grad, inputs.grad]
    temperature.grad = inputs.grad = None
    loss_fn(inputs, targets).backward()
    assert relative_error(found, [temperature.grad, inputs.grad]) <= 1e-12


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_any_failure_leaves_everything_as_it_was(known):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    splitter = speedswap.BatchSplitter(model if known else None, micro_batch_size=4)
    splitter.backward(lambda x, y: cross_entropy(model, x, y), *batch(8))
    before, numbers = state(model), torch.get_rng_state()

    def interrupted(x, y):
        loss = cross_entropy(model, x, y)
        if x.storage_offset() >= 8 * 6:
            raise KeyboardInterrupt
        return loss

    inputs = batch(12)
    numbers = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        splitter.backward(interrupted, *inputs)
    assert same_bits(state(model), before)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_several_models_in_one_loss():
    encoder, head = classifier(), nn.Linear(4, 4).double()
    inputs, targets = batch(10)
    functional.cross_entropy(head(encoder(inputs)), targets).backward()
    wanted = [*gradients(encoder), *gradients(head)]
    encoder.zero_grad()
    head.zero_grad()
    splitter = speedswap.BatchSplitter([encoder, head], micro_batch_size=3)
    splitter.backward(lambda x, y: functional.cross_entropy(head(encoder(x)), y), inputs, targets)
    assert relative_error([*gradients(encoder), *gradients(head)], wanted) <= 1e-12


@pytest.mark.parametrize(
    "option, message",
    [
        ({"micro_batch_size": 0}, r"micro_batch_size is 0; it must be at least 1"),
        ({"micro_batch_size": "all"}, r"micro_batch_size is 'all'"),
        ({"micro_batch_size": True}, r"micro_batch_size is True"),
        ({"micro_batch_size": torch.ones(2)}, r"micro_batch_size is tensor\(\[1., 1.\]\)"),
        ({"reduction": "max"}, r"reduction is 'max'"),
        ({"grow_after": 0}, r"grow_after is 0"),
        ({"normalizer": len, "reduction": "sum"}, r"normalizer is .*None unless reduction"),
        ({"normalizer": 5}, "normalizer is an int; give a function"),
        ({"cost": 5}, "cost is an int; give a function"),
        ({"scaler": 5}, "scaler is 5; it must be a GradScaler"),
        ({"offload_activations": "x"}, "offload_activations is 'x'; it must be True or False"),
        ({"model": [nn.Linear(1, 1), None]}, "model is or has a NoneType; give one or several Modules"),
        ({"optimizer": "sgd"}, "optimizer is or has a str; give one or several Optimizers"),
        ({"callbacks": None}, "callbacks is or has a NoneType"),
        ({"escalate": [5]}, "escalate is or has an int"),
    ],
)
def test_wrong_options_are_errors(option, message):
    with pytest.raises(BatchError, match=message):
        speedswap.BatchSplitter(**option)


@pytest.mark.parametrize(
    "result, reduction, message",
    [
        (lambda x: x, "mean", r"returned shape \(2, 3\) for 2 samples; return one number"),
        (lambda x: x.sum(), "none", r"returned shape \(\) for 2 samples; return one loss per sample"),
        (lambda x: 3.0, "mean", r"returned a float"),
    ],
)
def test_losses_of_a_wrong_kind_are_errors(result, reduction, message):
    weight = torch.ones(3, requires_grad=True)
    splitter = speedswap.BatchSplitter(micro_batch_size=2, reduction=reduction)
    with pytest.raises(BatchError, match=message):
        splitter.backward(lambda x: result(x * weight), torch.ones(4, 3))


def test_batch_with_a_graph_is_an_error():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(BatchError, match="was computed with a graph"):
        speedswap.BatchSplitter(micro_batch_size=2).backward(lambda x: x.sum(), torch.ones(4, 3) * weight)


def _backward_inside(result, **options):
    def loss_fn(x, y, model):
        loss = functional.cross_entropy(model(x), y)
        loss.backward(**options)
        return result(loss)

    return loss_fn


@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    "loss_fn",
    [
        _backward_inside(lambda loss: loss),
        _backward_inside(lambda loss: loss, retain_graph=True),
        _backward_inside(lambda loss: loss.detach()),
        _backward_inside(lambda loss: loss.item()),
        _backward_inside(lambda loss: None),
    ],
)
def test_backward_in_a_loss_function_is_an_error(loss_fn, earlier, known, size):
    model, inputs = classifier(), batch(8)
    if earlier:
        cross_entropy(model, *inputs).backward()
    before = gradients(model)
    splitter = speedswap.BatchSplitter(model if known else None, micro_batch_size=size)
    with pytest.raises(BatchError, match=r"loss_fn .* calls backward\(\).* let it compute the loss and return it"):
        splitter.backward(lambda x, y: loss_fn(x, y, model), *inputs)
    assert same_bits(gradients(model), before)


def test_backward_in_a_coupled_loss_is_an_error():
    model, inputs = classifier(), batch(8)

    def loss_fn(outputs):
        loss = outputs.square().mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(BatchError, match=r"loss_fn calls backward\(\)"):
        speedswap.BatchSplitter(model, micro_batch_size=2).backward_coupled(model, loss_fn, inputs[0])


def test_a_graph_from_outside_is_an_error():
    """The first micro-batch's backward pass frees it."""
    model, inputs = classifier(), batch(8)
    penalty = model[0].weight.square().sum()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=2, check=False)
    with pytest.raises(BatchError, match="uses a tensor that was computed outside of it, or calls backward"):
        splitter.backward(lambda x, y: cross_entropy(model, x, y) + penalty, *inputs)


def test_a_loss_without_a_graph_is_an_error():
    model, inputs = classifier(), batch(8)
    with pytest.raises(BatchError, match="returned a loss without a graph; compute it from the model's outputs"):
        speedswap.BatchSplitter(model).backward(lambda x, y: cross_entropy(model, x, y).detach(), *inputs)


@pytest.mark.parametrize("of", ["backward", "backward_coupled", "forward", "map"])
def test_a_loss_in_place_of_a_function_is_an_error(of):
    model, inputs = classifier(), batch(8)
    call = getattr(speedswap.BatchSplitter(model), of)
    first = [model] if of == "backward_coupled" else []
    name = "loss_fn" if of.startswith("backward") else "function"
    with pytest.raises(BatchError, match=rf"{name} is a tensor.*; give a function that computes the loss"):
        call(*first, cross_entropy(model, *inputs), *inputs[: 1 if first else 2])
    with pytest.raises(BatchError, match=f"{name} is a float; give a function"):
        call(*first, 3.0, inputs[0])


@pytest.mark.parametrize(("count", "found"), [(None, "a NoneType"), (torch.ones(2), r"a tensor of shape \(2,\)")])
@pytest.mark.parametrize("check", [False, True])
def test_counts_that_are_no_number_are_errors(count, found, check):
    model = classifier()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=2, normalizer=lambda x, y: count, check=check)
    with pytest.raises(BatchError, match=rf"normalizer\(…\) returned {found}; return one number"):
        splitter.backward(lambda x, y: cross_entropy(model, x, y), *batch(4))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_wrong_counts_are_errors(count):
    model = classifier()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=2, normalizer=lambda x, y: torch.tensor(count))
    with pytest.raises(BatchError, match="finite count"):
        splitter.backward(lambda x, y: cross_entropy(model, x, y), *batch(4))


def test_p20_micro_batch_size_changes_nothing_but_memory():
    """Same steps, same samples in each, same learning rates, whatever the size."""
    batches = [batch(samples) for samples in (16, 16, 5)]
    histories = []
    for size in (16, 5, 1):
        torch.manual_seed(1)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        splitter = speedswap.BatchSplitter(model, micro_batch_size=size, check=False)
        history = []
        for inputs in batches:
            seen = []

            def loss_fn(x, y, model=model, seen=seen):
                seen.append(len(x))
                return cross_entropy(model, x, y)

            optimizer.zero_grad()
            loss = splitter.backward(loss_fn, *inputs)
            history.append((sum(seen), scheduler.get_last_lr(), round(float(loss), 12)))
            optimizer.step()
            scheduler.step()
        histories.append(history)
    assert histories[0] == histories[1] == histories[2]
    assert [samples for samples, _, _ in histories[0]] == [16, 16, 5]
