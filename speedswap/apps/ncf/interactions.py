"""Interactions: sorted pairs of users and items, the ids of both, the split into training and test, and batches."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.apps.errors import RatingsError
from speedswap.apps.ranks import Job

if TYPE_CHECKING:
    from speedswap.apps.ncf.ratings import Source

__all__ = ["Batch", "Batches", "IdMap", "Interactions", "Split", "leave_one_out", "whole_number"]

Ids = NDArray[np.int64]


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
        self._first = np.searchsorted(keys, starts)
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
        return self.num_items - (self._first[users + 1] - self._first[users])

    def unseen(self, users: Ids, numbers: Ids) -> Ids:
        """Return items that users have not seen, by number.

        Args:
            users: any shape.
            numbers: of the user's unseen items, in ascending order, from 0 to ``unseen_counts`` - 1; of a shape that
                broadcasts with that of ``users``.
        """
        before = users * self.num_items - self._first[users] + numbers
        return numbers - self._first[users] + np.searchsorted(self._unseen_before, before, side="right")

    def seen(self, users: Ids) -> tuple[Ids, Ids]:
        """Return all items that these users have a pair with.

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
        """A checksum of the pairs, to tell one data set from another."""
        return zlib.crc32(self._unseen_before.view(np.uint8).data, self.num_items)


class IdMap:
    """The user's own ids of a table's rows: whole numbers or text, ascending, so that an id is found by bisection.

    Args:
        ids: each once: int64 in ascending order, or UTF-8 in the order of its bytes.

    Example:
        >>> users = IdMap([b"anna", b"bob"])
        >>> users[1], users.row("bob"), users.row("eve")
        ('bob', 1, None)
        >>> IdMap(np.array([7, 196])).row("196")
        1
    """

    def __init__(self, ids: NDArray[np.int64] | Sequence[bytes]) -> None:
        self._numbers = self._text = self._ends = np.empty(0, np.int64)
        self.is_text = not isinstance(ids, np.ndarray)
        if isinstance(ids, np.ndarray):
            self._numbers = ids
        else:
            self._text = np.frombuffer(b"".join(ids), np.uint8)
            self._ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)))

    def __len__(self) -> int:
        return len(self._ends) if self.is_text else len(self._numbers)

    def __getitem__(self, row: int) -> int | str:
        return self._encoded(row).decode() if self.is_text else int(self._numbers[row])

    def tolist(self) -> list[int | str]:
        """Return all ids, by row."""
        return [self[row] for row in range(len(self))]

    def row(self, own_id: object) -> int | None:
        """Return the row of an id, None for an unknown one; 12 and "12" are the same."""
        text = str(own_id)
        if self.is_text:
            wanted = text.encode("utf-8", "surrogateescape")
            row = bisect_left(range(len(self)), wanted, key=self._encoded)
            return row if row < len(self) and self._encoded(row) == wanted else None
        number = whole_number(text.encode("utf-8", "surrogateescape"))
        if number is None:
            return None
        row = int(np.searchsorted(self._numbers, number))
        return row if row < len(self) and self._numbers[row] == number else None

    @property
    def checksum(self) -> int:
        """A checksum of the ids, to tell one data set from another."""
        crc = 0
        for values in (self._numbers, self._ends, self._text):
            crc = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, crc)
        return crc

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the ids as arrays of plain numbers, for a file."""
        return {"text": self._text, "ends": self._ends} if self.is_text else {"numbers": self._numbers}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> IdMap:
        """Return the map whose ``arrays`` these are."""
        if "numbers" in arrays:
            return cls(arrays["numbers"].astype(np.int64, copy=False))
        ids = cls([])
        ids._text, ids._ends = arrays["text"].astype(np.uint8, copy=False), arrays["ends"].astype(np.int64, copy=False)
        return ids

    def _encoded(self, row: int) -> bytes:
        return self._text[self._ends[row - 1] if row else 0 : self._ends[row]].tobytes()


def whole_number(text: bytes) -> int | None:
    """Read an int64 as Python writes it; None for ``007``, ``+1``, ``1.0`` and other text.

    Example:
        >>> whole_number(b"-12"), whole_number(b"007"), whole_number(b"9223372036854775808")
        (-12, None, None)
    """
    if not text.removeprefix(b"-").isdigit():
        return None
    number = int(text) if len(text) <= 20 else 2**63
    return number if -(2**63) <= number < 2**63 and str(number).encode() == text else None


@dataclass(frozen=True)
class Split:
    """Interactions to train on, and one per user to test with."""

    train: Interactions
    test_users: Ids
    """Ascending."""
    test_items: Ids
    """One per test user; the pair is not in ``train``."""
    user_ids: IdMap | None = None
    """The users' ids in the ratings; None where they are simply numbered."""
    item_ids: IdMap | None = None
    source: Source | None = None
    """The file that it was read from, if any."""


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


class Batch(NamedTuple):
    """Users with the items that they are scored against."""

    users: Tensor
    """int64, shape (users,)."""
    items: Tensor
    """int64, shape (users, 1 + negatives): an item that the user interacted with, then negatives."""
    labels: Tensor
    """float32, as ``items``: 1 for the first, 0 for the others."""
    size: int
    """Users of the whole batch, of which these are a rank's share."""

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; to a GPU through pinned memory, so that the host does not wait."""
        is_gpu = device.type == "cuda"
        tensors = (tensor.pin_memory() if is_gpu else tensor for tensor in self[:3])
        users, items, labels = (tensor.to(device, non_blocking=is_gpu) for tensor in tensors)
        return Batch(users, items, labels, self.size)


class Batches:
    """An epoch's batches, in an order of their own and with fresh negatives.

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
    """

    def __init__(
        self,
        train: Interactions,
        *,
        epoch: int,
        size: int,
        negatives: int,
        seed: int,
        start: int = 0,
        job: Job | None = None,
    ) -> None:
        self._train = train
        self._epoch = epoch
        self._size = size
        self._negatives = negatives
        self._seed = seed
        self._start = start
        self._job = job or Job()

    def __len__(self) -> int:
        return -(-len(self._train) // self._size) - self._start

    def __iter__(self) -> Iterator[Batch]:
        order = np.arange(len(self._train), dtype=np.int32 if len(self._train) < 2**31 else np.int64)
        np.random.default_rng([self._seed, self._epoch]).shuffle(order)
        for number in range(self._start, self._start + len(self)):
            yield self._batch(number, order[number * self._size : (number + 1) * self._size])

    def _batch(self, number: int, positions: np.ndarray) -> Batch:
        rng = np.random.default_rng([self._seed, self._epoch, number])
        users, items = self._train.pairs(positions)
        unseen = self._train.unseen_counts(users)
        if not unseen.all():
            user = users[unseen.argmin()]
            raise RatingsError(
                f"user number {user} has interacted with each of the {self._train.num_items} items, so that there are "
                "no negatives to draw: leave the user out"
            )
        numbers = rng.integers(0, unseen[:, None], size=(len(users), self._negatives))
        size, share = len(users), self._job.share(len(users))
        users, items, numbers = users[share], items[share], numbers[share]
        columns = np.concatenate([items[:, None], self._train.unseen(users[:, None], numbers)], axis=1)
        labels = torch.zeros(columns.shape)
        labels[:, 0] = 1
        return Batch(torch.from_numpy(users), torch.from_numpy(columns), labels, size)
