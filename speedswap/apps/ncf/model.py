"""Neural collaborative filtering: GMF, MLP, and both in one, NeuMF; and the items that it scores highest for users.

Evaluation ranks the item that a user took next among items they did not take: HR@10 and NDCG@10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import speedswap
from speedswap.apps.errors import CheckpointError, RatingsError, SettingsError, UnknownUserError, named
from speedswap.apps.ncf.interactions import Ids, Interactions, NcfBatch, NcfSplit, OwnIds
from speedswap.apps.ncf.settings import NcfSettings
from speedswap.apps.options import check_memory
from speedswap.apps.ranks import Job
from speedswap.apps.run import LayeredModel, layers_of

INIT_STD = 0.01
CHUNK_USERS = 256
CHUNK_SCORES = 1 << 18
SHOWN_IDS = 3
MOST_SHOWN = 100


class Recommendations(NamedTuple):
    """Items and their scores for each user, in the order of the query, best first.

    Attributes:
        items: the items' own ids; ``k`` per user, or all where fewer are left.
        scores: the model's scores before the sigmoid.
    """

    items: list[list[int | str]]
    scores: list[list[float]]


class NCF(LayeredModel):
    """Scores of items for users, from two tables outside the compute device.

    A row holds both halves of a user or an item side by side: ``factors`` numbers for GMF and ``layers[0] / 2`` for
    MLP. So a step swaps one record per user and per item.

    With p and q for a user's and an item's rows, the score before the sigmoid is (He et al. 2017)

    - gmf: h · (p ⊙ q), equation 9;
    - mlp: h · φ(p, q), where φ is ReLU(W · + b), layer upon layer, over p and q one after the other, equation 10;
    - neumf: h · (p ⊙ q and φ(p, q), one after the other), equation 12, each half with separate rows.

    Args:
        num_users, num_items: rows of the tables.
        settings: ``model``, ``factors`` and ``layers``; ``storage`` and ``scratch``, where tables on disk are in a
            temporary directory that goes with ``close``, or with the model; ``state_dtype``, as for
            ``speedswap.Embedding``; and ``seed``, of all initial values: rows are normal with a deviation of 0.01, as
            in the paper.
        job: the ranks that own the rows, if they are more than one.

    Source: He et al., Neural Collaborative Filtering, WWW 2017, arXiv:1708.05031.

    Example:
        >>> model = NCF(1000, 500, NcfSettings(model="neumf", factors=8, layers=(16, 8)))
        >>> model.user.embedding_dim
        16
        >>> model(torch.tensor([3, 999]), torch.tensor([[0, 1, 2], [3, 4, 499]])).shape
        torch.Size([2, 3])
    """

    def __init__(self, num_users: int, num_items: int, settings: NcfSettings, job: Job | None = None) -> None:
        super().__init__()
        self.split: NcfSplit | None = None
        """The users' interactions, and the rows' own ids, for ``recommend``; without it rows are simply numbered."""
        self._gmf_width, self._mlp_width = settings.row_widths()
        place, self._remove_folder = (job or Job()).place_of_tables(self, settings.storage, settings.scratch)
        # One seed for both would give row n of the two tables the same values.
        seeds = np.random.SeedSequence(settings.seed).generate_state(3, np.uint64).tolist()
        self.user, self.item = (
            speedswap.Embedding(
                rows,
                self._gmf_width + self._mlp_width,
                storage=place.of_table(name),
                init=speedswap.init.normal(std=INIT_STD),
                seed=seed,
                name=name,
                state_dtype=getattr(torch, settings.state_dtype),
            )
            for name, rows, seed in (("users", num_users, seeds[0]), ("items", num_items, seeds[1]))
        )
        self.tower = layers_of(settings.tower())
        self.score = nn.Linear(self._gmf_width + sum(settings.tower()[-1:]), 1)
        self.initialize_layers(seeds[2] >> 1)

    def lookups(self) -> Mapping[Any, Callable[[NcfBatch], Tensor]]:
        return {self.user: lambda batch: batch.users, self.item: lambda batch: batch.items}

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return scores before the sigmoid.

        Args:
            users: int64, shape (users,).
            items: int64, shape (users, n): the items to score for each user.

        Returns:
            Shape (users, n).
        """
        return self.score_rows(self.user(users).unsqueeze(1), self.item(items))

    def score_rows(self, p: Tensor, q: Tensor) -> Tensor:
        """Score rows that were looked up: (users, 1, width) and (users or 1, n, width) give (users, n)."""
        widths = [self._gmf_width, self._mlp_width]
        (p_gmf, p_mlp), (q_gmf, q_mlp) = torch.split(p, widths, dim=-1), torch.split(q, widths, dim=-1)
        halves = [p_gmf * q_gmf] if self._gmf_width else []
        if self._mlp_width:
            pairs = (len(p), q.shape[1], self._mlp_width)
            halves.append(self.tower(torch.cat([p_mlp.expand(pairs), q_mlp.expand(pairs)], dim=-1)))
        scores: Tensor = self.score(torch.cat(halves, dim=-1))
        return scores.squeeze(-1)

    def recommend(
        self,
        user_ids: Sequence[int | str] | Tensor | NDArray[np.generic],
        k: int = 10,
        exclude_seen: bool = True,
    ) -> Recommendations:
        """Find the items with the highest scores for users, among all items.

        Items are scored in chunks: memory holds a quarter of a million pairs at a time, wherever the tables live. Of
        equal scores the first row wins.

        Args:
            user_ids: the users' ids in the ratings, numbers or text (12 and "12" are the same), in a list, array or
                tensor; rows of the table where interactions were made up.
            k: items for each user.
            exclude_seen: leave out the user's items in the ratings, with the latest one that was set apart.

        Returns:
            ``items``, for each user a list of up to ``k`` ids as the ratings have them, best first, and ``scores``, as
            many numbers before the sigmoid. A user who has fewer items left gets fewer.

        Raises:
            UnknownUserError: a user was not in the ratings; the message names them.
            SettingsError: ``k`` is below 1, or ``user_ids`` is not a list.
            CheckpointError: the users' items are unknown.

        Example:
            >>> model = NCF(3, 4, NcfSettings(model="gmf", factors=2))
            >>> items, scores = model.recommend([0, 2], k=2, exclude_seen=False)
            >>> [len(best) for best in items]
            [2, 2]
        """
        user_ids = user_ids.tolist() if isinstance(user_ids, Tensor | np.ndarray) else user_ids
        if isinstance(user_ids, str | bytes) or not isinstance(user_ids, Iterable):
            raise SettingsError(f"user_ids is {user_ids!r}: give a list of ids")
        if k < 1:
            raise SettingsError(f"{named('k')} is {k}: give a whole number of 1 or more")
        if exclude_seen and self.split is None:
            raise CheckpointError(
                "exclude_seen is True, but what users have seen was not saved with this model: train it again, or give "
                "exclude_seen=False"
            )
        users = rows_of(user_ids, self.user_ids)
        own_ids = (self.split.item_ids if self.split is not None else None) or range(self.item.num_embeddings)
        found = Recommendations([], [])
        for first in range(0, len(users), CHUNK_USERS):
            some = users[first : first + CHUNK_USERS]
            for values, rows in zip(*top_rows(self, some, k, self.split if exclude_seen else None), strict=True):
                there = values > -torch.inf
                found.items.append([own_ids[row] for row in rows[there].tolist()])
                found.scores.append(values[there].tolist())
        return found

    @property
    def user_ids(self) -> OwnIds:
        """The users' ids in the ratings; their rows' numbers where interactions were made up."""
        return (self.split and self.split.user_ids) or OwnIds(range(self.user.num_embeddings))


