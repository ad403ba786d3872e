"""The rank of the item that a user took next among items they did not take: HR@10 and NDCG@10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap.apps.errors import RatingsError, named
from speedswap.apps.ncf.interactions import Ids, Interactions, NcfSplit
from speedswap.apps.options import check_memory
from speedswap.apps.ranks import Job

TOP = 10
CHUNK_SCORES = 1 << 17
FEW = 1_000
"""The most draws for which comparing each with all earlier ones is quicker."""


class Ranking(NamedTuple):
    """Means over the tested users."""

    hr: float
    """``HR@10``: the share of users whose item is among the ten highest scores."""
    ndcg: float
    """``NDCG@10``: the same, counting 1 / log2(place + 1), with 1 for the first place."""


@dataclass(frozen=True)
class Candidates:
    """Users to test, each with the item that they took and items that they never took."""

    users: Tensor
    """int64, shape (users,)."""
    items: Tensor
    """int64, shape (users, 1 + negatives); the first is the user's."""

    @classmethod
    def draw(cls, split: NcfSplit, *, negatives: int, at_most: int, seed: int) -> Candidates:
        """Draw each test user's negatives, all different; the same seed gives the same ones.

        Users with too few items left are not tested; of more than ``at_most`` a sample is.

        Raises:
            RatingsError: no user can be tested.
        """
        rng = np.random.default_rng([seed, 2**32])
        users, taken = split.test_users, split.test_items
        # The test item is not in the training set, but no negative either.
        left = split.train.unseen_counts(users) - 1
        users, taken, left = (values[left >= negatives] for values in (users, taken, left))
        if not len(users):
            raise RatingsError(
                f"none of {split.train.num_users:,} users has two items or more and {negatives} others among the "
                f"{split.train.num_items:,} items, so that no user can be tested: give more ratings, or "
                f"lower {named('test_negatives')}"
            )
        if len(users) > at_most:
            some = np.sort(rng.choice(len(users), at_most, replace=False))
            users, taken, left = users[some], taken[some], left[some]
        check_memory(
            f"{named('test_negatives')} {negatives:,} per user tested", 32 * negatives * len(users), "lower them"
        )
        numbers = draw_different(rng, left, negatives)
        numbers += numbers >= number_among_unseen(split.train, users, taken)[:, None]
        items = np.concatenate([taken[:, None], split.train.unseen(users[:, None], numbers)], axis=1)
        return cls(torch.from_numpy(users), torch.from_numpy(items))


def draw_different(rng: np.random.Generator, below: Ids, count: int) -> Ids:
    """Draw ``count`` different numbers from 0 to ``below[i]`` - 1 for each i (Floyd's algorithm, for few)."""
    if count > FEW:
        return np.stack([rng.choice(top, count, replace=False) for top in below.tolist()])
    drawn = np.empty((len(below), count), np.int64)
    for column in range(count):
        top = below - count + column
        number = rng.integers(0, top, endpoint=True)
        again = (drawn[:, :column] == number[:, None]).any(axis=1)
        drawn[:, column] = np.where(again, top, number)
    return drawn


def number_among_unseen(pairs: Interactions, users: Ids, items: Ids) -> Ids:
    """Return each item's number among its user's unseen items."""
    seen_before = np.searchsorted(pairs.keys(), users * pairs.num_items + items) - pairs.first[users]
    return items - seen_before


def evaluate(
    model: Callable[[Tensor, Tensor], Tensor], candidates: Candidates, device: torch.device, job: Job | None = None
) -> Ranking:
    """Rank each user's item among the candidates by the model's scores (He et al. 2017, section 4.1).

    Args:
        model: returns scores for users and items.
        candidates: the same on every rank.
        device: of the model.
        job: the ranks, each of which ranks for its share of the users.
    """
    job, places = job or Job(), []
    chunk = max(1, CHUNK_SCORES // candidates.items.shape[1])
    with torch.no_grad():
        for first in range(0, len(candidates.users), chunk):
            both = (ids[first : first + chunk] for ids in (candidates.users, candidates.items))
            users, items = (ids[job.share(len(ids))].to(device) for ids in both)
            places.append(rank(model(users, items)).cpu())
    return ranking(torch.cat(places), job)


def rank(scores: Tensor) -> Tensor:
    """Return the first column's place among all columns, from 0; ties and NaN count against it."""
    return (scores[:, :1] > scores[:, 1:]).logical_not().sum(dim=1)


def ranking(places: Tensor, job: Job | None = None) -> Ranking:
    """Return ``HR@10`` and ``NDCG@10`` of the places, from 0, that all ranks have found."""
    hit = places < TOP
    gain = torch.where(hit, 1 / torch.log2(places.double() + 2), 0.0)
    hits, gains, count = (job or Job()).add_up(hit.double().sum().item(), gain.sum().item(), len(places))
    return Ranking(hits / count, gains / count)


def popularity_baseline(split: NcfSplit, candidates: Candidates) -> Ranking:
    """Rank every item by its number of training interactions."""
    items = split.train.keys() % split.train.num_items
    counts = torch.from_numpy(np.bincount(items, minlength=split.train.num_items))
    return ranking(rank(counts[candidates.items]))
