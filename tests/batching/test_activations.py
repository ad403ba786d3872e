"""Tensors that autograd keeps between forward and backward: no more than one micro-batch's, and in the right place."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from splitting import classifier, gradients, same_bits
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.batching.escalation import activations_on_host
from speedswap.batching.rollback import Changes


class SavedBytes:
    """Counts the bytes of tensors that autograd holds at once, parameters left out; the most there were."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.most = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        holder = [tensor]
        token = torch.empty(0)
        weakref.finalize(token, self._freed, tensor.nbytes)
        return holder, token

    def _freed(self, size):
        self.now -= size

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.pack, lambda packed: packed[0][0] if isinstance(packed, tuple) else packed
        )
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)


def saved_at_most(model, run) -> int:
    gc.collect()
    with SavedBytes(model) as saved:
        run()
    return saved.most


def batch(samples: int):
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(4, (samples,))


def test_p21_activations_are_those_of_one_micro_batch():
    model = classifier()
    most = set()
    for samples in (32, 64, 256):
        inputs, targets = batch(samples)
        splitter = speedswap.BatchSplitter(model, micro_batch_size=8)

        def loss_fn(x, y):
            return functional.cross_entropy(model(x), y)

        whole = saved_at_most(model, partial(lambda x, y: loss_fn(x, y).backward(), inputs, targets))
        split = saved_at_most(model, partial(splitter.backward, loss_fn, inputs, targets))
        assert split <= whole * 8 / samples + 8  # cross_entropy saves one number more
        most.add(split)
    assert len(most) == 1


def test_p21_two_passes_keep_one_micro_batch_at_a_time():
    """In addition to the representations, which the loss needs all at once."""
    model = classifier()
    splitter = speedswap.BatchSplitter(model, micro_batch_size=8)
    most = {
        samples: saved_at_most(
            model, partial(splitter.backward_coupled, model, lambda found: found.sum(), batch(samples)[0])
        )
        for samples in (8, 32, 256)
    }
    assert len(set(most.values())) == 1


def test_no_parameter_or_buffer_counts_as_an_activation():
    """Frozen ones neither, whose values are saved for the backward pass of what precedes them."""
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.BatchNorm1d(8), nn.Linear(8, 4))
    everything = [*model.parameters(), *model.buffers()]
    assert Changes([model]).storages() == {tensor.untyped_storage().data_ptr() for tensor in everything}


def run_offloaded(model, inputs, targets):
    """Return the gradients with activations copied, and the copied storages."""
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied = []
    original = torch.Tensor.copy_

    def copy_(self, source, *args, **kwargs):
        copied.append(source.untyped_storage().data_ptr())
        return original(self, source, *args, **kwargs)

    torch.Tensor.copy_ = copy_
    try:
        with activations_on_host(kept, also_from_host=True):
            loss = functional.cross_entropy(model(inputs), targets)
    finally:
        torch.Tensor.copy_ = original
    loss.backward()
    return gradients(model), copied, kept


def test_p26_gradients_with_activations_on_the_host_are_the_same_bits():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(5, 1, 8, 8), torch.randint(4, (5,))
    found, copied, kept = run_offloaded(model, inputs, targets)
    functional.cross_entropy(twin(inputs), targets).backward()
    assert same_bits(found, gradients(twin))
    assert copied
    assert not kept & set(copied)


def test_p26_tensor_that_several_operations_save_is_copied_once():
    hidden = nn.Linear(6, 6)
    inputs = torch.randn(5, 6)

    def model(x):
        x = torch.relu(hidden(x))
        bent = torch.tanh(x)
        return x * x + bent.detach() * x + bent

    original, copies = torch.Tensor.copy_, []
    torch.Tensor.copy_ = lambda self, source, *a, **k: (copies.append(source.data_ptr()), original(self, source))[1]
    try:
        with activations_on_host({p.untyped_storage().data_ptr() for p in hidden.parameters()}, also_from_host=True):
            loss = model(inputs).sum()
    finally:
        torch.Tensor.copy_ = original
    loss.backward()
    assert len(copies) == len(set(copies)) == 3  # the inputs, relu's output, and tanh's


class Scaled(torch.autograd.Function):
    """A sum whose gradient is a tensor that nothing but autograd keeps."""

    addresses: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, weight, value):
        scale = torch.full_like(weight, value)
        Scaled.addresses.append(scale.data_ptr())
        ctx.save_for_backward(scale)
        return (weight * value).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def test_p26_freed_tensors_are_not_mistaken_for_new_ones_at_their_address():
    weight = torch.ones(10 * 2**20, requires_grad=True)  # so large that it is given back to the system at once
    with activations_on_host(set(), also_from_host=True):
        total = sum(Scaled.apply(weight, float(value)) for value in range(6))
    total.backward()
    assert len(set(Scaled.addresses)) < 6  # freed addresses do come back
    assert torch.equal(weight.grad, torch.full_like(weight, sum(range(6))))


def test_p26_changed_parameter_is_still_noticed():
    weight = torch.ones(3, requires_grad=True)
    with activations_on_host({weight.untyped_storage().data_ptr()}):
        loss = (weight * weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_p26_splitter_offloads_what_lies_on_a_device(device):
    model = classifier(torch.float32).to(device)
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(20, 6, device=device), torch.randint(4, (20,), device=device)
    for one, offload in ((model, True), (twin, False)):
        splitter = speedswap.BatchSplitter(one, micro_batch_size=6, offload_activations=offload)
        splitter.backward(lambda x, y, one=one: functional.cross_entropy(one(x), y), inputs, targets)
    assert same_bits(gradients(model), gradients(twin))
