"""AccumulatingOptimizer against the wrapped optimizer's own step with the gradient of the whole batch."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from children import run_script
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import speedswap
from speedswap.batching import AccumulatingOptimizer
from speedswap.errors import BatchError, OptimizerError

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer and name not in ("SparseAdam", "LBFGS")
)


def network(device="cpu", dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device, dtype)


def data(samples, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    features, targets = (
        torch.randn(samples, 8, generator=generator, dtype=torch.float64).to(device, dtype).split([5, 3], 1)
    )
    return features, targets


def parameters_for(name, model):
    return [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else list(model.parameters())


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def micro_batches(batch, size):
    return list(zip(*[part.split(size) for part in batch], strict=True))


def train(model, optimizer, parts):
    for part in parts:
        optimizer.zero_grad()
        loss_of(model, part).backward()
        optimizer.step()


def micro_step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def difference(ours, theirs):
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# ---------------------------------------------------------------------- any optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_with_the_whole_batch(name, device):
    kind = getattr(torch.optim, name)
    ours, theirs = network(device), network(device)
    optimizer = AccumulatingOptimizer(kind(parameters_for(name, ours), lr=0.01), 4)
    reference = kind(parameters_for(name, theirs), lr=0.01)
    batch = data(3 * 32, device)
    train(ours, optimizer, micro_batches(batch, 8))
    train(theirs, reference, micro_batches(batch, 32))
    # Muon orthogonalizes in bfloat16, where the last bit of a gradient may decide the last of eight.
    assert difference(ours, theirs) <= (1e-2 if name == "Muon" else 1e-11)
    assert difference(ours, network(device)) > 1e-4
    assert optimizer.updates == 3


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sparse_gradients_stay_sparse(kind, reduction, device):
    weight = torch.randn(10, 4, dtype=torch.float64, device=device)
    ours, theirs = (nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True) for _ in range(2))
    optimizer = AccumulatingOptimizer(getattr(torch.optim, kind)(ours.parameters(), lr=0.1), 3, reduction=reduction)
    reference = getattr(torch.optim, kind)(theirs.parameters(), lr=0.1)
    ids = torch.tensor([[1, 2], [2, 2], [7, 1]], device=device)
    for part in ids:
        getattr(ours(part).square(), reduction)().backward()
        optimizer.step()
    getattr(theirs(ids).square(), reduction)().backward()
    reference.step()
    assert ours.weight.grad.is_sparse
    assert sorted(ours.weight.grad.coalesce().indices()[0].tolist()) == [1, 2, 7]
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-14)


def test_sparse_and_dense_gradients_of_one_weight_are_added():
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 3)
    for step in range(3):
        looked_up = nn.functional.embedding(torch.tensor([1]), weight, sparse=step != 1)
        (looked_up.sum() if step != 1 else weight.sum()).backward()
        optimizer.step()
    expected = torch.full((4, 2), -1 / 3)
    expected[1] = -1.0
    torch.testing.assert_close(weight.detach(), expected)


def test_sum_losses_are_added_up(device):
    ours, theirs = network(device), network(device)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(ours.parameters(), lr=0.01), 4, reduction="sum")
    batch = data(32, device)
    for part in micro_batches(batch, 8):
        (loss_of(ours, part) * 24).backward()  # 8 samples of 3 outputs
        optimizer.step()
    (loss_of(theirs, batch) * 96).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.01).step()
    assert difference(ours, theirs) <= 1e-12


def test_one_step_is_the_plain_optimizer_bit_for_bit(device):
    ours, theirs = network(device, torch.float32), network(device, torch.float32)
    optimizer = AccumulatingOptimizer(torch.optim.AdamW(ours.parameters()), 1)
    batch = data(32, device, torch.float32)
    train(ours, optimizer, micro_batches(batch, 8))
    train(theirs, torch.optim.AdamW(theirs.parameters()), micro_batches(batch, 8))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert optimizer.updates == optimizer.micro_steps == 4


def test_a_parameter_without_gradient_counts_as_zero_there_and_is_left_alone_without_any():
    weights = [nn.Parameter(torch.ones(())) for _ in range(4)]
    optimizer = AccumulatingOptimizer(torch.optim.SGD(weights, lr=1.0, weight_decay=0.5), 4)
    early, late, always, never = weights
    for step in range(4):
        (always + (early if step == 0 else 0) + (8 * late if step == 2 else 0)).backward()
        optimizer.step()
    assert [w.item() for w in weights] == [1 - 0.5 - 0.25, 1 - 0.5 - 2.0, 1 - 0.5 - 1.0, 1.0]
    assert never.grad is None


def test_number_of_steps_may_change_after_each_update():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 1)
    stepped = []
    for _ in range(6):
        micro_step(optimizer, weight)
        stepped.append(optimizer.stepped)
        optimizer.accumulation_steps = optimizer.updates + 1
    assert stepped == [True, False, True, False, False, True]
    assert weight.item() == -3.0
    assert optimizer.accumulation_steps == 4


def test_new_number_of_steps_holds_from_the_next_window_on():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    stepped = []
    for step in range(5):
        micro_step(optimizer, weight)
        stepped.append(optimizer.stepped)
        if step == 0:
            optimizer.accumulation_steps = 3
    assert stepped == [False, True, False, False, True]


def test_half_of_the_predecessors_update_is_not_scaled_by_the_number_of_steps():
    """Adding gradients of mean losses up without dividing made them exactly ``steps`` too large."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    for _ in range(4):
        micro_step(optimizer, weight)
    assert weight.item() == -1.0


