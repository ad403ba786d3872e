"""The sampled softmax: its value and gradients by definition, its limit, and the tables it goes through."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.errors import IdError
from speedswap.losses import (
    LogUniformSampler,
    Negatives,
    UniformSampler,
    UnigramSampler,
    candidates,
    in_batch,
    sampled_softmax,
)

ROWS, DIM, SAMPLES, MOST, DRAWN = 30, 4, 6, 3, 12


def doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def table_of(rows: Tensor, **settings: Any) -> speedswap.Embedding:
    return speedswap.Embedding.from_pretrained(rows, freeze=False, **settings)


def loss_of_sample(
    hidden: Tensor,
    targets: Sequence[int],
    negatives: Sequence[int],
    weight: Tensor,
    *,
    log_expected: Tensor | None = None,
    bias: Tensor | None = None,
    skipped: Sequence[int] = (),
    removes_hits: bool = True,
) -> Tensor:
    """Return -mean(o_t) + log(Σ exp(o_t) + Σ exp(o_s - log_expected_s)), over distinct t and all s that are no t."""

    def score(row: int) -> Tensor:
        return weight[row] @ hidden + (0 if bias is None else bias[row, 0])

    terms = [score(row) for row in sorted(set(targets))]
    for place, row in enumerate(negatives):
        if row not in skipped and not (removes_hits and row in targets):
            terms.append(score(row) - (0 if log_expected is None else log_expected[place]))
    return torch.stack(terms).logsumexp(0) - torch.stack([score(row) for row in targets]).mean()


def test_one_sample_by_hand() -> None:
    """Target 2 and negatives 0, 2, 1, of which 2 is the target: log(e^3 + e^(1 - log 2) + e^(0 - log 4)) - 3."""
    items = table_of(torch.tensor([[1.0], [0.0], [3.0]]))
    negatives = Negatives(torch.tensor([0, 2, 1]), torch.tensor([2.0, 9.0, 4.0]).log())
    loss = sampled_softmax(torch.ones(1, 1), torch.tensor([2]), items, negatives)
    assert loss.item() == pytest.approx(math.log(math.exp(3) + math.e / 2 + 1 / 4) - 3, rel=1e-6)


# ---------------------------------------------------------------------- value and gradients by definition

NEGATIVES = ["shared", "uncorrected", "own", "in batch", "corrected in batch"]


@pytest.mark.parametrize("kind", NEGATIVES)
@pytest.mark.parametrize("several", [False, True], ids=["one target", "several targets"])
@pytest.mark.parametrize("more", [{}, {"bias": True}, {"ignored": True, "padding": 3}, {"hits": True}], ids=str)
def test_value_and_gradients_are_those_of_the_definition(
    kind: str, several: bool, more: dict[str, Any], device: str
) -> None:
    """Few rows, so that negatives and other targets often are a sample's target; a target occurs twice in a sample."""
    weight, biases, hidden = doubles(ROWS, DIM), doubles(ROWS, 1), doubles(2, SAMPLES // 2, DIM)
    shape = (2, SAMPLES // 2, MOST) if several else (2, SAMPLES // 2)
    targets = torch.randint(4, 12, shape)
    if several:
        targets[0, 0, 1] = targets[0, 0, 0]
    if more.get("ignored"):
        targets[0, 1] = -100
        targets.view(-1)[-1] = -100
    drawn = torch.randint(12, (2, SAMPLES // 2, DRAWN) if kind == "own" else (DRAWN,))
    log_expected = None if kind == "uncorrected" else doubles(*drawn.shape)
    log_probability = doubles(*shape) if kind == "corrected in batch" else None
    negatives: Any = in_batch(log_probability) if "batch" in kind else Negatives(drawn, log_expected)
    removes = not more.get("hits")

    # The definition.
    plain = [each.clone().requires_grad_() for each in (hidden, weight, biases)]
    flat_hidden, flat = plain[0].reshape(SAMPLES, DIM), targets.reshape(SAMPLES, -1)
    own = [[int(each) for each in row if each != -100] for row in flat]
    every = [target for row in own for target in row]
    losses = []
    for sample, row in enumerate(own):
        ids, expected = drawn, log_expected
        if "batch" in kind:
            ids, expected = torch.tensor(every), None
            if log_probability is not None:
                expected = log_probability[targets != -100] + math.log(max(1, len(every) - len(row)))
        elif kind == "own":
            ids, expected = (each.reshape(SAMPLES, DRAWN)[sample] for each in (drawn, log_expected))  # type: ignore[union-attr]
        if row:
            settings = {"bias": plain[2] if more.get("bias") else None, "skipped": [more.get("padding", -1)]}
            removes_hits = removes or "batch" in kind
            losses.append(
                loss_of_sample(
                    flat_hidden[sample],
                    row,
                    ids.tolist(),
                    plain[1],
                    log_expected=expected,
                    removes_hits=removes_hits,
                    **settings,
                )
            )
    expected_loss = torch.stack(losses).mean()
    expected_loss.backward()

    # Ours.
    items, bias = table_of(weight, padding_idx=more.get("padding")).to(device), table_of(biases).to(device)
    given = hidden.to(device).requires_grad_()
    optimizer = torch.optim.SGD([*items.parameters(), *bias.parameters()], lr=1.0)
    arguments = {"bias": bias if more.get("bias") else None, "remove_accidental_hits": removes}
    loss = sampled_softmax(given, targets.to(device), items, negatives, **arguments)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(loss.cpu(), expected_loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given.grad.cpu(), plain[0].grad, rtol=1e-10, atol=1e-12)
    change = weight - items.read()
    if "padding" in more:
        assert plain[1].grad[more["padding"]].abs().max() == 0
    torch.testing.assert_close(change, plain[1].grad, rtol=1e-10, atol=1e-12)
    if more.get("bias"):
        torch.testing.assert_close(biases - bias.read(), plain[2].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_are_torchs(reduction: str) -> None:
    """All other rows as negatives, each once and uncorrected, are the whole softmax."""
    weight, hidden, targets = doubles(ROWS, DIM), doubles(5, DIM), torch.tensor([3, -100, 0, 29, 3])
    found = sampled_softmax(hidden, targets, table_of(weight), torch.arange(ROWS), reduction=reduction)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_another_mark_for_ignored_targets_and_none() -> None:
    weight, hidden, targets = doubles(ROWS, DIM), doubles(4, DIM), torch.tensor([3, 0, 0, 29])
    items = table_of(weight)
    found = sampled_softmax(hidden, targets, items, torch.arange(ROWS), ignore_index=0)
    expected = F.cross_entropy(hidden @ weight.T, targets, ignore_index=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = sampled_softmax(hidden, targets, items, torch.arange(ROWS), ignore_index=None)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.T, targets), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("negatives", [torch.arange(5), in_batch()], ids=["shared", "in batch"])
def test_a_batch_without_targets_has_a_loss_of_zero(negatives: Any) -> None:
    """As ranks and the end of an epoch have it: the step goes through, and changes nothing."""
    items = table_of(doubles(ROWS, DIM))
    before, optimizer = items.read(), torch.optim.SGD(items.parameters(), lr=1.0)
    for hidden, targets in (
        (doubles(0, DIM), torch.empty(0, dtype=torch.int64)),
        (doubles(2, DIM), torch.tensor([-100, -100])),
    ):
        hidden.requires_grad_()
        loss = sampled_softmax(hidden, targets, items, negatives)
        assert loss.item() == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(items.read(), before)


def test_in_half_precision_losses_are_summed_in_float32() -> None:
    items = table_of(torch.randn(ROWS, DIM).bfloat16())
    hidden, targets = torch.randn(5, DIM).bfloat16(), torch.randint(ROWS, (5,))
    found = sampled_softmax(hidden, targets, items, torch.arange(ROWS))
    assert found.dtype == torch.float32
    expected = F.cross_entropy(hidden.float() @ items.read().float().T, targets)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------------- the limit

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda drawn: UniformSampler(drawn, ROWS),
    "log-uniform": lambda drawn: LogUniformSampler(drawn, ROWS),
    "unigram": lambda drawn: UnigramSampler(drawn, torch.arange(1, ROWS + 1), distortion=0.75),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_loss_and_gradients_approach_those_of_all_rows(name: str) -> None:
    """A hundred times the negatives: about a tenth of the error, which is small then."""
    weight, hidden, targets = doubles(ROWS, DIM), doubles(8, DIM), torch.randint(ROWS, (8,))
    exact_hidden, exact_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, targets)
    exact.backward()
    errors = []
    for drawn in (2_000, 200_000):
        given, rows = hidden.clone().requires_grad_(), nn.Embedding.from_pretrained(weight.clone(), freeze=False)
        loss = sampled_softmax(given, targets, rows, SAMPLERS[name](drawn))
        loss.backward()
        differences = (loss - exact, given.grad - exact_hidden.grad, rows.weight.grad - exact_weight.grad)
        errors.append([float(each.detach().norm()) for each in differences])
    assert all(many < few / 3 for few, many in zip(*errors, strict=True))
    assert max(errors[1]) < 0.02


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_sum_over_all_rows_is_estimated_without_bias(name: str) -> None:
    """With five negatives: the mean over 40,000 samples of exp(loss) is that of the whole softmax."""
    samples, weight, hidden = 40_000, doubles(ROWS, DIM), doubles(DIM) / 2
    targets = torch.full((samples,), 3)
    negatives = SAMPLERS[name](5).sample((samples,))
    rows = nn.Embedding.from_pretrained(weight)
    losses = sampled_softmax(hidden.expand(samples, DIM), targets, rows, negatives, reduction="none")
    exact = F.cross_entropy(hidden[None] @ weight.T, targets[:1])
    deviation = losses.exp().std() / math.sqrt(samples)
    assert abs(losses.exp().mean() - exact.exp()) < 4 * deviation
    assert deviation < 0.02 * exact.exp()


# ---------------------------------------------------------------------- tables


def test_targets_and_negatives_come_in_one_lookup() -> None:
    items = table_of(doubles(ROWS, DIM))
    looked_up: list[Tensor] = []

    def once(ids: Tensor) -> Tensor:
        looked_up.append(ids)
        return items(ids)

    negatives = UniformSampler(5, ROWS).sample()
    targets = torch.tensor([[4, -100], [7, 4]])
    sampled_softmax(doubles(2, DIM), targets, once, negatives)
    (ids,) = looked_up
    assert ids.tolist() == [4, 7, 4, *negatives.ids.tolist()] == candidates(targets, negatives).tolist()


def train(items: Any, parameters: Any, steps: int = 4, look_ahead: bool = False, keys: Any = None) -> list[float]:
    """Train with negatives drawn by batch; return the losses."""
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    generator, sampler = torch.Generator().manual_seed(7), LogUniformSampler(DRAWN, ROWS)
    batches = []
    for _ in range(steps):
        hidden = torch.randn(SAMPLES, DIM, dtype=torch.float64, generator=generator)
        targets, negatives = torch.randint(ROWS, (SAMPLES,), generator=generator), sampler.sample(generator=generator)
        if keys is not None:
            targets, negatives = keys(targets), negatives._replace(ids=keys(negatives.ids))
        batches.append((hidden, targets, negatives))
    losses = []
    for hidden, targets, negatives in (
        speedswap.lookahead(batches, {items: lambda batch: candidates(batch[1], batch[2])}) if look_ahead else batches
    ):
        loss = sampled_softmax(hidden, targets, items, negatives)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_negatives_drawn_ahead_are_prefetched_with_the_same_bits(recwarn: pytest.WarningsRecorder) -> None:
    """No lookup is one that the lookahead was not told of."""
    weight = doubles(ROWS, DIM)
    plain, ahead = table_of(weight), table_of(weight)
    assert train(plain, plain.parameters()) == train(ahead, ahead.parameters(), look_ahead=True)
    assert torch.equal(plain.read(), ahead.read())
    assert not recwarn.list


def test_a_table_of_a_collection_trains_as_an_embedding() -> None:
    """The second of two tables in one store, with the first beside it unchanged."""
    weight, alone = doubles(ROWS, DIM), doubles(5, DIM)
    items = table_of(weight)
    tables = speedswap.EmbeddingCollection.from_modules(
        {"user": nn.Embedding.from_pretrained(alone, freeze=False), "item": items}
    )
    assert train(items, items.parameters()) == train(tables.embeddings["item"], tables.parameters())
    assert torch.equal(tables.embeddings["item"].read(), items.read())
    assert torch.equal(tables.embeddings["user"].read(), alone)


def test_a_table_of_a_collection_checks_its_own_range() -> None:
    tables = speedswap.EmbeddingCollection(
        [speedswap.EmbeddingConfig(name=name, num_embeddings=5, embedding_dim=2) for name in ("user", "item")]
    )
    with pytest.raises(IdError, match=r"ids\[1\] is 5, but table 'user' has rows 0 to 4"):
        tables.embeddings["user"](torch.tensor([4, 5]))
    assert torch.equal(
        tables.embeddings["item"](torch.tensor([[4]])), tables.embeddings["item"].read(torch.tensor([[4]]))
    )


KEYS: dict[str, Callable[[Tensor], Any]] = {
    "int64": lambda ids: ids * 7919 - 50,
    "hashed": lambda ids: [f"key {each}" for each in ids.tolist()],
    "exact": lambda ids: np.array([f"key {each}" for each in ids.tolist()]),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("through", ["embedding", "lookahead", "collection"])
def test_keys_train_as_the_rows_they_get(kind: str, through: str) -> None:
    """A row's initial value depends on its number, and keys get rows in creation order."""
    numbers: dict[int, int] = {}
    plain = speedswap.Embedding(ROWS + 1, DIM, dtype=torch.float64, seed=3, padding_idx=0)
    expected = train(
        plain,
        plain.parameters(),
        keys=lambda ids: torch.tensor([numbers.setdefault(each, len(numbers) + 1) for each in ids.tolist()]),
    )
    id_map = speedswap.IdMap(ROWS, keys=kind)
    if through == "collection":
        config = speedswap.EmbeddingConfig(name="item", embedding_dim=DIM, dtype=torch.float64, id_map=id_map, seed=3)
        tables = speedswap.EmbeddingCollection([config])
        found = train(tables.embeddings["item"], tables.parameters(), keys=KEYS[kind])
    else:
        items = speedswap.Embedding(ROWS, DIM, dtype=torch.float64, seed=3, id_map=id_map)
        found = train(items, items.parameters(), look_ahead=through == "lookahead", keys=KEYS[kind])
    assert found == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.ones(3, 5)}, ValueError, r"hidden has shape \(3, 5\) .*\(\*samples, 4\), as wide"),
        (
            {"hidden": torch.ones(3, DIM).long()},
            ValueError,
            r"hidden has .* dtype torch.int64; give floating-point vec",
        ),
        ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden has shape \(\)"),
        ({"targets": torch.ones(2).long()}, ValueError, r"targets has shape \(2,\), but hidden \(3, 4\); give one"),
        ({"targets": torch.ones(3)}, TypeError, r"targets has dtype torch.float32"),
        ({"targets": 7}, TypeError, r"targets is an int; give a tensor of ids"),
        ({"targets": torch.tensor([1, 2, ROWS])}, IdError, r"is 30, but table"),
        ({"negatives": torch.ones(5)}, TypeError, r"negatives has dtype torch.float32"),
        ({"negatives": None}, TypeError, r"negatives is a NoneType; give a tensor of ids"),
        ({"negatives": UniformSampler}, TypeError, r"negatives is a type; give a tensor of ids"),
        (
            {"negatives": torch.ones(2, 5).long()},
            ValueError,
            r"negatives has shape \(2, 5\); give \(n,\) for all samples, or \(3, 'n'\), some",
        ),
        ({"negatives": ["a", "b"]}, TypeError, r"targets is a Tensor and negatives a list; give two tensors, or none"),
        ({"negatives": torch.tensor([-1])}, IdError, r"is -1"),
        (
            {"negatives": Negatives(torch.ones(5).long(), torch.ones(4))},
            ValueError,
            r"log_expected_count has shape \(4,\); give \(5,\)",
        ),
        ({"negatives": in_batch(torch.ones(2))}, ValueError, r"log_probability has shape \(2,\); give \(3,\)"),
        ({"reduction": "average"}, ValueError, r"reduction is 'average'; choose mean, sum or none"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    items = speedswap.Embedding(ROWS, DIM)
    given: dict[str, Any] = {
        "hidden": torch.ones(3, DIM),
        "targets": torch.tensor([1, 2, 3]),
        "negatives": torch.arange(5),
    }
    with pytest.raises(error, match=message):
        sampled_softmax(items=items, **(given | change))
    sampled_softmax(items=items, **given).backward()  # nothing was left behind


def test_a_sampler_cannot_be_announced() -> None:
    with pytest.raises(
        TypeError, match=r"negatives is a UniformSampler, which draws others each time; give sampler.sample"
    ):
        candidates(torch.tensor([1]), UniformSampler(3, 5))
