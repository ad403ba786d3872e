"""Losses that cannot be split as declared are found on the first batch, and no others."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import numpy as np
import pytest
import torch
from splitting import OutOfMemoryBeyond, classifier, gradients, relative_error, same_bits, state
from torch import nn
from torch.nn import functional

import speedswap
from speedswap.batching import PerSample, Whole
from speedswap.batching.check import few_samples
from speedswap.batching.nested import Batch
from speedswap.errors import BatchError, CoupledLossError


def batch(samples: int = 64, dtype: torch.dtype = torch.float32):
    return torch.randn(samples, 6, dtype=dtype), torch.randint(4, (samples,))


def split(loss_fn, *inputs, model=None, size=16, **options):
    """Run one batch through a splitter."""
    return speedswap.BatchSplitter(model, micro_batch_size=size, **options).backward(loss_fn, *inputs)


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 8))


def info_nce(first, second, temperature=0.1):
    first, second = functional.normalize(first, dim=1), functional.normalize(second, dim=1)
    scores, own = first @ second.T / temperature, torch.arange(len(first), device=first.device)
    return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


def hardest_triplet(features, labels, margin=1.0):
    distance = torch.cdist(features, features)
    same = labels[:, None] == labels
    hardest = (distance * same).amax(1) - distance.masked_fill(same, 1e9).amin(1)
    return (hardest + margin).clamp(min=0).mean()


# ---------------------------------------------------------------------- found


@pytest.mark.parametrize("size", [1, 2, 3, 16, 63])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_undeclared_contrastive_loss_is_refused(dtype, size):
    """Split into parts, InfoNCE has fewer negatives: 2.13 instead of 4.22."""
    model, (inputs, _) = network().to(dtype), batch(dtype=dtype)
    with pytest.raises(
        CoupledLossError, match=r"couples the samples.*backward_coupled.*speedswap\.batching\.coupled.*check=False"
    ):
        split(lambda x: info_nce(model(x), x @ torch.ones(6, 8, dtype=dtype)), inputs, model=model, size=size)
    assert gradients(model) == []


@pytest.mark.parametrize(
    "loss_of",
    [
        hardest_triplet,
        lambda features, labels: info_nce(features, features.roll(1, 1)),
        lambda features, labels: torch.pdist(features).mean(),
        lambda features, labels: functional.cross_entropy(features, labels) + features.std(0).mean(),
        lambda features, labels: (features[:, 0] * labels).square().mean().sqrt(),
        lambda features, labels: functional.cross_entropy(features - features.mean(0), labels),
    ],
    ids=["triplet", "infonce", "pairs", "a variance beside", "root of a mean", "centred"],
)
def test_losses_that_compare_samples_are_refused(loss_of):
    model, inputs = network(), batch()
    with pytest.raises(CoupledLossError, match="couples the samples of a batch"):
        split(lambda x, y: loss_of(model(x), y), *inputs, model=model)


def test_losses_a_sample_that_depend_on_others_are_refused():
    model, inputs = network(), batch()

    def loss_fn(x, y):
        features = model(x)
        return functional.cross_entropy(features - features.mean(0), y, reduction="none")

    with pytest.raises(CoupledLossError, match="losses of 8 samples together differ from those in parts of 3 and 5"):
        split(loss_fn, *inputs, model=model, reduction="none")


def ignored(share: float, samples: int = 64):
    """Return a batch with some ignored targets."""
    inputs, targets = batch(samples)
    targets[: max(1, int(share * samples))] = -100
    return inputs, targets


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [4, 16, 63])
def test_ignored_targets_without_a_normalizer_are_an_error(share, size):
    """One ignored target, at least, among 64; the mean is over the others, and a part with none has the mean NaN."""
    model, (inputs, targets) = network(), ignored(share)
    with pytest.raises(BatchError, match=r"averages over something other than samples.*normalizer=lambda"):
        split(lambda x, y: functional.cross_entropy(model(x), y), inputs, targets, model=model, size=size)
    assert gradients(model) == []


def test_padded_sequences_without_a_normalizer_are_an_error():
    model, (inputs, _) = nn.Linear(6, 5), batch()
    targets = torch.randint(5, (64, 10))
    targets[torch.arange(10) >= torch.randint(1, 10, (64, 1))] = -100

    def loss_fn(x, y):
        return functional.cross_entropy(model(x)[:, :, None].expand(-1, -1, 10), y)

    with pytest.raises(BatchError, match="averages over something other than samples"):
        split(loss_fn, inputs, targets, model=model)
    split(loss_fn, inputs, targets, model=model, normalizer=lambda x, y: (y != -100).sum())


def test_class_weights_without_a_normalizer_are_an_error():
    model, inputs = network(), batch()
    weight = torch.tensor([0.1, 1.0, 3.0, 10.0, 1, 1, 1, 1])
    with pytest.raises(BatchError, match="class weights"):
        split(lambda x, y: functional.cross_entropy(model(x), y, weight), *inputs, model=model)
    split(
        lambda x, y: functional.cross_entropy(model(x), y, weight),
        *inputs,
        model=model,
        normalizer=lambda x, y: weight[y].sum(),
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("guard", [0, 1], ids=["0/0", "at least 1"])
def test_mean_over_a_mask_without_a_normalizer_is_an_error(dtype, guard):
    model, (inputs, _) = nn.Linear(6, 6), batch()
    mask = (torch.rand(64) < 0.5).to(dtype)

    def loss_fn(x, mask):
        return (model(x).square().mean(1) * mask).sum() / mask.sum().clamp(min=guard)

    with pytest.raises(BatchError, match="averages over something other than samples"):
        split(loss_fn, inputs, mask, model=model)
    split(loss_fn, inputs, mask, model=model, normalizer=lambda x, mask: mask.sum())


def test_normalizer_that_counts_the_wrong_thing_is_an_error():
    model, (inputs, targets) = network(), ignored(0.5)
    with pytest.raises(BatchError, match="averages over something other than what normalizer counts"):
        split(
            lambda x, y: functional.cross_entropy(model(x), y),
            inputs,
            targets,
            model=model,
            normalizer=lambda x, y: len(y),
        )


@pytest.mark.parametrize(
    "reduction, loss_of, message",
    [
        ("mean", lambda y, t: functional.mse_loss(y, t, reduction="sum"), r'adds up its samples.*reduction="sum"'),
        ("sum", functional.mse_loss, r'averages over its samples.*reduction="mean"'),
    ],
    ids=["sum for a mean", "mean for a sum"],
)
def test_other_reduction_than_declared_is_an_error(reduction, loss_of, message):
    model, inputs = nn.Linear(6, 6), torch.randn(64, 6)
    with pytest.raises(BatchError, match=message):
        split(lambda x: loss_of(model(x), x), inputs, model=model, reduction=reduction)


def test_a_term_that_no_sample_has_is_refused_in_a_sum():
    """Each micro-batch would add it again."""
    model, inputs = nn.Linear(6, 6), torch.randn(64, 6)
    with pytest.raises(CoupledLossError, match="adds a term that belongs to no sample, differentiate that apart"):
        split(lambda x: (model(x) - x).square().sum() + 100, inputs, model=model, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contrastive_loss_in_half_precision_is_refused(dtype):
    model, (inputs, _) = network().to(dtype), batch(dtype=dtype)
    with pytest.raises(CoupledLossError):
        split(lambda x: info_nce(model(x), model(x).roll(1, 1)), inputs, model=model)


def test_contrastive_loss_beside_instance_norm_is_refused():
    """InstanceNorm normalizes each sample separately, though torch computes it as a BatchNorm."""
    model = nn.Sequential(nn.Conv1d(6, 4, 1), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(12, 8))
    with pytest.raises(CoupledLossError):
        split(lambda x: info_nce(model(x), model(x).roll(1, 1)), torch.randn(64, 6, 3), model=model)


def test_batch_norm_in_eval_mode_hides_nothing():
    model, inputs = network(nn.BatchNorm1d(16)).eval(), batch()
    with pytest.raises(CoupledLossError):
        split(lambda x, y: hardest_triplet(model(x), y), *inputs, model=model)


class Keeping:
    """A loss that keeps the batch."""

    def __init__(self, model, inputs):
        self.model, self.inputs = model, inputs

    def method(self, x, y):
        return functional.cross_entropy(self.model(self.inputs)[: len(y)], y)

    __call__ = method


ALL = batch()  # as a script has it, in a variable of the module


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, y: lambda a, b: functional.cross_entropy(model(x), y),
        lambda model, x, y: lambda a, b: functional.cross_entropy(model(x), b),  # raises, for the parts' sizes
        lambda model, x, y: lambda a, b: functional.cross_entropy(model(a), y[: len(a)]),
        lambda model, x, y: lambda a, b, x=x: functional.cross_entropy(model(x), y),
        lambda model, x, y: functools.partial(lambda a, b, whole: model(whole).square().mean(), whole=x),
        lambda model, x, y: lambda a, b: (lambda: functional.cross_entropy(model(x), y))(),
        lambda model, x, y: lambda a, b: functional.cross_entropy(model(ALL[0]), ALL[1]),
        lambda model, x, y: Keeping(model, x),
        lambda model, x, y: Keeping(model, x).method,
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_closure_over_the_whole_batch_is_refused(make, known):
    """Each micro-batch would be as large as the batch; of a mean, even the gradient would be right."""
    model, (inputs, targets) = network(nn.Dropout()), ALL
    before = torch.get_rng_state()
    with pytest.raises(BatchError, match=r"a tensor of all samples of the batch, and not.*argument [01].*check=False"):
        split(make(model, inputs, targets), inputs, targets, model=model if known else None)
    assert torch.equal(torch.get_rng_state(), before)
    assert not gradients(model)


def test_what_a_closure_may_have_of_the_whole_batch():
    """Its size, facts about it, and tensors that are no argument."""
    model, (inputs, targets) = network(), batch()
    everything = torch.cat([inputs, inputs])
    split(lambda x, y: functional.cross_entropy(model(x), y, reduction="sum") / len(inputs), *ALL, reduction="sum")
    split(lambda x, y: functional.cross_entropy(model(x) - inputs.mean(), y), inputs, targets)
    split(lambda i: functional.cross_entropy(model(everything[i]), targets[i % 64]), torch.arange(128))
    split(lambda x, y: functional.cross_entropy(model(inputs), targets), inputs, targets, check=False)


def test_refused_batch_leaves_everything_as_it_was():
    model, inputs = network(nn.BatchNorm1d(16).eval()), batch()
    functional.cross_entropy(model(inputs[0]), inputs[1]).backward()
    before, numbers = state(model), torch.get_rng_state()
    for known in (model, None):
        with pytest.raises(CoupledLossError):
            split(lambda x, y: hardest_triplet(model(x), y), *inputs, model=known)
    assert same_bits(state(model), before)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_check_can_be_turned_off():
    model, inputs = network(), batch()
    loss = split(lambda x, y: hardest_triplet(model(x), y), *inputs, model=model, check=False)
    assert loss.isfinite()


# ---------------------------------------------------------------------- no false alarm

PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "autocast": torch.float32,
}


def targets_for(criterion: nn.Module, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return targets, and further inputs, of the kind that a criterion needs."""
    n, width = outputs.shape
    kind = type(criterion)
    if kind in (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss):
        return (torch.randint(width, (n,)),)
    if kind in (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss):
        return (torch.randint(2, (n, width)).float(),)
    if kind is nn.MultiLabelMarginLoss:
        return (torch.stack([torch.randperm(width) for _ in range(n)]),)
    if kind in (nn.HingeEmbeddingLoss, nn.SoftMarginLoss):
        return (torch.randint(2, (n, width)) * 2 - 1,)
    if kind is nn.CosineEmbeddingLoss:
        return torch.randn(n, width), torch.randint(2, (n,)) * 2 - 1
    if kind is nn.MarginRankingLoss:
        return torch.randn(n, width), torch.randint(2, (n, width)) * 2 - 1
    if kind in (nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss):
        return torch.randn(n, width), torch.randn(n, width)
    if kind is nn.GaussianNLLLoss:
        return torch.randn(n, width), torch.rand(n, width) + 0.1
    if kind is nn.KLDivLoss:
        return (torch.randn(n, width).softmax(1),)
    if kind is nn.PoissonNLLLoss:
        return (torch.randint(5, (n, width)).float(),)
    return (torch.randn(n, width),)


