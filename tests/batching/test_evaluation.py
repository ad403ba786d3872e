"""Evaluation in parts: results in order, sizes of its own, and nothing of the training changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from splitting import OutOfMemoryBeyond, classifier, same_bits, state
from torch import Tensor, nn

import speedswap
from speedswap.batching import PerSample, Whole
from speedswap.errors import BatchError


@dataclass
class Output:
    """Outputs of a model as a dataclass, as in some libraries."""

    logits: Tensor
    hidden: tuple[Tensor, Tensor] | None = None


def test_results_of_every_kind_are_joined_in_the_order_of_the_samples():
    inputs = torch.arange(10.0).reshape(10, 1)

    def function(x):
        return {
            "output": Output(x * 2, (x[:, 0], x.repeat_interleave(3, 0))),
            "array": x.numpy() + 1,
            "names": [str(int(one)) for one in x],
            "images": PerSample([torch.ones(int(one)) for one in x]),
            "nothing": None,
            "total": x.sum(),
            "part": Whole(len(x)),
            "list": [x + 5],
        }

    found = speedswap.BatchSplitter(micro_batch_size=4).map(function, inputs)
    assert torch.equal(found["output"].logits, inputs * 2)
    assert torch.equal(found["output"].hidden[0], inputs[:, 0])
    assert torch.equal(found["output"].hidden[1], inputs.repeat_interleave(3, 0))
    assert np.array_equal(found["array"], inputs.numpy() + 1)
    assert found["names"] == [str(number) for number in range(10)]
    assert [len(image) for image in found["images"]] == list(range(10))
    assert found["nothing"] is None
    assert found["total"].tolist() == [6.0, 15.0, 24.0]
    assert found["part"] == [4, 3, 3]
    assert torch.equal(found["list"][0], inputs + 5)


def test_lists_of_different_lengths_are_joined():
    inputs = torch.nested.nested_tensor([torch.full((n,), float(n)) for n in (3, 1, 2)], layout=torch.jagged)
    found = speedswap.BatchSplitter(micro_batch_size=1).map(lambda x: x * 2, inputs)
    assert found.is_nested
    assert [row.tolist() for row in found.unbind()] == [[6.0] * 3, [2.0], [4.0] * 2]


def test_forward_without_gradients_is_map():
    model, inputs = classifier(), torch.randn(9, 6, dtype=torch.float64)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=4)
    with torch.no_grad():
        assert torch.equal(splitter.forward(model, inputs), splitter.map(model, inputs))
        assert splitter.forward(lambda x: model(x).sum(), inputs).shape == (3,)


def test_evaluation_leaves_training_as_it_was():
    """Gradients, running statistics, sizes and the resumed state are the same bits as without an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    splitter = speedswap.BatchSplitter(model)
    inputs = torch.randn(16, 6, dtype=torch.float64)
    loss = OutOfMemoryBeyond(lambda x: model(x).square().mean(), limit=4)
    splitter.backward(loss, inputs)
    before = state(model), splitter.micro_batch_size, splitter.state_dict()
    random = torch.get_rng_state()

    evaluated = OutOfMemoryBeyond(model, limit=8)
    for _ in range(2):
        splitter.map(evaluated, inputs)
    assert evaluated.sizes == [16, 8, 8, 8, 8]  # its own size, found once
    with pytest.raises(ZeroDivisionError):
        splitter.map(lambda x: model(x) / (1 // 0), inputs)
    assert same_bits(state(model), before[0])
    assert (splitter.micro_batch_size, splitter.state_dict()) == before[1:]
    assert torch.equal(torch.get_rng_state(), random)
    del loss.sizes[:]
    splitter.backward(loss, inputs)
    assert loss.sizes == [4] * 4


def test_a_retried_evaluation_draws_the_numbers_of_the_smaller_size():
    inputs = torch.zeros(12, 2)
    found = []
    for limit, size in ((4, "auto"), (12, 3)):
        torch.manual_seed(5)
        function = OutOfMemoryBeyond(lambda x: x + torch.rand(x.shape), limit=limit, calls=0)
        found.append(speedswap.BatchSplitter(micro_batch_size=size).map(function, inputs))
    assert torch.equal(*found)


def test_one_sample_too_large_is_the_functions_error_with_the_sizes_before():
    function = OutOfMemoryBeyond(lambda x: x, limit=0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        speedswap.BatchSplitter().map(function, torch.ones(4, 2))
    causes = []
    error = raised.value
    while error := error.__cause__:
        causes.append(str(error))
    assert causes[-1] == "micro-batches of 4, 2 samples had run out of memory before"
    assert function.sizes == [4, 2, 1]


def test_results_that_differ_between_micro_batches_are_an_error():
    with pytest.raises(BatchError, match="different types in the micro-batches"):
        speedswap.BatchSplitter(micro_batch_size=3).map(lambda x: x if len(x) == 3 else None, torch.ones(5, 2))
