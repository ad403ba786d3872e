"""Who interacted with what: sorted pairs, the items that a user has not seen, and the split into training and test."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.ncf.idmap import IdMap

if TYPE_CHECKING:
    from speedswap.apps.ncf.ratings import Source

__all__ = ["Interactions", "Split", "leave_one_out"]

Ids = NDArray[np.int64]


class Interactions:
    """Unique pairs of a user and an item, 8 bytes each.

    All pairs that could be are numbered ``user * num_items + item``, their keys. Held is, for each pair that is there,
    how many with smaller keys are *not* there. One binary search in that gives the n-th item that a user has not seen:
    negatives are drawn exactly, without trying and rejecting.

    Args:
        keys: int64, shape (n,), ascending, each once.
        num_users, num_items: users are 0 to num_users - 1, items likewise.

    Example:
        >>> pairs = Interactions(np.array([0, 2, 3 + 1]), num_users=2, num_items=3)  # user 0: 0 and 2; user 1: 1
        >>> pairs.unseen_counts(np.array([0, 1])).tolist()
        [1, 2]
        >>> pairs.unseen(np.array([0, 1, 1]), np.array([0, 0, 1])).tolist()
        [1, 0, 2]
    """

    def __init__(self, keys: Ids, num_users: int, num_items: int) -> None:
        self.num_users = num_users
        self.num_items = num_items
        starts = np.arange(num_users + 1, dtype=np.int64) * num_items
        self._first = np.searchsorted(keys, starts)
        self._unseen_before = keys - np.arange(len(keys), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._unseen_before)

    def keys(self) -> Ids:
        """The pairs as ``user * num_items + item``, ascending."""
        return self._unseen_before + np.arange(len(self), dtype=np.int64)

    def pairs(self, positions: NDArray[np.integer]) -> tuple[Ids, Ids]:
        """Users and items of the pairs at these positions in the order of the keys."""
        users, items = np.divmod(self._unseen_before[positions] + positions, self.num_items)
        return users, items

    def unseen_counts(self, users: Ids) -> Ids:
        """How many items each of these users has no pair with."""
        return self.num_items - (self._first[users + 1] - self._first[users])

    def unseen(self, users: Ids, numbers: Ids) -> Ids:
        """The items that users have not seen, by number.

        Args:
            users: any shape.
            numbers: which of the user's unseen items, in ascending order, from 0 to ``unseen_counts`` - 1; of a shape
                that goes with that of ``users``.
        """
        before = users * self.num_items - self._first[users] + numbers
        return numbers - self._first[users] + np.searchsorted(self._unseen_before, before, side="right")

    def seen(self, users: Ids) -> tuple[Ids, Ids]:
        """All items that these users have a pair with.

        Args:
            users: shape (n,).

        Returns:
            For each pair the place of its user in ``users``, ascending, and its item, ascending for each user.
        """
        first, counts = self._first[users], self._first[users + 1] - self._first[users]
        places = np.repeat(np.arange(len(users)), counts)
        ends = np.cumsum(counts)
        positions = np.arange(len(places)) + np.repeat(first - (ends - counts), counts)
        return places, self._unseen_before[positions] + positions - users[places] * self.num_items

    @cached_property
    def checksum(self) -> int:
        """Of the pairs, to tell one data set from another."""
        return zlib.crc32(self._unseen_before.view(np.uint8).data, self.num_items)


@dataclass(frozen=True)
class Split:
    """Interactions to train on, and one of each user to test with."""

    train: Interactions
    test_users: Ids
    """Ascending."""
    test_items: Ids
    """Of each test user; no pair of the two is in ``train``."""
    user_ids: IdMap | None = None
    """What the users are called in the ratings; None where they are simply numbered."""
    item_ids: IdMap | None = None
    source: Source | None = None
    """What was read from which file; None where it was not."""


def leave_one_out(users: Ids, items: Ids, times: NDArray[np.generic], num_items: int) -> tuple[Ids, Ids]:
    """Set each user's latest interaction apart for testing (He et al. 2017, section 4.1).

    Of equally late ones it is the last given. A user with one item only is trained on, not tested.

    Args:
        users, items, times: of each interaction, shape (n,). A pair that comes again counts once.
        num_items: items are below it.

    Returns:
        The keys ``user * num_items + item`` to train on and those to test with, both ascending.
    """
    order = np.lexsort((times, users))  # stable
    keys = (users * num_items + items)[order]
    latest = np.append(keys[1:] // num_items != keys[:-1] // num_items, True) if len(keys) else np.zeros(0, bool)
    test = keys[latest]
    unique = np.sort(keys)
    unique = unique[np.append(True, unique[1:] != unique[:-1])[: len(unique)]]
    of_user = unique // num_items
    pairs = np.searchsorted(of_user, test // num_items, side="right") - np.searchsorted(of_user, test // num_items)
    test = test[pairs > 1]
    return np.delete(unique, np.searchsorted(unique, test)), test