# ---------------------------------------------------------------------- windows that end early


def test_p05_last_partial_window_has_the_mean_of_its_own_samples(device):
    ours, theirs = network(device), network(device)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), 4)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    batch = data(6 * 8, device)
    with optimizer.epoch():
        train(ours, optimizer, micro_batches(batch, 8))
        assert (optimizer.updates, optimizer.pending) == (1, 2)
    train(theirs, reference, micro_batches(batch, 32))  # 32 samples, then the 16 that are left
    assert (optimizer.updates, optimizer.pending, optimizer.stepped) == (2, 0, True)
    assert difference(ours, theirs) <= 1e-12


def test_p05_micro_batches_of_different_sizes_are_weighted(device):
    ours, theirs = network(device), network(device)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), 4)
    batch = data(29, device)
    with optimizer.epoch():
        for part in micro_batches(batch, 11):  # 11, 11, 7
            loss_of(ours, part).backward()
            optimizer.step(weight=len(part[0]))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), [batch])
    assert difference(ours, theirs) <= 1e-12


def test_partial_window_does_not_leak_into_the_next_epoch():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    for _ in range(2):
        for _ in range(6):
            micro_step(optimizer, weight)
        assert optimizer.flush()
        optimizer.zero_grad()
    assert (optimizer.updates, weight.item()) == (4, -4.0)
    assert not optimizer.flush()
    assert not optimizer.stepped


def test_flush_refuses_gradients_that_no_step_has_taken_up():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    micro_step(optimizer, weight)
    weight.backward()
    with pytest.raises(BatchError, match="no step"):
        optimizer.flush()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.flush()
    assert weight.item() == -1.0


def test_an_epoch_that_fails_is_not_applied():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)

    def interrupted():
        with optimizer.epoch():
            micro_step(optimizer, weight)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (weight.item(), optimizer.pending) == (0.0, 1)
    optimizer.discard()
    assert not optimizer.flush()
    assert weight.item() == 0.0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "model"])
def test_zero_grad_never_loses_what_was_taken_up(set_to_none, when):
    model = nn.Linear(1, 1, bias=False)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    start = model.weight.item()
    for factor in (1.0, 3.0, 5.0, 7.0):
        if when == "before":
            optimizer.zero_grad(set_to_none=set_to_none)
        (model.weight * factor).sum().backward()
        optimizer.step()
        if when == "after":
            optimizer.zero_grad(set_to_none)
        elif when == "model":
            model.zero_grad(set_to_none)
    assert model.weight.item() == pytest.approx(start - 2.0 - 6.0)


class TakesNothing(torch.optim.SGD):
    """An optimizer of the time before ``set_to_none``."""

    def zero_grad(self):
        super().zero_grad()


