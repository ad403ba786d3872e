"""Memory: what tensors take, by phase and by kind, on the CPU to the byte; on CUDA as its allocator says."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import nn

from speedswap.monitor import MemoryMonitor, MemorySnapshot, TensorTracker, memory_snapshot

MIB = 2**20


def test_tracker_counts_each_storage_once():
    with TensorTracker() as tracker:
        x = torch.zeros(1000, dtype=torch.float64)
        view = x[10:].view(-1, 10)
        assert tracker.live == 8000
        x += 1
        assert tracker.live == 8000
        del x
        assert tracker.live == 8000
        del view
        assert tracker.live == 0
    assert tracker.peak == 8000


def test_tracker_knows_what_only_the_graph_holds():
    weight = torch.ones(100, requires_grad=True)
    with TensorTracker() as tracker:
        y = weight.exp().sum()
        assert tracker.live == 400 + 400 + 4  # the weight, its exponential (saved for backward) and the sum
        y.backward()
        assert tracker.live == 400 + 4 + 400  # the exponential is gone, the gradient there
        del y
    assert tracker.live == 800


def test_tracker_says_how_long_temporaries_live():
    with TensorTracker() as tracker:
        x = torch.ones(64)
        y = (x * 2) + 1
        (y - 1).sum()
    made = tracker.lifetimes["aten.mul"]
    assert (made.made, made.made_bytes, made.freed, made.lifetime) == (1, 256, 1, 1)
    assert tracker.lifetimes["aten.add"].freed == 0


def test_tracker_can_be_kept_to_one_device():
    with TensorTracker("cuda") as tracker:
        torch.ones(10)
    assert tracker.live == 0


def test_phases_of_a_linear_layer_to_the_byte():
    """Input 64 × 256, weight 256 × 256, float32: what each phase must hold can be added up by hand."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory = MemoryMonitor(model, optimizer, device="cpu")
    weight, activation = 256 * 256 * 4, 64 * 256 * 4
    for _ in range(2):
        with memory.phase("forward"):
            output = model(torch.ones(64, 256))
        with memory.phase("backward"):
            output.backward(torch.ones_like(output))
        del output
        with memory.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
    forward, backward, step, again, *_ = memory.phases
    assert {phase.source for phase in memory.phases} == {"tensors"}
    assert (forward.parameters, forward.gradients, forward.optimizer) == (weight, 0, 0)
    assert (forward.before, forward.after, forward.peak) == (weight, weight + 2 * activation, weight + 2 * activation)
    assert forward.activations == 2 * activation  # the input, saved, and the output
    assert (backward.gradients, backward.before) == (weight, forward.after)
    assert backward.peak == 2 * weight + 3 * activation  # with the output's gradient
    assert (step.gradients, step.optimizer, step.peak) == (0, weight, 3 * weight)
    assert step.activations == 0
    assert again.optimizer == weight
    report = memory.report()
    assert (report["parameters"], report["gradients"], report["optimizer"]) == (weight, weight, weight)
    assert report["activations"] == 3 * activation


def test_activations_grow_with_the_batch_and_parameters_do_not():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    seen = []
    for samples in (16, 32):
        memory = MemoryMonitor(model, device="cpu")
        with memory.phase("forward"):
            loss = model(torch.ones(samples, 32)).sum()
        seen.append(memory.phases[0])
        del loss
    assert seen[0].parameters == seen[1].parameters
    assert 1.9 < seen[1].activations / seen[0].activations <= 2


def test_failed_phase_is_measured_too():
    memory = MemoryMonitor(device="cpu")

    def fail():
        with memory.phase("broken"):
            torch.ones(1000).sum()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert memory.phases[0].peak >= 4000


def test_temporaries_are_listed_by_size():
    memory = MemoryMonitor(device="cpu")
    with memory.phase("work"):
        x = torch.ones(100)
        (x * 2).sum() + (x.repeat(10) + 1).sum()
    assert memory.temporaries()[0].operation in ("aten.repeat", "aten.add")
    assert all(one.freed for one in memory.temporaries())


def test_a_leak_is_noticed(codes_said):
    kept = []
    memory = MemoryMonitor(device="cpu", warn="expert")
    with codes_said() as said:
        for _ in range(6):
            with memory.phase("step"):
                kept.append(torch.ones(10))
    assert said == ["SW303"]
    with codes_said() as said:
        steady = MemoryMonitor(device="cpu", warn="expert")
        for _ in range(10):
            with steady.phase("step"):
                last = torch.ones(10)
        assert last.sum() == 10
    assert said == []


def test_allocator_pressure_is_warned_of(codes_said):
    """What a CUDA allocator says, handed to the judgement as it comes from a snapshot."""
    phase = MemoryMonitor(device="cpu")
    with phase.phase("forward"):
        pass
    full = dataclasses.replace(phase.phases[0], retries=2, inactive=60)
    memory = MemoryMonitor(device="cpu", warn="expert")
    with codes_said() as said:
        memory._judge(full, MemorySnapshot("cuda:0", "allocator", 10, reserved=100, inactive=60))
    assert said == ["SW301", "SW302"]


def test_snapshot_of_the_process_is_plausible():
    snapshot = memory_snapshot("cpu")
    assert snapshot.source == "process"
    assert 10 * MIB < snapshot.allocated <= snapshot.peak <= snapshot.total
    assert 0 < snapshot.free < snapshot.total
    assert (snapshot.reserved, snapshot.retries) == (None, None)
    block = torch.ones(64 * MIB // 4)
    assert memory_snapshot("cpu").allocated > snapshot.allocated + 32 * MIB
    assert block.sum() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshot_and_phases_of_cuda_are_the_allocators():
    gc.collect()
    before = memory_snapshot()
    assert (before.source, before.device) == ("allocator", f"cuda:{torch.cuda.current_device()}")
    memory = MemoryMonitor(device="cuda")
    with memory.phase("forward"):
        block = torch.ones(MIB, device="cuda")
        block * 2
    phase = memory.phases[0]
    assert phase.source == "allocator"
    assert phase.after - phase.before == 4 * MIB
    assert phase.peak - phase.before == 8 * MIB
    assert phase.retries == 0
    after = memory_snapshot()
    assert after.allocated - before.allocated == 4 * MIB
    assert after.reserved >= after.allocated
    assert after.inactive >= 0
    assert after.ooms == before.ooms
