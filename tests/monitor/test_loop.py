"""The event monitor: silent on correct loops, and one code per omission."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import speedswap
from speedswap.monitor import EventMonitor, LoopWarning, WarningPolicy


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, samples=6):
    return model(torch.randn(samples, 4)).square().mean()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_right_loop_is_silent(model, optimizer, codes_said, set_to_none, accumulation_steps):
    with codes_said() as said, EventMonitor(model, optimizer, accumulation_steps=accumulation_steps, warn="expert"):
        for _ in range(4):
            for _ in range(accumulation_steps):
                loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert said == []


def test_zeroing_before_backward_is_silent_too(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer, warn="expert"):
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert said == []


def test_model_of_one_parameter_is_followed(codes_said):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with codes_said() as said, EventMonitor(model, optimizer, warn="expert"):
        for set_to_none in (True, False, True):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert said == []
    with codes_said() as said, EventMonitor(model, optimizer):
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
    assert said == ["SW103"]


def test_sw101_step_without_backward(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer):
        optimizer.step()
    assert said == ["SW101"]


def test_sw101_second_step_after_one_backward(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
    assert said == ["SW101"]


def test_sw102_backward_twice(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer) as monitor:
        loss_of(model).backward()
        loss_of(model).backward()
        assert monitor.backward_passes == 2
        optimizer.step()
    assert said == ["SW102"]


def test_sw102_is_seen_when_gradients_are_clipped_in_between(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer):
        for _ in range(2):
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert said == ["SW102"]


def test_any_number_of_passes_may_be_meant(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer, accumulation_steps=None, warn="expert"):
        for passes in (1, 5, 2):
            for _ in range(passes):
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert said == []


def test_sw103_missing_zero_grad(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer) as monitor:
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    assert said == ["SW103"]
    assert monitor.policy.counts["SW103"] == 2


def test_sw104_left_over_partial_window(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer, accumulation_steps=2):
        for index in range(5):
            loss_of(model).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert said == ["SW104"]


def test_sw104_at_the_end_of_an_epoch_and_not_again(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer) as monitor:
        loss_of(model).backward()
        monitor.end_epoch()
        optimizer.zero_grad()
    assert said == ["SW104"]


def test_gradients_that_were_zeroed_are_not_left_over(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer):
        loss_of(model).backward()
        optimizer.zero_grad(set_to_none=False)
    assert said == []


def test_an_exception_is_not_covered_by_a_warning(model, optimizer, codes_said):
    def fail_halfway():
        with EventMonitor(model, optimizer):
            loss_of(model).backward()
            raise ZeroDivisionError

    with codes_said() as said, pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert said == []


def test_sw105_names_parameters_without_gradient(model, optimizer):
    with EventMonitor(model, optimizer):
        model[0](torch.randn(3, 4)).sum().backward()
        with pytest.warns(LoopWarning, match=r"SW105: .*2\.weight, 2\.bias"):
            optimizer.step()


def test_sw106_and_sw107_model_and_optimizer_that_do_not_belong_together(model, codes_said):
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model[0].parameters(), *other.parameters()], lr=0.1)
    with codes_said() as said:
        EventMonitor(model, optimizer).close()
    assert said == ["SW106", "SW107"]


def test_sw108_stepping_in_evaluation_mode_is_for_experts(model, optimizer, codes_said):
    model.eval()
    for level, wanted in (("user", []), ("expert", ["SW108"])):
        optimizer.zero_grad()
        with codes_said() as said, EventMonitor(model, optimizer, warn=level):
            loss_of(model).backward()
            optimizer.step()
        assert said == wanted


def test_sw109_step_before_the_window_is_full_is_for_experts(model, optimizer, codes_said):
    with codes_said() as said, EventMonitor(model, optimizer, accumulation_steps=2, warn="expert"):
        loss_of(model).backward()
        optimizer.step()
    assert said == ["SW109"]


def test_sw110_zeroed_before_use_is_for_experts(model, optimizer, codes_said):
    for level, wanted in (("user", []), ("expert", ["SW110"])):
        with codes_said() as said, EventMonitor(model, optimizer, warn=level):
            loss_of(model).backward()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert said == wanted


def test_step_that_a_scaler_skips_is_silent(model, optimizer, codes_said):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with codes_said() as said, EventMonitor(model, optimizer) as monitor:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(loss_of(model) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert said == []
    assert monitor.steps == 2


def test_closures_are_understood(model, codes_said):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs = torch.randn(6, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    with codes_said() as said, EventMonitor(model, optimizer, warn="expert"):
        optimizer.step(closure)
        optimizer.step(closure)
    assert said == []


def test_parameters_added_later_are_followed(model, codes_said):
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with codes_said() as said, EventMonitor(model, optimizer, warn=WarningPolicy("user", ignore={"SW106"})):
        for index in range(3):
            if index == 1:
                optimizer.add_param_group({"params": list(model[2].parameters())})
            loss_of(model).backward()
            optimizer.step()
            model.zero_grad()
    assert said == ["SW105"]  # at the step in which they first were there, their gradients had come before the hooks


def test_gradients_and_steps_are_as_without_it(model):
    twin = copy.deepcopy(model)
    inputs = torch.randn(6, 4)
    for one, watched in ((model, True), (twin, False)):
        optimizer = torch.optim.Adam(one.parameters())
        monitor = EventMonitor(one, optimizer) if watched else None
        for _ in range(3):
            one(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor:
            monitor.close()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_closed_monitor_hears_nothing(model, optimizer, codes_said):
    monitor = EventMonitor(model, optimizer)
    monitor.close()
    monitor.close()
    with codes_said() as said:
        optimizer.step()
        loss_of(model).backward()
        loss_of(model).backward()
    assert said == []
    assert (monitor.steps, monitor.backward_passes) == (0, 0)


def test_forgotten_monitor_goes_away_and_keeps_no_model(model, optimizer, codes_said):
    monitor = EventMonitor(model, optimizer)
    monitor_ref, parameter_ref = weakref.ref(monitor), weakref.ref(model[0].weight)
    del monitor
    gc.collect()
    assert monitor_ref() is None
    with codes_said() as said:
        optimizer.step()
    assert said == []
    optimizer.param_groups.clear()
    model[0] = nn.Identity()
    gc.collect()
    assert parameter_ref() is None


def test_watched_model_can_be_copied_and_saved(model, optimizer):
    with EventMonitor(model, optimizer):
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_warning_points_at_the_line_of_the_loop(model, optimizer):
    with warnings.catch_warnings(record=True) as caught, EventMonitor(model, optimizer):
        warnings.simplefilter("always")
        optimizer.step()
        loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_batch_is_one_pass_whatever_runs_out_of_memory(model, codes_said, dtype):
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(inputs):
        if len(inputs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(inputs).square().mean()

    with codes_said() as said, EventMonitor(model, optimizer, warn="expert") as monitor:
        splitter = speedswap.BatchSplitter(model, callbacks=[monitor])
        for _ in range(3):
            splitter.backward(loss_fn, torch.randn(16, 4, dtype=dtype))
            assert monitor.backward_passes == 1
            optimizer.step()
            optimizer.zero_grad()
    assert said == []
    assert splitter.micro_batch_size == 2
    with codes_said() as said, EventMonitor(model, optimizer) as monitor:
        splitter.callbacks = [monitor]
        for _ in range(2):
            splitter.backward(loss_fn, torch.randn(16, 4, dtype=dtype))
    assert said == ["SW102", "SW104"]


def test_out_of_memory_after_some_micro_batches_is_as_if_it_had_not_been(model, optimizer, codes_said):
    calls = []

    def loss_fn(inputs):
        calls.append(len(inputs))
        if calls == [8, 8]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(inputs).square().mean()

    with codes_said() as said, EventMonitor(model, optimizer, warn="expert") as monitor:
        splitter = speedswap.BatchSplitter(model, callbacks=[monitor], check=False)
        splitter.load_state_dict({"micro_batch_size": 8})
        splitter.backward(loss_fn, torch.randn(16, 4))
        assert monitor.backward_passes == 1
        optimizer.step()
    assert said == []
    assert calls == [8, 8, 4, 4, 4, 4]


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("as_views", [False, True])
def test_reductions_over_ranks_do_not_confuse_it(model, codes_said, as_views):
    """DistributedDataParallel writes into gradients after backward has."""
    ranks = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    optimizer = torch.optim.SGD(ranks.parameters(), lr=0.1)
    for set_to_none in (True, False):
        with codes_said() as said, EventMonitor(ranks, optimizer, accumulation_steps=3, warn="expert"):
            for index in range(12):
                last = index % 3 == 2
                with nullcontext() if last else ranks.no_sync():
                    loss_of(ranks).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        assert said == []
    with codes_said() as said, EventMonitor(ranks, optimizer):
        loss_of(ranks).backward()
        loss_of(ranks).backward()
        optimizer.step()
        loss_of(ranks).backward()
    assert said == ["SW102", "SW103", "SW104"]


def test_accumulation_steps_below_one_is_refused(model, optimizer):
    with pytest.raises(ValueError, match="accumulation_steps is 0"):
        EventMonitor(model, optimizer, accumulation_steps=0)