@pytest.mark.parametrize("kind", [TakesNothing, torch.optim.SGD])
def test_zero_grad_works_whatever_the_wrapped_optimizers_own_takes(kind):
    """Passing ``set_to_none`` on to one that takes nothing was a TypeError."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(kind([weight], lr=1.0), 2)
    for factor in (1.0, 3.0):
        optimizer.zero_grad()
        assert weight.grad is None
        (weight * factor).backward()
        optimizer.step()
    assert weight.item() == -2.0
    weight.backward()
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad == 0


def test_gradients_are_copied_not_kept():
    """DistributedDataParallel writes all batches' gradients into the same buffers."""
    weight, buffer = nn.Parameter(torch.zeros(3)), torch.empty(3)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    for value in (1.0, 3.0):
        weight.grad = buffer.fill_(value)
        optimizer.step()
    assert weight.tolist() == [-2.0] * 3


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p11_error_of_half_precision_gradients_does_not_grow_with_their_number(dtype, device):
    generator = torch.Generator().manual_seed(0)
    errors, in_half = {}, {}
    for steps in (1, 8, 64, 512):
        gradients = (1 + torch.randn(steps, 1000, generator=generator)).to(device, dtype)
        weight = nn.Parameter(torch.zeros(1000, dtype=dtype, device=device))
        optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), steps)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        assert optimizer.stepped
        assert weight.grad.dtype == dtype
        exact = gradients.double().mean(0)
        naive = functools.reduce(torch.add, gradients / steps)
        errors[steps] = ((weight.grad - exact).norm() / exact.norm()).item()
        in_half[steps] = ((naive - exact).norm() / exact.norm()).item()
    rounding = torch.finfo(dtype).eps
    assert max(errors.values()) < 0.5 * rounding
    assert in_half[512] > 2 * errors[512]  # the result of an accumulator in the gradients' dtype


def test_p11_accumulators_are_float32_for_half_precision_and_otherwise_as_the_gradient(device):
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
    weights = [nn.Parameter(torch.zeros(2, dtype=dtype, device=device)) for dtype in dtypes]
    optimizer = AccumulatingOptimizer(torch.optim.SGD(weights, lr=1.0), 2)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = optimizer.state_dict()["accumulation"]["window"]["gradients"]
    assert [kept[place].dtype for place in range(5)] == [torch.float32] * 3 + [torch.float64, torch.complex64]
    optimizer.flush()
    assert [weight.grad.dtype for weight in weights] == dtypes


# ---------------------------------------------------------------------- GradScaler


def scaled_training(weight, scaler, optimizer, factors, unscale=False):
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(weight * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_p12_gradients_are_unscaled_once_and_average_right(unscale, steps, fused):
    weight = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0, fused=fused), steps)
    scaled_training(weight, scaler, optimizer, (1.0, 3.0, 5.0, 7.0), unscale)
    assert weight.item() == -16.0 / steps
    assert optimizer.updates == 4 // steps


def test_p12_two_unit_gradients_add_up_to_two():
    """Unscaling in place at every call left earlier gradients smaller than later ones: 1.0625 instead of 2."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2, reduction="sum")
    scaled_training(weight, torch.amp.GradScaler("cpu", init_scale=16.0), optimizer, (1.0, 1.0))
    assert weight.item() == -2.0


def test_p12_scale_may_grow_within_a_window():
    weight = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    scaled_training(weight, scaler, optimizer, (1.0, 3.0, 5.0, 7.0))
    assert scaler.get_scale() == 64.0
    assert weight.item() == -4.0


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("unscale", [False, True])
def test_p12_infinity_in_any_micro_batch_skips_its_window_alone(bad, unscale):
    weight = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    inner = torch.optim.Adam([weight], lr=0.1)
    optimizer = AccumulatingOptimizer(inner, 4)
    factors = [1.0] * 4
    factors[bad] = float("inf")
    scaled_training(weight, scaler, optimizer, factors, unscale)
    assert (weight.item(), optimizer.updates, optimizer.stepped, optimizer.pending) == (0.0, 0, False, 0)
    assert not inner.state
    assert scaler.get_scale() == 8.0  # backed off once
    assert optimizer.skipped == 4
    scaled_training(weight, scaler, optimizer, [1.0] * 4, unscale)
    assert (optimizer.updates, optimizer.stepped) == (1, True)
    assert weight.grad.item() == 1.0
    assert inner.state[weight]["step"] == 1


def test_p12_flush_needs_no_scaler():
    weight = nn.Parameter(torch.zeros(()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    scaled_training(weight, scaler, optimizer, [1.0, 3.0])
    assert optimizer.flush()
    assert weight.item() == -2.0
    scaled_training(weight, scaler, optimizer, [1.0, float("nan")])
    assert not optimizer.flush()
    assert weight.item() == -2.0


def test_p12_gradients_in_float16_overflow_no_sum():
    """Four scaled gradients near float16's largest number: their sum is beyond it, their mean is not."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    for _ in range(4):
        weight.grad = torch.tensor(2.0**15, dtype=torch.float16)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert weight.item() == -1.0