CRITERIA = [
    (nn.MSELoss, {}),
    (nn.L1Loss, {}),
    (nn.SmoothL1Loss, {}),
    (nn.HuberLoss, {"delta": 0.5}),
    (nn.CrossEntropyLoss, {}),
    (nn.CrossEntropyLoss, {"label_smoothing": 0.1}),
    (nn.NLLLoss, {}),
    (nn.BCELoss, {}),
    (nn.BCEWithLogitsLoss, {"pos_weight": torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])}),
    (nn.MultiLabelSoftMarginLoss, {}),
    (nn.MultiLabelMarginLoss, {}),
    (nn.MultiMarginLoss, {}),
    (nn.HingeEmbeddingLoss, {}),
    (nn.SoftMarginLoss, {}),
    (nn.CosineEmbeddingLoss, {}),
    (nn.MarginRankingLoss, {}),
    (nn.TripletMarginLoss, {}),
    (nn.TripletMarginWithDistanceLoss, {}),
    (nn.GaussianNLLLoss, {}),
    (nn.PoissonNLLLoss, {}),
    (nn.KLDivLoss, {"reduction": "batchmean"}),
    (nn.KLDivLoss, {"reduction": "mean"}),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize(
    "kind, options, reduction",
    [
        (kind, options, reduction)
        for kind, options in CRITERIA
        for reduction in ("mean", "sum")
        if reduction == "mean" or "reduction" not in options
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_torchs_own_losses_pass(kind, options, dtype, reduction):
    """In every precision, in eight micro-batches and with samples of all magnitudes."""
    model = network(nn.Tanh(), nn.LayerNorm(16))
    criterion = kind(**{"reduction": reduction} | options)
    precision = PRECISIONS[dtype]
    model = model.to(precision)
    inputs = (torch.randn(64, 6) * 3).to(precision)
    further = targets_for(criterion, model(inputs))

    def loss_fn(x, *targets):
        outputs = model(x).float()
        if kind is nn.BCELoss:
            outputs = outputs.sigmoid()
        if kind in (nn.KLDivLoss, nn.NLLLoss):
            outputs = outputs.log_softmax(1)
        return criterion(outputs, *targets)

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        split(loss_fn, inputs, *further, model=model, size=8, reduction=reduction)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Identity(),
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.RReLU(),
        nn.BatchNorm1d(16),
        nn.BatchNorm1d(16, track_running_stats=False),
        nn.BatchNorm1d(16, momentum=None),
        nn.LayerNorm(16),
        nn.GroupNorm(4, 16),
        nn.RMSNorm(16),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.BatchNorm2d(4), nn.Dropout2d(0.5), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Flatten()),
        nn.Sequential(
            nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Flatten()
        ),
    ],
    ids=lambda layer: type(layer).__name__ + str(len(list(layer.modules()))),
)
@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_layers_that_are_random_or_normalize_are_no_mistake(layer, known, dtype):
    model = copy.deepcopy(network(layer)).to(PRECISIONS[dtype])
    inputs, targets = batch(dtype=PRECISIONS[dtype])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        split(lambda x, y: functional.cross_entropy(model(x), y), inputs, targets, model=model if known else None)


