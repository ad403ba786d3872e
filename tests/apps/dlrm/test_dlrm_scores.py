"""AUC and log loss compared with scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap.apps.dlrm.model import Scores


def scored(logits, labels, pieces=1):
    found = Scores()
    for some, said in zip(torch.tensor(logits).chunk(pieces), torch.tensor(labels).chunk(pieces), strict=True):
        found.add(some, said)
    return found


def test_pairs_in_the_right_order_and_ties_by_half():
    """Of the pairs (positive, negative) 0.5 > -1, 2 > 0.5 and 2 > -1 are right, and 0.5, 0.5 is a tie."""
    found = scored([0.5, -1.0, 2.0, 0.5], [0.0, 0.0, 1.0, 1.0])
    assert found.auc == 3.5 / 4
    assert found.rate == 0.5
    assert found.base_loss == pytest.approx(math.log(2))
    assert len(found) == 4


@given(
    st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=2, max_size=60).filter(
        lambda samples: len({label for _, label in samples}) == 2
    ),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_any_scores_are_those_of_scikit_learn(samples, pieces):
    """With many ties, and added in pieces."""
    from sklearn.metrics import log_loss, roc_auc_score  # slow to import, and other processes have no use for it

    logits, labels = [number / 2 for number, _ in samples], [float(label) for _, label in samples]
    found = Scores()
    for first in range(0, len(samples), pieces):
        found.add(torch.tensor(logits[first : first + pieces]), torch.tensor(labels[first : first + pieces]))
    assert found.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found.log_loss == pytest.approx(log_loss(labels, torch.tensor(logits).double().sigmoid()), rel=1e-6)
    assert len(found) == len(samples)


def test_neither_order_nor_pieces_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5_000, generator=generator)
    labels = (torch.rand(5_000, generator=generator) < logits.sigmoid()).float()
    whole, parts = Scores(), Scores()
    whole.add(logits, labels)
    order = torch.randperm(5_000, generator=generator)
    for some in order.split(700):
        parts.add(logits[some], labels[some])
        resumed = Scores()
        resumed.restore(parts.state())
        parts = resumed
    assert (whole.auc, whole.log_loss, whole.rate) == (parts.auc, parts.log_loss, parts.rate)


def test_large_logits_have_a_finite_loss():
    found = scored([200.0, -200.0], [1.0, 1.0])
    assert found.log_loss == pytest.approx(100.0)


def test_without_samples_of_both_labels_there_is_no_auc():
    assert math.isnan(Scores().auc)
    assert math.isnan(Scores().log_loss)
    assert math.isnan(scored([1.0, 2.0], [1.0, 1.0]).auc)
    assert scored([1.0], [1.0]).base_loss == 0


@pytest.mark.parametrize(
    ("logits", "labels", "auc", "loss"),
    [
        ([math.inf, -math.inf, 0.0], [1.0, 0.0, 1.0], 1.0, math.log(2) / 3),  # sure and right
        ([math.inf, -math.inf], [0.0, 1.0], 0.0, math.inf),  # sure and wrong
        ([math.nan, 0.0, 1.0], [1.0, 0.0, 1.0], math.nan, math.nan),
    ],
)
def test_infinite_scores_have_the_loss_of_their_probabilities(
    logits: list[float], labels: list[float], auc: float, loss: float
) -> None:
    scores = Scores()
    scores.add(torch.tensor(logits), torch.tensor(labels))
    assert (scores.auc, scores.log_loss) == pytest.approx((auc, loss), nan_ok=True)