# ---------------------------------------------------------------------- once for each window


def test_p13_all_that_belongs_to_an_update_happens_once_for_each_window(device):
    ours, theirs = network(device), network(device)
    batch = data(3 * 32, device)

    def parts_of_training(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return scheduler, average

    inner = torch.optim.AdamW(ours.parameters(), lr=0.1, weight_decay=0.3)
    optimizer = AccumulatingOptimizer(inner, 4)
    scheduler, average = parts_of_training(ours, optimizer)
    norms = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(clip_grad_norm_(ours.parameters(), 0.05).item()))
    for part in micro_batches(batch, 8):
        optimizer.zero_grad()
        loss_of(ours, part).backward()
        optimizer.step()
        if optimizer.stepped:
            scheduler.step()
            average.update_parameters(ours)

    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.3)
    their_scheduler, their_average = parts_of_training(theirs, reference)
    their_norms = []
    for part in micro_batches(batch, 32):
        reference.zero_grad()
        loss_of(theirs, part).backward()
        their_norms.append(clip_grad_norm_(theirs.parameters(), 0.05).item())
        reference.step()
        their_scheduler.step()
        their_average.update_parameters(theirs)

    assert norms == pytest.approx(their_norms, rel=1e-12)
    assert len(norms) == 3
    assert {int(state["step"]) for state in inner.state.values()} == {3}
    assert scheduler.get_last_lr() == their_scheduler.get_last_lr() == [0.1 * 0.5**3]
    assert difference(ours, theirs) <= 1e-10
    assert difference(average.module, their_average.module) <= 1e-10


def test_p13_momentum_moves_once_for_each_window():
    weight = nn.Parameter(torch.zeros(()))
    inner = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    optimizer = AccumulatingOptimizer(inner, 2)
    for _ in range(4):
        micro_step(optimizer, weight)
        if optimizer.stepped:
            optimizer.zero_grad()
    assert inner.state[weight]["momentum_buffer"].item() == 1.5
    assert weight.item() == -2.5


def test_p13_step_hooks_of_all_kinds_run_once_for_each_update():
    weight = nn.Parameter(torch.zeros(()))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = AccumulatingOptimizer(inner, 3)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(("pre", opt is inner, weight.grad.item())))
    inner.register_step_post_hook(lambda opt, *_: seen.append(("post", opt is inner)))
    everywhere = register_optimizer_step_post_hook(lambda opt, *_: seen.append(("all", opt is inner)))
    try:
        for factor in (1.0, 2.0, 6.0, 1.0):
            micro_step(optimizer, weight * factor)
    finally:
        everywhere.remove()
    assert seen == [("pre", True, 3.0), ("post", True), ("all", True)]


def test_p13_a_hook_may_step_the_scheduler():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    for _ in range(5):
        micro_step(optimizer, weight)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_profiler_sees_each_update():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(4):
            micro_step(optimizer, weight)
    assert [event.name for event in profile.events()].count("Optimizer.step#SGD.step") == 2


