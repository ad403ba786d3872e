"""HR@10 and NDCG@10 by hand, and the negatives that the user's item is ranked among."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.interactions import Interactions, NcfSplit
from speedswap.apps.ncf.model import Candidates, evaluate, popularity_baseline, rank, ranking

CPU = torch.device("cpu")


class Scores(torch.nn.Module):
    """A model with given scores (users, items)."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, users, items):
        return self.scores[users[:, None], items]


def some_split(num_users=40, num_items=60, share=0.2, seed=0):
    rng = np.random.default_rng(seed)
    taken = rng.random((num_users, num_items)) < share
    taken[:, 0] = True
    tested = np.array([rng.choice(np.flatnonzero(row)) for row in taken])
    taken[np.arange(num_users), tested] = False
    return NcfSplit(Interactions(np.flatnonzero(taken), num_users, num_items), np.arange(num_users), tested)


def test_places_of_a_literal_case():
    scores = torch.tensor([[0.5, 0.1, 0.9], [0.5, 0.1, 0.2], [0.5, 0.6, 0.9]])
    assert rank(scores).tolist() == [1, 0, 2]


@pytest.mark.parametrize("score", [0.0, math.inf, math.nan])
def test_equal_scores_and_no_numbers_win_nothing(score):
    assert rank(torch.full((2, 100), score)).tolist() == [99, 99]


def test_metrics_of_a_literal_case():
    found = ranking(torch.tensor([0, 1, 9, 10]))
    assert found.hr == 3 / 4
    assert found.ndcg == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4, rel=1e-15)


def test_evaluation_is_that_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr("speedswap.apps.ncf.model.CHUNK_CANDIDATES", 100)
    split = some_split()
    candidates = Candidates.draw(split, negatives=30, at_most=1000, seed=3)
    scores = torch.from_numpy(np.random.default_rng(1).standard_normal((40, 60)))
    hits, gains = [], []
    for user, items in zip(candidates.users.tolist(), candidates.items.tolist(), strict=True):
        best = sorted(items, key=lambda item: -scores[user, item])[:10]
        hits.append(items[0] in best)
        gains.append(math.log(2) / math.log(best.index(items[0]) + 2) if items[0] in best else 0.0)
    found = evaluate(Scores(scores), candidates, CPU)
    assert found.hr == pytest.approx(np.mean(hits), rel=1e-15)
    assert found.ndcg == pytest.approx(np.mean(gains), rel=1e-12)
    assert 0 < found.ndcg < found.hr < 1


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_the_users_own_and_different_items_they_never_took(seed):
    split = some_split(seed=seed)
    candidates = Candidates.draw(split, negatives=40, at_most=1000, seed=seed)
    seen = set(split.train.keys().tolist()) | set((split.test_users * 60 + split.test_items).tolist())
    assert len(candidates.users) > 20
    for user, items in zip(candidates.users.tolist(), candidates.items.tolist(), strict=True):
        assert items[0] == split.test_items[user]
        assert len(set(items)) == 41
        assert not {user * 60 + item for item in items[1:]} & seen


def test_every_item_left_can_be_a_negative():
    """Ten items, three taken and one to test with: the other six, whatever the draw."""
    split = NcfSplit(Interactions(np.array([1, 4, 9]), 1, 10), np.array([0]), np.array([5]))
    for seed in range(10):
        candidates = Candidates.draw(split, negatives=6, at_most=1, seed=seed)
        assert candidates.items[0, 0] == 5
        assert sorted(candidates.items[0, 1:].tolist()) == [0, 2, 3, 6, 7, 8]
    drawn = [Candidates.draw(split, negatives=2, at_most=1, seed=seed).items[0, 1:].tolist() for seed in range(900)]
    counts = np.bincount(np.array(drawn).flatten(), minlength=10)
    assert set(np.flatnonzero(counts)) == {0, 2, 3, 6, 7, 8}
    assert np.abs(counts[[0, 2, 3, 6, 7, 8]] - 300).max() < 80


def test_users_with_too_few_items_left_are_not_tested():
    """User 0 took three of four items, user 1 two: with one to test with, none and one are left."""
    split = NcfSplit(Interactions(np.array([0, 1, 3 + 1, 7]), 2, 4), np.array([0, 1]), np.array([2, 1]))
    assert Candidates.draw(split, negatives=1, at_most=9, seed=0).users.tolist() == [0, 1]
    split = NcfSplit(Interactions(np.array([0, 1, 3, 7]), 2, 4), np.array([0, 1]), np.array([2, 1]))
    assert Candidates.draw(split, negatives=1, at_most=9, seed=0).users.tolist() == [1]
    with pytest.raises(RatingsError, match="none of 2 users has two items or more and 3 others among the 4 items"):
        Candidates.draw(split, negatives=3, at_most=9, seed=0)


def test_of_many_users_some_are_tested_and_a_seed_decides():
    split = some_split()
    first, again, other = (Candidates.draw(split, negatives=20, at_most=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.users, again.users)
    assert torch.equal(first.items, again.items)
    assert not torch.equal(first.users, other.users)
    assert len(first.users) == 10
    assert first.items[:, 0].tolist() == split.test_items[first.users].tolist()


def test_popularity_ranks_by_training_interactions():
    """Items 0 to 2 were taken 3, 2 and 0 times; user 3, who took item 2 in the end, has it ranked behind both."""
    split = NcfSplit(Interactions(np.array([0, 1, 3, 4, 6]), 4, 3), np.array([3]), np.array([2]))
    candidates = Candidates(torch.tensor([3]), torch.tensor([[1, 0, 2]]))
    assert popularity_baseline(split, candidates) == ranking(torch.tensor([1]))
