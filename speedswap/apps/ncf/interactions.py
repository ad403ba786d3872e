"""Interactions: sorted pairs of users and items, read or generated; the split into training and test, and batches."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.apps.errors import RatingsError
from speedswap.apps.ncf.form import RatingsSource
from speedswap.apps.ranks import Job
from speedswap.kernels import near

Ids = NDArray[np.int64]

WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,18}", re.ASCII)
"""A number as Python writes it."""


class Interactions:
    """Unique pairs of a user and an item, 8 bytes each.

    All possible pairs are numbered ``user * num_items + item``, their keys. Held is, for each existing pair, the count
    of smaller keys that do *not* exist. One binary search in that gives the n-th item that a user has not seen:
    negatives are drawn exactly, without rejection.

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
        self.first: Ids = np.searchsorted(keys, starts)
        """The number of pairs before each user's; at last that of all."""
        self._unseen_before = keys - np.arange(len(keys), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._unseen_before)

    def keys(self) -> Ids:
        """Return the pairs as ``user * num_items + item``, ascending."""
        return self._unseen_before + np.arange(len(self), dtype=np.int64)

    def pairs(self, positions: NDArray[np.integer]) -> tuple[Ids, Ids]:
        """Return users and items of the pairs at these positions in the order of the keys."""
        users, items = np.divmod(self._unseen_before[positions] + positions, self.num_items)
        return users, items

    def unseen_counts(self, users: Ids) -> Ids:
        """Count the items that each of these users has no pair with."""
        return self.num_items - (self.first[users + 1] - self.first[users])

    def unseen(self, users: Ids, numbers: Ids) -> Ids:
        """Return items that users have not seen, by number.

        Args:
            users: any shape.
            numbers: of the user's unseen items, in ascending order, from 0 to ``unseen_counts`` - 1; of a shape that
                broadcasts with that of ``users``.
        """
        before = users * self.num_items - self.first[users] + numbers
        return numbers - self.first[users] + np.searchsorted(self._unseen_before, before, side="right")

    def items(self, user: int) -> Ids:
        """Return the items that a user has a pair with, ascending."""
        return self.pairs(np.arange(self.first[user], self.first[user + 1]))[1]


class OwnIds:
    """The ids of a table's rows in the ratings, ascending, so that an id is found by bisection.

    Args:
        values: whole numbers (int64), a range of them, or text.

    Example:
        >>> users = OwnIds(["anna", "bob"])
        >>> users[1], users.row("bob"), users.row("eve")
        ('bob', 1, None)
        >>> OwnIds(np.array([7, 196])).row("196")
        1
    """

    def __init__(self, values: NDArray[Any] | Sequence[str] | range) -> None:
        self.values = values if isinstance(values, np.ndarray | range) else np.array(values, object)
        self.is_text = isinstance(self.values, np.ndarray) and self.values.dtype == object

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> int | str:
        found: int | str = self.values[row] if self.is_text else int(self.values[row])
        return found

    def tolist(self) -> list[int | str]:
        """Return all ids, by row."""
        return [self[row] for row in range(len(self))]

    def row(self, own_id: object) -> int | None:
        """Return the row of an id, None for an unknown one; 12, "12" and 12.0 are the same."""
        wanted: Any = str(own_id)
        if not self.is_text:
            wanted = wanted.removesuffix(".0")
            if not WHOLE_NUMBER.fullmatch(wanted):
                return None
            wanted = int(wanted)
        row = bisect_left(self.values, wanted)
        return row if row < len(self) and self.values[row] == wanted else None

    def array(self) -> NDArray[np.generic]:
        """Return the ids as an array of plain numbers, for a file: text as the bytes of JSON."""
        return np.frombuffer(json.dumps(self.tolist()).encode(), np.uint8) if self.is_text else np.asarray(self.values)

    @classmethod
    def from_array(cls, array: NDArray[np.generic]) -> OwnIds:
        """Return the ids whose ``array`` this is."""
        return cls(json.loads(array.tobytes()) if array.dtype == np.uint8 else array.astype(np.int64, copy=False))