def test_p09_an_update_that_fails_is_not_applied_again():
    weight = nn.Parameter(torch.zeros(()))

    class OutOfMemoryAfterwards(torch.optim.SGD):
        failing = True

        def step(self, closure=None):
            super().step(closure)
            if self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    inner = OutOfMemoryAfterwards([weight], lr=1.0)
    optimizer = AccumulatingOptimizer(inner, 2)
    for factor in (1.0, 3.0):
        (weight * factor).backward()
        if factor == 3.0:
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        else:
            optimizer.step()
    assert (weight.item(), optimizer.pending, optimizer.stepped) == (-2.0, 0, False)
    inner.failing = False
    assert not optimizer.flush()
    assert weight.item() == -2.0
    optimizer.zero_grad()
    for _ in range(2):
        micro_step(optimizer, weight)
    assert weight.item() == -3.0


# ---------------------------------------------------------------------- closures


def test_closure_is_evaluated_once_and_its_loss_returned():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    calls, losses = [], []
    for factor in (1.0, 3.0):

        def closure(factor=factor):
            optimizer.zero_grad()
            calls.append(factor)
            loss = (weight - 1) * factor
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert calls == [1.0, 3.0]
    assert losses == [-1.0, -3.0]
    assert weight.item() == -2.0


def test_optimizer_that_evaluates_the_loss_itself_is_refused_with_what_to_do():
    with pytest.raises(OptimizerError, match=r"LBFGS evaluates the loss itself.*BatchSplitter\.backward"):
        AccumulatingOptimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(()))]), 2)


def test_lbfgs_takes_a_whole_batch_from_a_splitter_in_its_closure():
    ours, theirs = network(), network()
    inputs, targets = data(30)
    splitter = speedswap.BatchSplitter(ours, micro_batch_size=10)

    def stepped(model, evaluate):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)

        def closure():
            optimizer.zero_grad()
            return evaluate()

        optimizer.step(closure)

    def whole():
        loss = loss_of(theirs, (inputs, targets))
        loss.backward()
        return loss

    stepped(ours, lambda: splitter.backward(lambda *part: loss_of(ours, part), inputs, targets))
    stepped(theirs, whole)
    assert difference(ours, theirs) <= 1e-8
    assert difference(ours, network()) > 1e-2


def test_closures_and_batches_are_let_go_after_each_window():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    alive = []
    for _ in range(2):
        batch = torch.ones(2)
        alive.append(weakref.ref(batch))

        def closure(batch=batch):
            loss = (weight * batch).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    del batch, closure
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


# ---------------------------------------------------------------------- the wrapped optimizer's own


def test_it_is_an_optimizer_with_the_wrapped_ones_state_and_defaults():
    """Wrapping used to drop both: momentum was gone, and a later group got another learning rate."""
    weight = nn.Parameter(torch.zeros(()))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    weight.backward()
    inner.step()
    optimizer = AccumulatingOptimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups
    assert "momentum_buffer" in optimizer.state[weight]
    late = nn.Parameter(torch.zeros(()))
    optimizer.add_param_group({"params": [late]})
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.5]
    optimizer.param_groups[1]["lr"] = 0.25
    weight.grad = None
    for _ in range(2):
        micro_step(optimizer, weight + late)
    assert weight.item() == pytest.approx(-0.5 - 0.5 * 1.9)
    assert late.item() == -0.25
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state is inner.state
    assert optimizer.param_groups is inner.param_groups


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=10),
        lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 1.0),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    ],
)
def test_schedulers_set_the_wrapped_optimizers_learning_rate(scheduler):
    ours, theirs = (nn.Parameter(torch.zeros(())) for _ in range(2))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([ours], lr=0.5, momentum=0.9), 2)
    reference = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    our_scheduler, their_scheduler = scheduler(optimizer), scheduler(reference)
    for _ in range(8):
        micro_step(optimizer, ours)
        if optimizer.stepped:
            our_scheduler.step()
    for _ in range(4):
        reference.zero_grad()
        theirs.backward()
        reference.step()
        their_scheduler.step()
    assert torch.equal(ours, theirs)
    assert our_scheduler.get_last_lr() == their_scheduler.get_last_lr()


def test_reduce_on_plateau_takes_it():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(2):
        scheduler.step(1.0)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "4", lambda update: 1])
def test_number_of_steps_must_be_a_positive_integer(steps):
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    with pytest.raises(BatchError, match=r"accumulation_steps.* must be an integer of at least 1"):
        AccumulatingOptimizer(inner, steps)
    optimizer = AccumulatingOptimizer(inner, 3)
    with pytest.raises(BatchError, match="accumulation_steps"):
        optimizer.accumulation_steps = steps
    assert optimizer.accumulation_steps == 3


