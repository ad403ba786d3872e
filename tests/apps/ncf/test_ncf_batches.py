"""An epoch's batches: every positive once, only true negatives, and the same batches on every request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.interactions import Interactions, draw_batches


def some_pairs(num_users=20, num_items=30, share=0.3, seed=0):
    taken = np.random.default_rng(seed).random(num_users * num_items) < share
    return Interactions(np.flatnonzero(taken), num_users, num_items)


def epoch(train, number=0, size=16, negatives=3, seed=1, start=0):
    return draw_batches(train, epoch=number, size=size, negatives=negatives, seed=seed, start=start)


def same(first, second):
    return all(map(torch.equal, first[:3], second[:3])) and first.size == second.size


def test_every_positive_comes_once_with_its_labels():
    train = some_pairs()
    batches = list(epoch(train))
    assert len(batches) == -(-len(train) // 16)
    keys = torch.cat([batch.users * 30 + batch.items[:, 0] for batch in batches])
    assert keys.sort().values.tolist() == train.keys().tolist()
    assert keys.tolist() != train.keys().tolist()
    for batch in batches:
        assert batch.items.shape == batch.labels.shape == (len(batch.users), 4)
        assert batch.labels[:, 0].eq(1).all()
        assert batch.labels[:, 1:].eq(0).all()


@given(st.integers(1, 12), st.integers(2, 12), st.floats(0.05, 0.95), st.integers(0, 2**32), st.integers(1, 5))
def test_negatives_are_never_in_the_training_set(num_users, num_items, share, seed, negatives):
    train = some_pairs(num_users, num_items, share, seed)
    users = train.pairs(np.arange(len(train)))[0]
    full = np.bincount(users, minlength=num_users).max(initial=0) == num_items
    keys = set(train.keys().tolist())
    try:
        for batch in epoch(train, size=7, negatives=negatives, seed=seed):
            drawn = batch.users[:, None] * num_items + batch.items[:, 1:]
            assert not keys & set(drawn.flatten().tolist())
            assert 0 <= batch.items.min()
            assert batch.items.max() < num_items
    except RatingsError:
        assert full


def test_negatives_are_drawn_evenly():
    """A user with items 0 to 4 of 10: each of the other five comes about as often."""
    train = Interactions(np.arange(5), 1, 10)
    drawn = torch.cat(
        [batch.items[:, 1:].flatten() for number in range(40) for batch in epoch(train, number, negatives=50)]
    )
    counts = torch.bincount(drawn, minlength=10)
    assert counts[:5].eq(0).all()
    expected = len(drawn) / 5
    assert ((counts[5:] - expected) ** 2 / expected).sum() < 23.5  # chi squared, 4 degrees, p = 0.0001


def test_negatives_and_order_are_fresh_each_epoch_and_follow_the_seed():
    train = some_pairs()
    first, again, next_epoch, other_seed = (
        next(iter(epoch(train, number, seed=seed))) for number, seed in ((0, 1), (0, 1), (1, 1), (0, 2))
    )
    assert same(first, again)
    assert not torch.equal(first.items, next_epoch.items)
    assert not torch.equal(first.items, other_seed.items)


@pytest.mark.parametrize("start", [0, 1, 5, 10])
def test_an_epoch_begun_in_the_middle_goes_on_with_the_same_batches(start):
    train = some_pairs()
    whole, rest = list(epoch(train)), list(epoch(train, start=start))
    assert len(rest) == len(whole) - start
    assert all(map(same, rest, whole[start:]))


def test_a_user_of_every_item_is_an_error_that_names_them():
    train = Interactions(np.array([0, 3, 4, 5]), 2, 3)
    with pytest.raises(RatingsError, match="user number 1 has interacted with each of the 3 items"):
        list(epoch(train))