@dataclass(frozen=True)
class NcfSplit:
    """Interactions to train on, and one per user to test with.

    Attributes:
        test_users: ascending.
        test_items: one per test user; the pair is not in ``train``.
        user_ids: the users' ids in the ratings; None where they are simply numbered.
        source: the file that it was read from, if any.
    """

    train: Interactions
    test_users: Ids
    test_items: Ids
    user_ids: OwnIds | None = None
    item_ids: OwnIds | None = None
    source: RatingsSource | None = None

    def __str__(self) -> str:
        kinds = [
            "text" if ids is not None and ids.is_text else "whole numbers" for ids in (self.user_ids, self.item_ids)
        ]
        return (
            f"{self.train.num_users:,} users (ids are {kinds[0]}), {self.train.num_items:,} items ({kinds[1]}), "
            f"{len(self.train) + len(self.test_users):,} different pairs"
        )

    def taken(self, user: int) -> Ids:
        """Return all items that a user took, the one to test with included."""
        tested = slice(*np.searchsorted(self.test_users, [user, user + 1]))
        return np.append(self.train.items(user), self.test_items[tested])

    def is_that_of(self, arrays: Mapping[str, NDArray[np.generic]]) -> bool:
        """Return whether these arrays are a split's of the same interactions and ids."""
        ours = self.arrays()
        return ours.keys() == arrays.keys() and all(np.array_equal(each, arrays[name]) for name, each in ours.items())

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the split as arrays of plain numbers, for a checkpoint: where each user's items end, the items, …"""
        num_items = self.train.num_items
        small = np.int32 if num_items <= 2**31 else np.int64
        ids = {"user_ids": self.user_ids, "item_ids": self.item_ids}
        return {
            "num_items": np.array(num_items),
            "train_ends": self.train.first[1:],
            "train_items": (self.train.keys() % num_items).astype(small),
            "test_users": self.test_users,
            "test_items": self.test_items.astype(small),
            **{name: own.array() for name, own in ids.items() if own is not None},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> NcfSplit:
        """Return the split whose ``arrays`` these are.

        Raises:
            KeyError, ValueError: some are missing, or do not fit together.
        """
        num_items = int(arrays["num_items"])
        names = ("train_ends", "train_items", "test_users", "test_items")
        ends, items, users, taken = (arrays[name].astype(np.int64, copy=False) for name in names)
        keys = np.repeat(np.arange(len(ends)) * num_items, np.diff(ends, prepend=0)) + items
        ids = {name: OwnIds.from_array(arrays[name]) for name in ("user_ids", "item_ids") if name in arrays}
        inside = all(((0 <= each) & (each < num_items)).all() for each in (items, taken))
        if len(users) != len(taken) or not inside or not np.all(np.diff(keys) > 0) or np.any(users >= len(ends)):
            raise ValueError("its interactions do not fit together")
        if any(len(own) != (len(ends) if name == "user_ids" else num_items) for name, own in ids.items()):
            raise ValueError("its ids are not those of its users and items")
        interactions = Interactions(keys, len(ends), num_items)
        return cls(interactions, users, taken, ids.get("user_ids"), ids.get("item_ids"))


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
    test = keys[np.diff(users[order], append=-1) != 0]
    unique = np.unique(keys)
    _, counts = np.unique(unique // num_items, return_counts=True)
    test = test[counts > 1]
    return np.delete(unique, np.searchsorted(unique, test)), test


class NcfBatch(NamedTuple):
    """Users with the items that they are scored against.

    Attributes:
        users: int64, shape (users,).
        items: int64, shape (users, 1 + negatives): an item that the user interacted with, then negatives.
        labels: float32, as ``items``: 1 for the first, 0 for the others.
        size: users of the whole batch, of which these are a rank's share.
    """

    users: Tensor
    items: Tensor
    labels: Tensor
    size: int

    def to(self, device: torch.device) -> NcfBatch:
        """Copy the batch to a device."""
        users, items, labels = (near(tensor, device) for tensor in self[:3])
        return NcfBatch(users, items, labels, self.size)


def draw_batches(
    train: Interactions,
    *,
    epoch: int,
    size: int,
    negatives: int,
    seed: int,
    start: int = 0,
    job: Job | None = None,
) -> Iterator[NcfBatch]:
    """Yield an epoch's batches, in its own order and with fresh negatives.

    A positive and its negatives stay together, so that a user's row is looked up once for them. Batch n of epoch e is a
    function of (seed, e, n) alone: an interrupted run goes on with the very batches of an uninterrupted one.

    Args:
        train: the positives; every other pair is a negative.
        epoch: its number, from 0.
        size: positives in a batch.
        negatives: for each positive, drawn evenly from all items that the user has not interacted with in ``train``.
        seed: of order and negatives.
        start: the batch to begin with.
        job: the ranks, each of which gets its share of every batch.

    Raises:
        RatingsError: a user has interacted with all items.
    """
    order: NDArray[np.integer] = np.arange(len(train), dtype=np.int32 if len(train) < 2**31 else np.int64)
    np.random.default_rng([seed, epoch]).shuffle(order)
    for number, first in enumerate(range(start * size, len(train), size), start):
        rng = np.random.default_rng([seed, epoch, number])
        users, items = train.pairs(order[first : first + size])
        unseen = train.unseen_counts(users)
        if not unseen.all():
            raise RatingsError(
                f"user number {users[unseen.argmin()]} has interacted with each of the {train.num_items} items, so "
                "that there are no negatives to draw: leave the user out"
            )
        numbers = rng.integers(0, unseen[:, None], size=(len(users), negatives))
        count, share = len(users), (job or Job()).share(len(users))
        users, items, numbers = users[share], items[share], numbers[share]
        columns = np.concatenate([items[:, None], train.unseen(users[:, None], numbers)], axis=1)
        labels = torch.zeros(columns.shape)
        labels[:, 0] = 1
        yield NcfBatch(torch.from_numpy(users), torch.from_numpy(columns), labels, count)


RANK = 4
"""The rank of the planted structure: tastes and items are vectors of this length."""
CHOICES = 8
"""Items drawn by popularity, from which a user takes one by taste."""
TASTE = 2.0
"""The weight of taste: 0 leaves all to chance."""
HEAD = 10.0
"""The most popular items differ little, as in real catalogues: 1 / (place + 10), by Zipf and Mandelbrot."""
CHUNK_INTERACTIONS = 1 << 18


def generate_split(num_users: int, num_items: int, interactions: int, *, seed: int) -> NcfSplit:
    """Generate interactions with a planted structure of low rank and Zipf's popularity, each user's last one apart.

    A user looks at eight items, each with a probability of about 1 / (10 + its place by popularity), and takes one
    with softmax(2 · taste · item), where taste and item are vectors of four normal numbers. Repeated pairs count once,
    so that the result is somewhat smaller than asked for. Memory holds the pairs, 8 bytes each, and the intermediate
    results of a quarter of a million of them.

    Args:
        num_users, num_items: of each at least 2.
        interactions: their number, spread evenly over the users.
        seed: the same one gives the same interactions.
    """
    rng = np.random.default_rng([seed, 0])
    by_popularity = rng.permutation(np.arange(num_items, dtype=np.int64))
    vectors = rng.standard_normal((num_items, RANK), dtype=np.float32)
    per_user, more = divmod(interactions, num_users)
    chunks: list[tuple[Ids, Ids]] = []
    users_at_once = max(1, CHUNK_INTERACTIONS // (per_user + 1))
    for number, first in enumerate(range(0, num_users, users_at_once), 1):
        last = min(first + users_at_once, num_users)
        rng = np.random.default_rng([seed, number])
        counts = per_user + (np.arange(first, last) < more)
        tastes = rng.standard_normal((last - first, RANK), dtype=np.float32)
        local = np.repeat(np.arange(last - first), counts)
        offered = by_popularity[zipf(rng, (len(local), CHOICES), num_items)]
        appeal = np.einsum("nr,ncr->nc", tastes[local], vectors[offered])
        taken = (TASTE * appeal + rng.gumbel(size=appeal.shape)).argmax(axis=1)
        items = offered[np.arange(len(local)), taken]
        chunks.append(leave_one_out(local + first, items, np.zeros(len(local), np.int8), num_items))
    train, test = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    test_users, test_items = np.divmod(test, num_items)
    return NcfSplit(Interactions(train, num_users, num_items), test_users, test_items)


def zipf(rng: np.random.Generator, shape: tuple[int, ...], num_items: int) -> NDArray[np.int64]:
    """Draw places by popularity; one below n has the probability log(1 + n / HEAD) / log(1 + num_items / HEAD)."""
    places: NDArray[np.int64] = (HEAD * np.expm1(rng.random(shape) * np.log1p(num_items / HEAD))).astype(np.int64)
    return np.minimum(places, num_items - 1, out=places)  # against rounding