def test_unfit_arguments_are_refused():
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    with pytest.raises(OptimizerError, match="optimizer is a Linear; give a torch"):
        AccumulatingOptimizer(nn.Linear(1, 1), 2)
    with pytest.raises(OptimizerError, match="accumulates already"):
        AccumulatingOptimizer(AccumulatingOptimizer(inner, 2), 2)
    with pytest.raises(BatchError, match="reduction is 'none'"):
        AccumulatingOptimizer(inner, 2, reduction="none")
    with pytest.raises(BatchError, match="weight is 0"):
        AccumulatingOptimizer(inner, 2).step(weight=0)
    with pytest.raises(BatchError, match="sums are not weighted"):
        AccumulatingOptimizer(inner, 2, reduction="sum").step(weight=2)


# ---------------------------------------------------------------------- saving


def run_and_resume(model, optimizer, parts):
    """Run the rest of a training, after everything has been saved and loaded into fresh objects."""
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    fresh = network(dtype=next(model.parameters()).dtype)
    again = AccumulatingOptimizer(torch.optim.Adam(fresh.parameters(), lr=0.5), 99)
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    again.accumulation_steps = 4
    train(fresh, again, parts)
    return fresh, again


@pytest.mark.parametrize("stop", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p25_training_resumes_mid_window_bit_for_bit(stop, dtype):
    parts = micro_batches(data(64, dtype=dtype), 8)
    straight, halves = network(dtype=dtype), network(dtype=dtype)
    optimizer = AccumulatingOptimizer(torch.optim.Adam(straight.parameters(), lr=0.01), 4)
    train(straight, optimizer, parts)
    first = AccumulatingOptimizer(torch.optim.Adam(halves.parameters(), lr=0.01), 4)
    train(halves, first, parts[:stop])
    resumed, again = run_and_resume(halves, first, parts[stop:])
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert (again.updates, again.micro_steps, again.pending) == (2, 8, 0)


def test_p25_training_resumes_in_another_process(tmp_path):
    parts = micro_batches(data(32, dtype=torch.float32), 8)
    straight, half = (nn.Linear(5, 3) for _ in range(2))
    half.load_state_dict(straight.state_dict())
    optimizer = AccumulatingOptimizer(torch.optim.Adam(straight.parameters()), 4)
    first = AccumulatingOptimizer(torch.optim.Adam(half.parameters()), 4)
    train(half, first, parts[:2])
    torch.save([half.state_dict(), first.state_dict(), parts[2:]], tmp_path / "half.pt")
    train(straight, optimizer, parts)
    code = """
import sys, torch
from speedswap.batching import AccumulatingOptimizer
weights, state, parts = torch.load(sys.argv[1] + "/half.pt", weights_only=True)
model = torch.nn.Linear(5, 3)
model.load_state_dict(weights)
optimizer = AccumulatingOptimizer(torch.optim.Adam(model.parameters()), 4)
optimizer.load_state_dict(state)
for features, targets in parts:
    (model(features) - targets).square().mean().backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1] + "/done.pt")
"""
    ended = run_script(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    done = torch.load(tmp_path / "done.pt", weights_only=True)
    assert all(torch.equal(value, done[name]) for name, value in straight.state_dict().items())


def test_p25_sparse_windows_and_skipped_ones_resume():
    saved = io.BytesIO()
    table = nn.Embedding(6, 2, sparse=True)
    start = table.weight.detach().clone()
    optimizer = AccumulatingOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), 2)
    table(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    optimizer.discard()
    optimizer.load_state_dict(torch.load(saved, weights_only=True))
    table(torch.tensor([5, 0])).sum().backward()
    optimizer.step()
    moved = (start - table.weight.detach())[:, 0].tolist()
    assert moved == pytest.approx([0.5, 0.5, 0, 0, 0, 1.0], abs=1e-6)

    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    scaled_training(weight, torch.amp.GradScaler("cpu", init_scale=16.0), optimizer, [float("inf")])
    again = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    again.load_state_dict(optimizer.state_dict())
    weight.grad = torch.ones(())
    again.step()
    assert (weight.item(), again.skipped, again.pending) == (0.0, 2, 0)


def test_p25_states_go_between_plain_and_accumulating_optimizers():
    weight = nn.Parameter(torch.zeros(()))
    plain = torch.optim.Adam([weight], lr=0.25)
    weight.backward()
    plain.step()
    optimizer = AccumulatingOptimizer(torch.optim.Adam([weight]), 2)
    micro_step(optimizer, weight)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.pending, optimizer.updates, optimizer.param_groups[0]["lr"]) == (0, 0, 0.25)
    assert optimizer.state[weight]["step"] == 1
    back = torch.optim.Adam([weight])
    back.load_state_dict(optimizer.state_dict())
    assert back.state_dict()["state"][0]["exp_avg"] == plain.state_dict()["state"][0]["exp_avg"]


