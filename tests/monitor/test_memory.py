"""Memory by phase and by kind: on the CPU that of tensors, to the byte; on CUDA the allocator's figures."""

from __future__ import annotations

import dataclasses
import gc
import mmap

import pytest
import torch
from torch import nn

import speedswap
from speedswap.monitor import MemoryMonitor, MemorySnapshot, memory_snapshot

MIB = 2**20


def test_each_storage_counts_once_for_as_long_as_a_view_holds_it():
    memory = MemoryMonitor(device="cpu")
    with memory.phase("two views"):
        x = torch.zeros(1000, dtype=torch.float64)
        view = x[10:].view(-1, 10)
        x += 1
        del x
    with memory.phase("none"):
        del view
    two, none = memory.phases
    assert (two.before, two.peak, two.after) == (0, 8000, 8000)
    assert (none.before, none.peak, none.after) == (8000, 8000, 0)


def test_tensors_that_only_the_graph_holds_count():
    weight = torch.ones(100, requires_grad=True)
    memory = MemoryMonitor(device="cpu")
    with memory.phase("forward"):
        y = weight.exp().sum()
    with memory.phase("backward"):
        y.backward()
        del y
    forward, backward = memory.phases
    assert forward.after == 400 + 400 + 4  # the weight, its exponential (saved for backward) and the sum
    assert backward.after == 400 + 400  # the weight and its gradient


def test_tensors_of_other_devices_do_not_count():
    memory = MemoryMonitor(device="cpu")
    with memory.phase("forward"):
        torch.ones(10, device="meta") + 1
    assert memory.phases[0].peak == 0


@pytest.mark.parametrize("kind", ["table", "sparse"])
def test_models_with_tables_or_sparse_gradients_are_measured(kind):
    """A table's rows are not on the device; a gradient has two rows of 16 bytes, and two indices of 8 if sparse."""
    rows = speedswap.Embedding(100, 4) if kind == "table" else nn.Embedding(100, 4, sparse=True)
    model = nn.Sequential(rows, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = MemoryMonitor(model, optimizer, device="cpu")
    with memory.phase("forward"):
        loss = model(torch.tensor([1, 2])).sum()
    with memory.phase("backward"):
        loss.backward()
    with memory.phase("step"):
        optimizer.step()
    layer = 4 * 5
    assert memory.phases[0].parameters == layer + (0 if kind == "table" else 100 * 16)
    assert memory.phases[1].gradients == layer + 2 * 16 + (0 if kind == "table" else 2 * 8)


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
    """A CUDA allocator's figures under pressure, as a snapshot has them, lead to warnings."""
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
    # Pages that no earlier test has freed.
    block = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.float32).fill_(1)
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
