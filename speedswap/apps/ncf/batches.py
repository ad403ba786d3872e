"""Batches to train on: positives, each with negatives of the same user beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap.apps.ncf.errors import RatingsError
from speedswap.apps.ncf.interactions import Interactions

__all__ = ["Batch", "Batches"]


class Batch(NamedTuple):
    """Users with the items that they are scored against."""

    users: Tensor
    """int64, shape (users,)."""
    items: Tensor
    """int64, shape (users, 1 + negatives): an item that the user interacted with, and such that they did not."""
    labels: Tensor
    """float32, as ``items``: 1 for the first, 0 for the others."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; on a GPU by way of pinned memory: a copy from any other would be waited for."""
        if device.type == "cuda":
            return Batch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in self))
        return Batch(*(tensor.to(device) for tensor in self))


class Batches:
    """An epoch's batches, in an order of its own and with fresh negatives.

    A positive and its negatives stay together, so that a user's row is looked up once for them. Batch n of epoch e is a
    function of (seed, e, n) alone: a run that was cut short goes on with the very batches that it would have had.

    Args:
        train: what users interacted with; everything else is a negative.
        epoch: which epoch, from 0.
        size: positives in a batch.
        negatives: for each positive, drawn evenly from all items that the user has not interacted with in ``train``.
        seed: of order and negatives.
        start: the batch to begin with.
    """

    def __init__(
        self, train: Interactions, *, epoch: int, size: int, negatives: int, seed: int, start: int = 0
    ) -> None:
        self._train = train
        self._epoch = epoch
        self._size = size
        self._negatives = negatives
        self._seed = seed
        self._start = start

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
        columns = np.concatenate([items[:, None], self._train.unseen(users[:, None], numbers)], axis=1)
        labels = torch.zeros(columns.shape)
        labels[:, 0] = 1
        return Batch(torch.from_numpy(users), torch.from_numpy(columns), labels)