def test_p25_states_of_another_reduction_are_refused():
    weight = nn.Parameter(torch.zeros(()))
    sums = AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.5), 2, reduction="sum")
    means = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    micro_step(sums, weight)
    with pytest.raises(BatchError, match=r"reduction='sum' pending, but this optimizer has 'mean'"):
        means.load_state_dict(sums.state_dict())
    assert means.param_groups[0]["lr"] == 1.0
    sums.flush()
    means.load_state_dict(sums.state_dict())
    assert means.param_groups[0]["lr"] == 0.5


def test_p25_optimizers_loaded_from_one_state_do_not_share_it():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 3)
    micro_step(optimizer, weight)
    state = optimizer.state_dict()
    others = [AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 3) for _ in range(2)]
    for other in others:
        other.load_state_dict(state)
    for factor in (4.0, 7.0):
        micro_step(others[0], weight * factor)
    assert weight.item() == pytest.approx(-4.0)
    others[1].zero_grad()
    others[1].flush()
    assert weight.item() == pytest.approx(-5.0)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_by_themselves(how):
    parts = micro_batches(data(32), 8)
    model = network()
    optimizer = AccumulatingOptimizer(torch.optim.Adam(model.parameters()), 4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, parts[:2])
    copied, its_optimizer = how((model, optimizer))
    before = copy.deepcopy(copied.state_dict())
    train(model, optimizer, parts[2:])
    assert all(torch.equal(before[name], value) for name, value in copied.state_dict().items())
    train(copied, its_optimizer, parts[2:])
    assert its_optimizer.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert scheduler.optimizer is optimizer


