"""Generated samples: a function of seed and number, with Zipf's popularity, new ids and something to learn."""

from __future__ import annotations

import pytest
import torch

from speedswap.apps.dlrm import GeneratedSamples
from speedswap.apps.dlrm.criteo import MISSING, SamplePosition
from speedswap.apps.dlrm.model import Scores
from speedswap.apps.errors import CheckpointError


def whole(count=20_000, **more):
    return GeneratedSamples(count, **{"ids": 2_000, "seed": 0} | more).read(count)


def test_a_sample_depends_on_seed_and_number_alone():
    """In any pieces, and also where a shorter source ends."""
    expected = whole()
    source = GeneratedSamples(6_000, ids=2_000, seed=0)
    parts = [source.read(size) for size in (1, 4_094, 700, 5_000, 9)]
    assert [part.size for part in parts] == [1, 4_094, 700, 1_205, 0]
    assert source.done == source.total == 6_000
    for place in range(3):
        assert torch.cat([part[place] for part in parts], dim=-1).equal(expected[place][..., :6_000])
    other = whole(6_000, seed=1)
    assert not other.labels.equal(expected.labels[:6_000])
    assert not other.ids.equal(expected.ids[:, :6_000])


def test_reading_goes_on_from_a_position():
    source = GeneratedSamples(10_000, ids=100, seed=3)
    source.read(5_000)
    again = GeneratedSamples(10_000, ids=100, seed=3)
    again.seek(SamplePosition(*source.position))
    assert again.read(9_000).ids.equal(source.read(9_000).ids)
    for position in (SamplePosition(0, 10_001), SamplePosition(1, 5), SamplePosition(0, 5, 9)):
        with pytest.raises(CheckpointError, match="the samples are not those of the checkpoint"):
            again.seek(position)


def test_ids_are_popular_by_zipf_and_keep_coming():
    found = whole(200_000)
    few, many = found.ids[24], found.ids[25]
    values, counts = few.unique(return_counts=True)
    assert len(values) > 1_400
    shares = counts[values != MISSING].sort(descending=True).values / 200_000
    assert shares[:10].sum() > 0.1
    assert shares[0] == pytest.approx(1.9 / 20, rel=0.9)
    old = many[:20_000].unique()
    new = many[-20_000:].unique()
    assert 0.4 < (~torch.isin(new, old)).float().mean() < 0.95
    assert torch.isin(few[-20_000:].unique(), few[:20_000].unique()).float().mean() > 0.5
    assert 0.04 < (found.ids == MISSING).float().mean() < 0.06
    assert (found.ids[found.ids != MISSING] >= 0).all()
    assert found.ids.max() < 2**32
    assert found.integers.min() == -1


def test_labels_depend_on_ids_alone_and_in_pairs():
    """Logistic regression on the few ids of the first columns beats chance, and their pairs add to that."""
    found = whole(20_000)
    assert 0.2 < found.labels.mean() < 0.4
    alone = torch.cat([one_hot(found.ids[column]) for column in range(5)], dim=1)
    pair = one_hot(found.ids[0] * 2**32 + found.ids[9])
    first, second = fitted_auc(alone, found.labels), fitted_auc(torch.cat([alone, pair], dim=1), found.labels)
    assert first > 0.57
    assert second > first + 0.005


def one_hot(ids):
    values, places = ids.unique(return_inverse=True)
    return torch.nn.functional.one_hot(places, len(values)).float()


def fitted_auc(features, labels):
    """Return the AUC on the second half of the samples after a ridge regression on the first."""
    half = len(labels) // 2
    train, test = features[:half], features[half:]
    weights = torch.linalg.solve(train.T @ train + 10 * torch.eye(train.shape[1]), train.T @ (labels[:half] - 0.3))
    scores = Scores()
    scores.add(test @ weights, labels[half:])
    return scores.auc