class HandMadeBatchNorm(nn.Module):
    """Normalizes by the batch's statistics in plain operations, and keeps running ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, inputs):
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return (inputs - inputs.mean(0)) / inputs.std(0)


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize(
    "layer",
    [HandMadeBatchNorm(), lambda x: functional.batch_norm(x, None, None, training=True)],
    ids=["module", "function"],
)
def test_other_batch_norms_are_no_mistake(layer, known):
    first, last, inputs = nn.Linear(6, 16), nn.Linear(16, 4), batch()
    model = nn.ModuleList([first, last])
    loss_fn = lambda x, y: functional.cross_entropy(last(layer(first(x))), y)  # noqa: E731
    split(loss_fn, *inputs, model=model if known else None)


GENERATOR, NUMPY, PYTHON = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randn_like(x),
        lambda x: torch.rand(x.shape, generator=GENERATOR),
        lambda x: torch.randn(()),
        lambda x: functional.dropout(torch.ones_like(x), 0.5),
        lambda x: random.random(),
        lambda x: PYTHON.random(),
        lambda x: float(NUMPY.normal()),
        lambda x: float(np.random.rand()),  # noqa: NPY002
    ],
    ids=["torch", "generator", "one number", "dropout", "random", "Random", "numpy", "numpy's global"],
)
def test_losses_that_draw_random_numbers_are_no_mistake(draw):
    model, (inputs, _) = nn.Linear(6, 6), batch()
    split(lambda x: (model(x) + 3 * draw(x)).square().mean(), inputs, model=model)


def test_state_that_a_loss_keeps_for_itself_is_no_mistake():
    """A weight that grows with every call, and a running mean of the loss itself."""
    model, (inputs, _) = nn.Linear(6, 6), batch()
    calls, running = [], [1.0]

    def warmed_up(x):
        calls.append(len(x))
        return model(x).square().mean() * len(calls)

    def balanced(x):
        loss = model(x).square().mean()
        running[0] = 0.5 * running[0] + 0.5 * float(loss.detach())
        return loss / running[0]

    split(warmed_up, inputs, model=model)
    split(balanced, inputs, model=model)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_terms_that_no_sample_has_are_no_mistake_in_a_mean(reduction):
    """L2 of the parameters, added to the samples' mean; its weights add up to one."""
    model, inputs = network(), batch()

    def loss_fn(x, y):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return functional.cross_entropy(model(x), y, reduction=reduction) + 10 * penalty

    split(loss_fn, *inputs, model=model, reduction=reduction)


