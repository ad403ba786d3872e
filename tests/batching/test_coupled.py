"""Losses that compare the samples of a batch: two passes give the whole batch's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import OutOfMemoryBeyond, classifier, gradients, relative_error, same_bits, state
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.errors import BatchError, CoupledLossError


def contrastive(representations, temperature=0.2):
    """Compare each sample with all others: InfoNCE with the second half of the features as the other view."""
    first, second = functional.normalize(representations, dim=1).chunk(2, dim=1)
    return functional.cross_entropy(first @ second.T / temperature, torch.arange(len(first), device=first.device))


def whole(model, inputs):
    twin = copy.deepcopy(model)
    loss = contrastive(twin(inputs))
    loss.backward()
    return loss.detach(), gradients(twin)


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def loss(self, inputs):
        return contrastive(self.layer(inputs))


def test_a_bound_method_can_be_declared_coupled():
    model = Contrastive()
    loss_fn = speedswap.batching.coupled(model.loss)
    with pytest.raises(CoupledLossError, match=r"declared.*backward_coupled"):
        speedswap.BatchSplitter(model, micro_batch_size=2).backward(loss_fn, torch.randn(8, 6))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("size", [1, 3, 5, 16, 33])
def test_p06_two_passes_are_exact(device, dtype, tolerance, size):
    model, inputs = classifier(dtype).to(device), torch.randn(33, 6, dtype=dtype, device=device)
    loss, wanted = whole(model, inputs)
    found = speedswap.BatchSplitter(model, micro_batch_size=size).backward_coupled(model, contrastive, inputs)
    assert torch.allclose(found, loss, rtol=tolerance)
    assert relative_error(gradients(model), wanted) <= tolerance


def test_p06_plain_accumulation_of_a_coupled_loss_is_refused():
    model, inputs = classifier(), torch.randn(32, 6, dtype=torch.float64)
    _, wanted = whole(model, inputs)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=4, check=False)
    splitter.backward(lambda x: contrastive(model(x)), inputs)
    assert relative_error(gradients(model), wanted) > 0.1  # what is refused when it is declared

    @speedswap.batching.coupled
    def declared(x):
        return contrastive(model(x))

    model.zero_grad()
    with pytest.raises(CoupledLossError, match=r"declared.*backward_coupled"):
        splitter.backward(declared, inputs)
    assert gradients(model) == []


class Recorder(nn.Module):
    """Dropout that remembers what it gave."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def forward(self, inputs):
        output = functional.dropout(inputs, 0.5)
        self.outputs.append(output.detach().clone())
        return output


def test_p07_second_pass_repeats_the_first_bit_for_bit(device):
    recorder = Recorder()
    model = nn.Sequential(nn.Linear(6, 16), recorder, nn.Linear(16, 8)).to(device)
    inputs = torch.randn(20, 6, device=device)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=6)
    splitter.backward_coupled(model, contrastive, inputs)
    first, second = recorder.outputs[:4], recorder.outputs[4:]
    assert same_bits(first, second)
    assert not torch.equal(first[0], first[1])


def test_p07_random_numbers_advance_once(device):
    """As by one forward pass and the loss."""
    generator = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    model, inputs = classifier(dropout=0.5).to(device), torch.randn(20, 6, dtype=torch.float64, device=device)

    def noisy(representations):
        return contrastive(representations + torch.randn_like(representations))

    torch.manual_seed(3)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=6)
    splitter.backward_coupled(model, noisy, inputs)
    after = generator()
    torch.manual_seed(3)
    with torch.no_grad():
        noisy(torch.cat([model(part) for part in inputs.split(5)]))
    assert torch.equal(generator(), after)


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_p10_second_pass_does_not_update_running_statistics_again(known):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).double()
    once = copy.deepcopy(model)
    inputs = torch.randn(20, 6, dtype=torch.float64)
    splitter = speedswap.BatchSplitter(model if known else None, micro_batch_size=5)
    splitter.backward_coupled(model, contrastive, inputs)
    with torch.no_grad():
        for part in inputs.split(5):
            once(part)
    assert model[1].num_batches_tracked == 4
    assert same_bits(list(model.buffers()), list(once.buffers()))


