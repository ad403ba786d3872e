"""The loss over window blocks is the sum over pairs, and its optimizer works row by row."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from apps.block_words import words_of
from torch import nn

from speedswap.apps.errors import SettingsError
from speedswap.apps.options import named_optimizer
from speedswap.apps.word2vec import Settings
from speedswap.apps.word2vec.blocks import NOISE, PairWeights, Piece, Sampler
from speedswap.apps.word2vec.corpus import END
from speedswap.apps.word2vec.settings import OWN
from speedswap.apps.word2vec.training import SkipGram, skip_gram_loss
from speedswap.optim import RowwiseAdagrad


def batch_of(words, vocabulary, window, seed=0, device="cpu"):
    """Make a batch of random text: sentences of nine words."""
    text = np.random.default_rng(seed).integers(0, vocabulary, words).astype(np.int32)
    corpus = SimpleNamespace(
        counts=np.bincount(text, minlength=vocabulary), position=np.arange(-1, vocabulary, dtype=np.int32)
    )
    numbers = torch.from_numpy(np.insert(text + 1, range(9, words, 9), END)).to(device)
    sampler = Sampler(corpus, torch.device(device), window=window, sample=0, seed=seed)
    (batch,) = sampler.of_piece(Piece(numbers, words), words)
    return batch


def loss_pair_by_pair(center, context, batch, window, negative):
    """Compute the paper's objective in a double loop; a block's negatives stand for those of all its pairs."""
    total = torch.zeros((), dtype=center.dtype, device=center.device)
    centers, contexts = words_of(batch, len(center))
    for words, around, left, right in zip(centers, contexts, *batch.reach, strict=True):
        for place, word in enumerate(words):
            reach = range(window + place - int(left[place]), window + place + int(right[place]) + 1)
            contexts = [column for column in reach if column != window + place]
            for column in contexts:
                total = total - F.logsigmoid(center[word] @ context[around[column]])
            for column in range(-NOISE, 0):
                share = len(contexts) * negative / NOISE
                total = total - share * F.logsigmoid(-(center[word] @ context[around[column]]))
    return total


def test_loss_and_gradients_are_those_of_a_double_loop(device):
    """In float64, equal to 1e-12: loss, and the gradients of both tables."""
    window, negative, vocabulary = 3, 4, 20
    batch = batch_of(70, vocabulary, window, device=device)
    tables = torch.randn(2, vocabulary, 6, dtype=torch.float64, device=device)
    results = []
    for by_pair in (True, False):
        center, context = (table.clone().requires_grad_() for table in tables)
        if by_pair:
            loss = loss_pair_by_pair(center, context, batch, window, negative)
        else:
            weights = PairWeights(window, negative).to(device)
            loss = skip_gram_loss(torch.cat([center, context])[batch.words], weights(batch.reach), weights.signs)
        loss.backward()
        results.append((loss.detach(), center.grad, context.grad))
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_an_untrained_model_guesses_every_pair_and_negative(device):
    """Contexts start at zero, so that every score does: log 2 for each pair and each of its five negatives."""
    batch = batch_of(64, 20, window=5, device=device)
    model = SkipGram(20, Settings(dim=8)).to(device)
    assert model(batch).item() == pytest.approx(int(batch.pairs) * 6 * math.log(2), rel=1e-5)


def test_centers_start_uniform_in_half_a_dim_and_contexts_at_zero():
    model = SkipGram(1000, Settings(dim=50, seed=7))
    center, context = (table.gather(torch.arange(1000)).weight for table in model.words.tables.values())
    assert not context.any()
    assert 0.0099 < center.abs().max() <= 0.5 / 50
    assert abs(center.mean()) < 1e-4


def test_the_default_optimizer_starts_its_accumulators_above_zero():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    optimizer = Settings().make_optimizer(nn.ParameterList([weight]))
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.state[weight]["sum"].tolist() == [[pytest.approx(0.1)]] * 2


@pytest.mark.parametrize(
    "name, expected",
    [
        ("rowwise_adagrad", RowwiseAdagrad),
        ("sgd", torch.optim.SGD),
        ("Adagrad", torch.optim.Adagrad),
        ("adam", torch.optim.Adam),
        ("AdamW", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
        ("sparse-adam", torch.optim.SparseAdam),
    ],
)
def test_optimizers_by_name(name, expected):
    found = named_optimizer(name, OWN)
    assert getattr(found, "func", found) is expected  # ours with its settings


@pytest.mark.parametrize("name", ["", "optimizer", "lr_scheduler", "adamm"])
def test_an_unknown_optimizer_is_refused_with_the_names_there_are(name):
    with pytest.raises(SettingsError, match=r"give one of rowwise_adagrad, .*adagrad, adam, .*sgd"):
        named_optimizer(name, OWN)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adadelta"])
def test_any_row_by_row_optimizer_lowers_the_loss(name):
    batch = batch_of(256, 30, window=5)
    model = SkipGram(30, Settings(dim=8))
    optimizer = Settings(optimizer=name, lr=0.001 if name == "sgd" else None).make_optimizer(model)
    losses = []
    for _ in range(10):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_tables_on_disk_go_when_the_model_goes(tmp_path):
    model = SkipGram(30, Settings(dim=8, storage="disk", scratch=tmp_path))
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in (folder / "tables").iterdir()} == {"8-float32-state-float32"}
    model.close()
    assert list(tmp_path.iterdir()) == []