def test_small_difference_of_large_numbers_is_no_mistake():
    """A critic's loss in float32: what its mean is, rounding decides."""
    critic, (inputs, _) = network(nn.Tanh()), batch()
    others = inputs + 1e-6 * torch.randn_like(inputs)

    def loss_fn(real, fake):
        return (critic(fake) + 1000).mean() - (critic(real) + 1000).mean()

    split(loss_fn, inputs, others, model=critic)


def test_targets_far_from_zero_are_no_mistake():
    """Regression without scaling, nearly fitted: in float32 a residual of 0.1 of 1e6 is rounded by a third."""
    model = nn.Linear(6, 6)
    inputs = torch.randn(64, 6)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 1e6)
    targets = 1e6 + 0.1 * torch.randn(64, 6)
    split(lambda x, y: functional.mse_loss(model(x) + 0.3 * x, y), inputs, targets, model=model)


def test_batches_of_all_kinds_of_containers_pass():
    model = nn.Linear(6, 4)
    images = [torch.randn(size, 6) for size in range(1, 13)]
    data = {"x": PerSample(images), "y": np.arange(12) % 4, "weight": Whole(torch.ones(4)), "names": ["a"] * 12}

    def loss_fn(data):
        outputs = torch.stack([model(image).mean(0) for image in data["x"]])
        return functional.cross_entropy(outputs, torch.from_numpy(data["y"]), data["weight"])

    split(loss_fn, data, model=model, size=5)