# ---------------------------------------------------------------------- parallel training


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_gradients_of_parallel_models_are_averaged(how):
    """DistributedDataParallel's are views of its buffers, FSDP2's are DTensors; both in the middle of being saved."""
    ours, theirs = network(), network()
    batch = data(64)
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(ours, gradient_as_bucket_view=True)
    else:
        model = fully_shard(ours, mesh=init_device_mesh("cpu", (1,)))
    optimizer = AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 4)
    for index, part in enumerate(micro_batches(batch, 8)):
        micro_step(optimizer, loss_of(model, part))
        if index == 5:
            optimizer.load_state_dict(optimizer.state_dict())
    train(theirs, torch.optim.AdamW(theirs.parameters()), micro_batches(batch, 32))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        whole = a.full_tensor() if how == "FSDP2" else a
        torch.testing.assert_close(whole, b, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------- row-swapped embeddings


def swapped(device="cpu"):
    return speedswap.Embedding(20, 3, init=lambda rows: nn.init.ones_(rows), dtype=torch.float64, device=device)


def table_of(embedding):
    return embedding.table.gather(torch.arange(20), device="cpu").weight.clone()


@pytest.mark.parametrize("second", [[1, 2, 3], [7, 8]], ids=["as many rows", "fewer rows"])
def test_rows_of_different_batches_are_not_averaged_by_position(second, device):
    items = swapped(device)
    optimizer = AccumulatingOptimizer(torch.optim.Adam(items.parameters(), lr=0.1), 2)
    before = table_of(items)
    items(torch.tensor([4, 5, 6], device=device)).sum().backward()
    optimizer.step()
    items(torch.tensor(second, device=device)).sum().backward()
    with pytest.raises(OptimizerError, match=r"speedswap.Embedding.*call loss.backward\(\) several times"):
        optimizer.step()
    assert torch.equal(table_of(items), before)
    assert (optimizer.pending, optimizer.updates) == (1, 0)


@pytest.mark.parametrize("between", ["nothing", "a saved state"])
def test_rows_that_a_switcher_puts_into_a_weight_are_not_averaged_by_position(between):
    """As many rows of another batch have the same shape, and were averaged with those before without a word."""
    model = nn.Embedding(3, 4)
    rows = speedswap.ModelFactory(model, total_classes=20, embed_dimension=4)
    rows.uniformDistributionInit(-0.1, 0.1)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    rows.beforeForwardPass(np.array([4, 5, 6]))
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    if between == "a saved state":
        optimizer.load_state_dict(optimizer.state_dict())
    rows.beforeForwardPass(np.array([1, 2, 3]))
    model(torch.arange(3)).sum().backward()
    with pytest.raises(OptimizerError, match=r"ModelFactory.*cannot be averaged by position"):
        optimizer.step()
    assert (optimizer.pending, optimizer.updates) == (1, 0)


def test_embedding_accumulates_by_several_backward_calls(device):
    """The refusal's remedy works."""
    ours, theirs = swapped(device), nn.Embedding(20, 3, dtype=torch.float64, device=device)
    nn.init.ones_(theirs.weight)
    optimizer = AccumulatingOptimizer(torch.optim.Adagrad(ours.parameters(), lr=0.1), 1)
    reference = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for window in torch.tensor([[[4, 5, 6], [5, 1, 5]], [[1, 2, 3], [7, 7, 7]]], device=device):
        optimizer.zero_grad()
        for ids in window:
            (ours(ids).square().mean() / len(window)).backward()
        optimizer.step()
        reference.zero_grad()
        theirs(window).square().mean().backward()
        reference.step()
    torch.testing.assert_close(table_of(ours), theirs.weight.detach().cpu(), rtol=1e-12, atol=1e-14)
    assert optimizer.updates == 2


def test_embedding_is_attached_to_the_wrapped_optimizer(device):
    items = swapped(device)
    optimizer = AccumulatingOptimizer(torch.optim.Adam(items.parameters(), lr=0.1), 1)
    speedswap.attach(optimizer, items)
    assert sorted(items.table.columns) == ["exp_avg", "exp_avg_sq", "weight"]
    items(torch.tensor([4], device=device)).sum().backward()
    optimizer.step()
    assert table_of(items)[4].tolist() == pytest.approx([0.9] * 3)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (20, 3)


def test_splitter_and_accumulating_optimizer_work_together(device):
    """Batches that are split, and one update for three of them."""
    ours, theirs = network(device), network(device)
    optimizer = AccumulatingOptimizer(torch.optim.Adam(ours.parameters(), lr=0.01), 3)
    splitter = speedswap.BatchSplitter(ours, micro_batch_size=5)
    batch = data(48, device)
    for part in micro_batches(batch, 16):
        optimizer.zero_grad()
        splitter.backward(lambda *samples: loss_of(ours, samples), *part)
        optimizer.step()
    train(theirs, torch.optim.Adam(theirs.parameters(), lr=0.01), [batch])
    assert difference(ours, theirs) <= 1e-11


def test_embedding_in_a_window_of_one_micro_step_reaches_the_table(device):
    items = swapped(device)
    optimizer = AccumulatingOptimizer(torch.optim.SGD(items.parameters(), lr=1.0), 4)
    items(torch.tensor([4, 5], device=device)).sum().backward()
    optimizer.step()
    assert optimizer.flush()
    assert table_of(items)[:, 0].tolist() == [1.0] * 4 + [0.0] * 2 + [1.0] * 14


def test_state_keeps_its_order_and_is_a_plain_dictionary():
    optimizer = AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0), 2)
    assert list(optimizer.state_dict()) == ["state", "param_groups", "accumulation"]
    assert isinstance(optimizer._optimizer_step_pre_hooks, OrderedDict)
    assert repr(optimizer).startswith("AccumulatingOptimizer(accumulation_steps=2, SGD (")