# ---- the best items out of all, in bounded memory --------------------------------------------------------------------


def rows_of(user_ids: Iterable[object], ids: OwnIds, name: str = "user_ids") -> Ids:
    """Return the users' rows.

    Raises:
        UnknownUserError: some of them are unknown.
    """
    users = [*user_ids]
    rows = [ids.row(user) for user in users]
    if strangers := [repr(user) for user, row in zip(users, rows, strict=True) if row is None]:
        shown = text if len(text := ", ".join(strangers)) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
        raise UnknownUserError(
            f"{name} has {shown}, not trained on: users are {len(ids):,}, such as "
            f"{', '.join(repr(ids[row]) for row in range(min(SHOWN_IDS, len(ids))))}"
        )
    return np.array(rows, np.int64)


@torch.no_grad()
def top_rows(model: NCF, users: Ids, k: int, seen: NcfSplit | None) -> tuple[Tensor, Tensor]:
    """Return the highest scores of some users and their items' rows, shape (users, k) or fewer; -inf for seen ones."""
    num_items = model.item.num_embeddings
    device = next(model.score.parameters()).device
    p = model.user(torch.from_numpy(users).to(device))
    taken = [np.zeros(0, np.int64) if seen is None else seen.taken(user) for user in users]
    places, items = np.repeat(np.arange(len(users)), [*map(len, taken)]), np.concatenate(taken)
    best = torch.empty(len(users), 0, device=device)
    rows = torch.empty(len(users), 0, dtype=torch.int64, device=device)
    chunk = max(1, CHUNK_SCORES // len(users))
    for first in range(0, num_items, chunk):
        ids = torch.arange(first, min(first + chunk, num_items), device=device)
        scores = model.score_rows(p.unsqueeze(1), model.item(ids).unsqueeze(0))
        if scores.isnan().any():
            raise CheckpointError(f"the model's scores are not numbers: train it again, with a lower {named('lr')}")
        here = (first <= items) & (items < first + len(ids))
        scores[torch.from_numpy(places[here]), torch.from_numpy(items[here] - first)] = -torch.inf
        best, at = torch.cat([best, scores], dim=1).sort(dim=1, descending=True, stable=True)  # of ties the first wins
        best, rows = best[:, :k], torch.cat([rows, ids.expand(len(users), -1)], dim=1).gather(1, at[:, :k])
    return best.cpu(), rows.cpu()


TOP = 10
CHUNK_CANDIDATES = 1 << 17
FEW = 1_000
"""The most draws for which comparing each with all earlier ones is quicker."""


class Ranking(NamedTuple):
    """Means over the tested users.

    Attributes:
        hr: ``HR@10``: the share of users whose item is among the ten highest scores.
        ndcg: ``NDCG@10``: the same, counting 1 / log2(place + 1), with 1 for the first place.
    """

    hr: float
    ndcg: float


@dataclass(frozen=True)
class Candidates:
    """Users to test, each with the item that they took and items that they never took.

    Attributes:
        users: int64, shape (users,).
        items: int64, shape (users, 1 + negatives); the first is the user's.
    """

    users: Tensor
    items: Tensor

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
    chunk = max(1, CHUNK_CANDIDATES // candidates.items.shape[1])
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