def test_swapped_embeddings_pass_and_their_table_is_only_read():
    model = nn.Sequential(speedswap.Embedding(50, 4, seed=1), nn.Flatten(), nn.Linear(12, 4))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    ids, targets = torch.randint(50, (32, 3)), torch.randint(4, (32,))
    twin_rows = []
    for check in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(speedswap.Embedding(50, 4, seed=1), nn.Flatten(), nn.Linear(12, 4))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        splitter = speedswap.BatchSplitter(model, micro_batch_size=8, check=check)
        for _ in range(3):
            splitter.backward(lambda x, y, model=model: functional.cross_entropy(model(x), y), ids, targets)
            optimizer.step()
            optimizer.zero_grad()
        twin_rows.append(model[0].table.gather(torch.arange(50)).weight.clone())
    assert torch.equal(*twin_rows)


# ---------------------------------------------------------------------- what it costs, and leaves


def count_calls(model, sizes):
    def loss_fn(x, y):
        sizes.append((len(x), torch.is_grad_enabled()))
        return functional.cross_entropy(model(x), y)

    return loss_fn


def test_check_is_a_few_small_calls_without_a_graph_once():
    model, inputs, sizes = network(), batch(), []
    splitter = speedswap.BatchSplitter(model, micro_batch_size=16)
    for _ in range(3):
        splitter.backward(count_calls(model, sizes), *inputs)
    assert sizes == [(8, False), (3, False), (5, False), *[(16, True)] * 12]


def test_batch_that_is_not_split_is_not_checked():
    model, inputs, sizes = network(), batch(), []
    speedswap.BatchSplitter(model).backward(count_calls(model, sizes), *inputs)
    assert sizes == [(64, True)]


