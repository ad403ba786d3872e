"""Interactions made up: as many as asked for, the same for a seed, popular as Zipf's law has it."""

from __future__ import annotations

import numpy as np

from speedswap.apps.ncf import interactions as module
from speedswap.apps.ncf.interactions import generate_split


def test_sizes_are_as_asked_for():
    split = generate_split(300, 2_000, 6_000, seed=0)
    assert (split.train.num_users, split.train.num_items) == (300, 2_000)
    assert 0.9 * 6_000 < len(split.train) + len(split.test_users) <= 6_000
    assert len(split.test_users) == 300
    keys = split.train.keys()
    assert (np.diff(keys) > 0).all()
    assert not set(keys.tolist()) & set((split.test_users * 2_000 + split.test_items).tolist())


def test_seed_decides_and_the_pieces_have_draws_of_their_own(monkeypatch):
    first, again, other = (generate_split(300, 500, 3_000, seed=seed).train for seed in (0, 0, 1))
    assert first.keys().tolist() == again.keys().tolist()
    assert first.keys().tolist() != other.keys().tolist()
    monkeypatch.setattr(module, "CHUNK_INTERACTIONS", 110)
    pieces = generate_split(300, 500, 3_000, seed=0)
    per_user = [np.sort(part % 500).tolist() for part in np.split(pieces.train.keys(), pieces.train.first[1:-1])]
    assert len({tuple(items) for items in per_user}) == 300


def test_fewer_interactions_than_users_leave_some_without():
    split = generate_split(50, 20, 30, seed=0)
    assert len(split.train) == 30
    assert len(split.test_users) == 0


def test_places_follow_the_law():
    """Of a million draws, the counts of the first places are within four deviations of 1 / (place + 10), integrated."""
    places = module.zipf(np.random.default_rng(0), (1_000_000,), 1000)
    assert places.min() == 0
    assert places.max() == 999
    share = np.diff(np.log1p(np.arange(1001) / 10)) / np.log1p(100)
    counts = np.bincount(places, minlength=1000)
    assert (np.abs(counts - 1e6 * share) < 4.5 * np.sqrt(1e6 * share)).all()


def test_users_choose_by_taste():
    """The matrix of who took what is closer to low rank than one with the same margins at random."""
    split = generate_split(400, 100, 12_000, seed=0)
    taken = np.zeros(400 * 100)
    taken[split.train.keys()] = 1
    taken = taken.reshape(400, 100)
    shuffled = np.random.default_rng(0).permuted(taken, axis=0)  # the same popularity, without tastes

    def explained(matrix):
        values = np.linalg.svd(matrix - matrix.mean(axis=0), compute_uv=False) ** 2
        return values[: module.RANK].sum() / values.sum()

    assert explained(taken) > 2 * explained(shuffled)