class Counting(nn.Module):
    """Multiplies by how often it has been called, and remembers what it gave."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.outputs = []

    def forward(self, inputs):
        self.calls += 1
        output = inputs * self.calls
        self.outputs.append(output.detach().clone())
        return output


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_p07_second_pass_meets_the_buffers_of_the_first(known):
    counting = Counting()
    model = nn.Sequential(nn.Linear(6, 8), counting)
    splitter = speedswap.BatchSplitter(model if known else None, micro_batch_size=5)
    splitter.backward_coupled(model, contrastive, torch.randn(20, 6))
    assert same_bits(counting.outputs[:4], counting.outputs[4:])
    assert counting.calls == 4


def test_buffers_that_the_loss_writes_keep_what_it_wrote():
    """A queue of negatives, as MoCo has one."""
    model = classifier()
    model.register_buffer("queue", torch.zeros(4, dtype=torch.float64))

    def loss_fn(representations):
        model.queue.copy_(representations.detach().mean(0))
        return contrastive(representations)

    speedswap.BatchSplitter(model, micro_batch_size=5).backward_coupled(
        lambda x: model(x), loss_fn, torch.randn(20, 6, dtype=torch.float64)
    )
    assert model.queue.abs().sum() > 0


def two_tower(queries, documents):
    scores = queries @ documents.T
    return functional.cross_entropy(scores, torch.arange(len(queries)) * (len(documents) // len(queries)))


def test_p06_two_towers_with_different_inputs_and_numbers():
    """Six documents for each query, one of them right."""
    query_tower, document_tower = nn.Linear(3, 5, bias=False).double(), nn.Linear(7, 5, bias=False).double()
    queries, documents = torch.randn(8, 3, dtype=torch.float64), torch.randn(48, 7, dtype=torch.float64)
    loss = two_tower(query_tower(queries), document_tower(documents))
    loss.backward()
    wanted = [*gradients(query_tower), *gradients(document_tower)]
    query_tower.zero_grad()
    document_tower.zero_grad()
    splitter = speedswap.BatchSplitter([query_tower, document_tower], micro_batch_size=10)
    found = splitter.backward_coupled((query_tower, document_tower), two_tower, queries, documents)
    assert torch.allclose(found, loss.detach(), rtol=1e-12)
    assert relative_error([*gradients(query_tower), *gradients(document_tower)], wanted) <= 1e-12


def test_one_encoder_for_two_inputs_and_a_loss_with_parameters():
    tower, temperature = nn.Linear(3, 5).double(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    batch = {"query": torch.randn(9, 3, dtype=torch.float64), "document": torch.randn(9, 3, dtype=torch.float64)}

    def encode(query, document):
        return {"query": tower(query), "document": tower(document), "length": query.norm(dim=1)}

    def loss_fn(found):
        return (two_tower(found["query"], found["document"]) * temperature) + found["length"].mean()

    loss_fn(encode(**batch)).backward()
    wanted = [*gradients(tower), temperature.grad]
    tower.zero_grad()
    temperature.grad = None
    speedswap.BatchSplitter(tower, micro_batch_size=4).backward_coupled(encode, loss_fn, **batch)
    assert relative_error([*gradients(tower), temperature.grad], wanted) <= 1e-12


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_p08_out_of_memory_in_the_second_pass_starts_both_again(known):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)).double()
    clean, inputs = copy.deepcopy(model), torch.randn(16, 6, dtype=torch.float64)
    encode = OutOfMemoryBeyond(lambda x: model(x), limit=4, calls=3)
    torch.manual_seed(2)
    splitter = speedswap.BatchSplitter(model if known else None)
    splitter.load_state_dict({"micro_batch_size": 8})
    loss = splitter.backward_coupled(encode, contrastive, inputs)
    numbers = torch.get_rng_state()
    assert encode.sizes == [8] * 4 + [4] * 8  # twice without a graph, once with it and its backward pass, and then not
    torch.manual_seed(2)
    expected = speedswap.BatchSplitter(clean, micro_batch_size=4).backward_coupled(clean, contrastive, inputs)
    assert torch.equal(loss, expected)
    assert same_bits(state(model), state(clean))
    assert torch.equal(torch.get_rng_state(), numbers)


def test_p12_scaled_coupled_loss():
    model, inputs = classifier(), torch.randn(12, 6, dtype=torch.float64)
    loss, wanted = whole(model, inputs)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=5, scaler=scaler)
    assert torch.allclose(splitter.backward_coupled(model, contrastive, inputs), loss, rtol=1e-12)
    assert relative_error(gradients(model), [256 * grad for grad in wanted]) <= 1e-12


def test_coupled_loss_under_autocast():
    """Weights that autocast has cast without a graph are not used again with one."""
    model, inputs = classifier(torch.float32), torch.randn(24, 6)
    with torch.autocast("cpu", torch.bfloat16):
        _, wanted = whole(model, inputs)
        speedswap.BatchSplitter(model, micro_batch_size=24).backward_coupled(model, contrastive, inputs)
    assert len(gradients(model)) == len(wanted)
    assert relative_error(gradients(model), wanted) < 1e-5


def test_forward_under_autocast_is_differentiated_under_it():
    """Though the backward pass runs outside, as it should."""
    model, inputs = nn.Linear(6, 8), torch.randn(8, 6)
    dtypes = []
    model.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = speedswap.BatchSplitter(model, micro_batch_size=4).forward(model, inputs)
    outputs.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 4


def test_forward_can_be_differentiated_like_the_function(device):
    model, inputs = classifier(dropout=0.5).to(device), torch.randn(20, 6, dtype=torch.float64, device=device)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=6)
    torch.manual_seed(1)
    outputs = splitter.forward(model, inputs)
    loss = contrastive(outputs) + outputs.square().sum()
    loss.backward()
    found = gradients(model)

    model.zero_grad()
    torch.manual_seed(1)
    outputs = torch.cat([model(part) for part in inputs.split(5)])
    theirs = contrastive(outputs) + outputs.square().sum()
    theirs.backward()
    assert torch.allclose(loss, theirs, rtol=1e-12)
    assert relative_error(found, gradients(model)) <= 1e-12


def test_forward_recovers_in_the_backward_pass_where_nothing_is_random():
    model, inputs = classifier(), torch.randn(16, 6, dtype=torch.float64)
    _, wanted = whole(model, inputs)
    function = OutOfMemoryBeyond(lambda x: model(x), limit=4, calls=1)
    splitter = speedswap.BatchSplitter(model)
    contrastive(splitter.forward(function, inputs)).backward()
    assert function.sizes == [16, 16, 8, *[4] * 4]
    assert relative_error(gradients(model), wanted) <= 1e-12


def test_forward_that_is_random_says_so_and_begins_smaller_the_next_time():
    model, inputs = classifier(dropout=0.5), torch.randn(16, 6, dtype=torch.float64)
    function = OutOfMemoryBeyond(lambda x: model(x), limit=8, calls=1)
    splitter = speedswap.BatchSplitter(model)
    with pytest.raises(torch.OutOfMemoryError):
        contrastive(splitter.forward(function, inputs)).backward()
    assert gradients(model) == []
    contrastive(splitter.forward(function, inputs)).backward()
    assert function.sizes == [16, 16, *[8] * 4]


def test_map_evaluates_in_parts():
    model, inputs = classifier(), torch.randn(16, 6, dtype=torch.float64)
    function = OutOfMemoryBeyond(lambda x: {"scores": model(x), "labels": model(x).argmax(1)}, limit=4)
    found = speedswap.BatchSplitter(model).map(function, inputs)
    assert torch.equal(found["labels"], model(inputs).argmax(1))
    assert torch.allclose(found["scores"], model(inputs))
    assert not found["scores"].requires_grad


@pytest.mark.parametrize(
    "encode, arguments, message",
    [
        (lambda x: x.sum(), 1, r"returned a tensor of shape \(\) for 3 samples"),
        (lambda x: x[:2], 1, r"returned a tensor of shape \(2, 6\) for 3 samples"),
        (lambda x: None, 1, r"returned a NoneType, which holds no tensor"),
        ((len, len), 1, r"2 encoders were given 1 arguments"),
    ],
)
def test_wrong_encoders_are_errors(encode, arguments, message):
    splitter = speedswap.BatchSplitter(micro_batch_size=3)
    with pytest.raises(BatchError, match=message):
        splitter.backward_coupled(encode, contrastive, *[torch.ones(6, 6)] * arguments)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_how_a_coupled_loss_reduces_is_its_own_affair(reduction, shape, device):
    """One number, whatever the splitter's reduction for split losses; the gradients are the same."""
    model, inputs = classifier().to(device), torch.randn(8, 6, dtype=torch.float64, device=device)
    loss, wanted = whole(model, inputs)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=3, reduction=reduction)
    found = splitter.backward_coupled(model, lambda encoded: contrastive(encoded).reshape(shape), inputs)
    assert found.shape == ()
    assert torch.allclose(found, loss)
    assert relative_error(gradients(model), wanted) <= 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_per_sample_of_coupled_samples_is_refused(reduction):
    """It must be one number also where the splitter's reduction is "none"; no gradient is left behind."""
    model, inputs = classifier(), torch.randn(8, 6, dtype=torch.float64)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=3, reduction=reduction)
    with pytest.raises(BatchError, match=r"returned shape \(8,\); it must return one number"):
        splitter.backward_coupled(model, lambda encoded: encoded.square().sum(1), inputs)
    assert gradients(model) == []