def test_each_loss_function_is_checked_once():
    """A lambda around each step's own tensors is one function; around another criterion it is another."""
    model, sizes = network(), []
    splitter = speedswap.BatchSplitter(model, micro_batch_size=16)

    def step(criterion):
        inputs, targets = batch()
        scale = torch.ones(()) * len(sizes)

        def loss_fn(x, y):
            sizes.append(len(x))
            return criterion(model(x), y) + 0 * scale

        splitter.backward(loss_fn, inputs, targets)

    for _ in range(3):
        step(nn.CrossEntropyLoss())
    assert sizes.count(8) == 1
    step(nn.CrossEntropyLoss(label_smoothing=0.1))
    step(functional.cross_entropy)
    assert sizes.count(8) == 3
    with pytest.raises(BatchError, match="adds up"):
        step(nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(BatchError, match="adds up"):
        step(functools.partial(functional.cross_entropy, reduction="sum"))


def test_what_a_loss_function_refers_to_tells_it_apart():
    """The name of a reduction, or the arguments of a partial, though all of them are freed and recreated."""
    model, inputs = nn.Linear(6, 6), torch.randn(64, 6)
    splitter = speedswap.BatchSplitter(model, micro_batch_size=16)

    def loss(reduction, x):
        return functional.mse_loss(model(x), x, reduction=reduction)

    def closed_over(reduction):
        return lambda x: loss(reduction, x)

    for of in (closed_over, lambda reduction: functools.partial(loss, reduction)):
        for _ in range(2):
            splitter.backward(of("mean"), inputs)
            with pytest.raises(BatchError, match="adds up"):
                splitter.backward(of("sum"), inputs)


def test_function_that_is_of_another_kind_each_time_is_not_checked_for_ever():
    model, inputs, sizes = network(), batch(), []
    splitter = speedswap.BatchSplitter(model, micro_batch_size=16)
    criterion = nn.CrossEntropyLoss()

    def loss_fn(x, y):
        sizes.append(len(x))
        return criterion(model(x), y)

    for step in range(20):
        criterion.epoch = step
        splitter.backward(lambda x, y: loss_fn(x, y), *inputs)
    assert sizes.count(8) <= 8


def test_checked_batch_trains_as_an_unchecked_one(device):
    """Random numbers, running statistics and gradients, bit for bit, for a model that has both."""
    results = []
    for check in (True, False):
        torch.manual_seed(3)
        model = network(nn.BatchNorm1d(16), nn.Dropout(0.5)).to(device)
        inputs = [tensor.to(device) for tensor in batch()]
        for known in (True, False):
            split(
                lambda x, y, model=model: functional.cross_entropy(model(x) + torch.rand_like(x[:, :1]), y),
                *inputs,
                model=model if known else None,
                check=check,
            )
        results.append([*state(model), torch.rand(3), torch.rand(3, device=device)])
    assert same_bits(*results)


class Counts(nn.Module):
    """Counts its calls in a buffer that it reassigns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls = self.calls + 1
        return inputs


@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_buffers_that_are_assigned_anew_are_put_back(known):
    model, inputs = network(Counts()), batch()
    split(lambda x, y: functional.cross_entropy(model(x), y), *inputs, model=model if known else None, size=16)
    assert model[1].calls == 4


class Criterion:
    """A loss as a method of an object with settings."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x, y):
        return self.compare(x, y)

    def compare(self, x, y):
        return hardest_triplet(self.model(x), y)


@pytest.mark.parametrize(
    "of",
    [
        lambda c: c,
        lambda c: c.compare,
        lambda c: functools.partial(c.compare),
        lambda c: torch.enable_grad()(c.compare),
    ],
    ids=["object", "method", "partial", "decorated"],
)
def test_callables_of_all_kinds_are_checked(of):
    model, inputs = network(), batch()
    with pytest.raises(CoupledLossError):
        split(of(Criterion(model)), *inputs, model=model)


def test_generators_that_a_loss_owns_are_put_back():
    model, (inputs, _) = nn.Linear(6, 6), batch()
    drawn = []
    for check in (True, False):
        generator = torch.Generator().manual_seed(5)

        def loss_fn(x, generator=generator):
            return (model(x) + torch.rand(x.shape, generator=generator)).square().mean()

        split(loss_fn, inputs, model=model, check=check)
        drawn.append(torch.rand(3, generator=generator))
    assert torch.equal(*drawn)


def test_check_leaves_no_hooks_modes_or_cached_weights():
    model, (inputs, targets) = network(), batch()
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    model[0].eval()
    with torch.autocast("cpu", torch.bfloat16):
        split(lambda x, y: functional.cross_entropy(model(x), y), inputs, targets, size=16)
        assert all(grad.abs().sum() > 0 for grad in gradients(model))
        assert len(gradients(model)) == 4
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert [part.training for part in model.modules()] == [True, False, True]
    assert torch.is_grad_enabled()


def test_warnings_about_few_samples_are_not_shown():
    model, (inputs, _) = nn.Linear(6, 6), batch()

    def loss_fn(x):
        if len(x) < 16:
            warnings.warn("so few", UserWarning, stacklevel=1)
        return model(x).square().mean()

    split(loss_fn, inputs, model=model)


def test_function_that_fails_for_few_samples_is_not_checked():
    model, inputs = network(), batch()

    def loss_fn(x, y):
        if len(x) < 16:
            raise ValueError("too few")
        return hardest_triplet(model(x), y)

    split(loss_fn, *inputs, model=model)


def test_running_out_of_memory_in_the_check_takes_fewer_samples():
    model, inputs = network(), batch()
    loss_fn = OutOfMemoryBeyond(lambda x, y: hardest_triplet(model(x), y), limit=4)
    with pytest.raises(CoupledLossError):
        split(loss_fn, *inputs, model=model, size=4)
    assert loss_fn.sizes[:2] == [4, 1]
    loss_fn = OutOfMemoryBeyond(lambda x, y: hardest_triplet(model(x), y), limit=4)
    with pytest.raises(CoupledLossError):
        split(loss_fn, *inputs, model=model, size=16)
    assert loss_fn.sizes[:3] == [8, 4, 1]


def test_running_out_of_memory_in_every_check_does_not_end_the_batch():
    model, inputs = network(), batch(4)
    splitter = speedswap.BatchSplitter(model)
    loss_fn = OutOfMemoryBeyond(lambda x, y: functional.cross_entropy(model(x), y), limit=1)
    loss = splitter.backward(loss_fn, *inputs)
    assert torch.allclose(loss, functional.cross_entropy(model(inputs[0]), inputs[1]).detach())
    assert splitter.micro_batch_size == 1


def test_interruption_of_the_check_is_the_callers():
    model, inputs = network(nn.BatchNorm1d(16)), batch()
    before = state(model)

    def loss_fn(x, y):
        model(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        split(loss_fn, *inputs, model=model)
    assert same_bits(state(model), before)


def test_compiled_models_are_not_compiled_for_the_checks_sizes():
    compiled = []

    def backend(graph, examples):
        compiled.append(examples)
        return graph.forward

    model, inputs = network(), batch()
    optimized = torch.compile(model, backend=backend, dynamic=False)
    split(lambda x, y: functional.cross_entropy(optimized(x), y), *inputs, model=model)
    assert len(compiled) == 1
    with pytest.raises(CoupledLossError):
        split(lambda x, y: hardest_triplet(optimized(x), y), *inputs, model=model)


# ---------------------------------------------------------------------- which samples


def test_samples_whose_targets_are_ignored_are_chosen():
    targets = torch.arange(100) % 7
    targets[[13, 50, 77]] = -100
    chosen = few_samples(Batch((torch.randn(100, 2), torch.arange(200).view(100, 2), targets)), 8)
    assert chosen[:3] == [13, 50, 77]
    assert len(set(chosen)) == 8


def test_samples_of_a_mask_are_chosen_from_both_ends():
    mask = torch.ones(50, 4)
    mask[7, 1:] = 0
    chosen = few_samples(Batch((torch.randint(9, (50,)), mask)), 4)
    assert chosen[0] == 7
    assert few_samples(Batch((torch.randn(9, 2),)), 3) == [0, 3, 6]


def test_relative_error_of_what_was_silent():
    """The gradients of a contrastive loss in parts are far off."""
    model, (inputs, _) = classifier(), batch(dtype=torch.float64)
    twin = copy.deepcopy(model)
    info_nce(twin(inputs), twin(inputs).roll(1, 1)).backward()
    split(lambda x: info_nce(model(x), model(x).roll(1, 1)), inputs, model=model, check=False)
    assert relative_error(gradients(model), gradients(twin)) > 0.05
