"""Pairs, a user's unseen items, and the split into training and test."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speedswap.apps.ncf.interactions import Interactions, NcfSplit, OwnIds, leave_one_out


def split(rows, num_items=10):
    """Split (user, item, time) rows into (user, item) pairs to train on and to test with."""
    users, items, times = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return tuple(
        [divmod(int(key), num_items) for key in keys] for keys in leave_one_out(users, items, times, num_items)
    )


def test_the_latest_interaction_is_set_apart():
    train, test = split([(0, 5, 30), (1, 2, 9), (0, 7, 40), (0, 1, 10), (1, 3, 8)])
    assert test == [(0, 7), (1, 2)]
    assert train == [(0, 1), (0, 5), (1, 3)]


def test_of_equally_late_ones_the_last_given_is_set_apart():
    assert split([(0, 5, 3), (0, 2, 3), (0, 9, 1)])[1] == [(0, 2)]
    assert split([(0, 2, 3), (0, 5, 3), (0, 9, 1)])[1] == [(0, 5)]


def test_a_user_with_one_item_is_trained_on():
    assert split([(0, 5, 3), (1, 1, 1), (1, 2, 2)]) == ([(0, 5), (1, 1)], [(1, 2)])
    assert split([(0, 5, 3), (0, 5, 4)]) == ([(0, 5)], [])


def test_an_item_taken_again_is_not_in_both_parts():
    """Item 4 comes first and last: what is tested with must not have been trained on."""
    assert split([(0, 4, 1), (0, 6, 2), (0, 4, 3)]) == ([(0, 6)], [(0, 4)])


def test_nothing_gives_nothing():
    assert split([]) == ([], [])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 5)), max_size=60))
def test_split_is_that_of_a_plain_loop(rows):
    train, test = split(rows)
    by_user: dict[int, list[tuple[int, int]]] = {}
    for user, item, time in rows:
        by_user.setdefault(user, []).append((time, item))
    expected = {}
    for user, taken in by_user.items():
        if len({item for _, item in taken}) > 1:
            latest = max(time for time, _ in taken)
            expected[user] = [item for time, item in taken if time == latest][-1]
    assert test == sorted(expected.items())
    assert train == sorted({(user, item) for user, item, _ in rows} - set(test))


pairs = st.tuples(st.integers(1, 6), st.integers(1, 9)).flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.sets(st.integers(0, shape[0] * shape[1] - 1), max_size=shape[0] * shape[1]).map(sorted)
    )
)


@given(pairs)
def test_unseen_items_are_those_that_a_set_leaves(drawn):
    (num_users, num_items), keys = drawn
    interactions = Interactions(np.array(keys, np.int64), num_users, num_items)
    assert interactions.keys().tolist() == keys
    users, items = interactions.pairs(np.arange(len(keys)))
    assert [*zip(users.tolist(), items.tolist(), strict=True)] == [divmod(key, num_items) for key in keys]
    for user in range(num_users):
        expected = sorted(set(range(num_items)) - {key % num_items for key in keys if key // num_items == user})
        (count,) = interactions.unseen_counts(np.array([user]))
        assert count == len(expected)
        assert interactions.unseen(np.full(len(expected), user), np.arange(len(expected))).tolist() == expected


def test_keys_of_large_tables_do_not_overflow():
    """5 million users by 1 million items: keys need 43 bits."""
    keys = np.array([0, 4_999_999 * 1_000_000 + 999_999])
    interactions = Interactions(keys, 5_000_000, 1_000_000)
    last = np.array([4_999_999])
    assert interactions.unseen(last, np.array([999_998])).tolist() == [999_998]
    assert interactions.unseen(np.array([0]), np.array([0])).tolist() == [1]


def test_arrays_tell_data_apart():
    def made(keys, users, items, ids=None):
        own = None if ids is None else OwnIds(np.array(ids))
        return NcfSplit(Interactions(np.array(keys), users, items), np.array([0]), np.array([2]), own)

    found = made([1, 5, 7], 2, 5)
    assert found.is_that_of(made([1, 5, 7], 2, 5).arrays())
    for keys, users, items, ids in (([1, 5, 8], 2, 5, None), ([1, 5, 7], 3, 4, None), ([1, 5, 7], 2, 5, [3, 4])):
        assert not found.is_that_of(made(keys, users, items, ids).arrays())
