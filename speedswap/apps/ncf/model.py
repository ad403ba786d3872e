"""Neural collaborative filtering: GMF, MLP, and both in one, NeuMF; and the items that it scores highest for users."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import speedswap
from speedswap.apps.errors import CheckpointError, SettingsError, UnknownUserError
from speedswap.apps.ncf.interactions import Ids, NcfSplit, OwnIds
from speedswap.apps.ranks import Job

MODELS = ("gmf", "mlp", "neumf")
INIT_STD = 0.01
CHUNK_USERS = 256
CHUNK_SCORES = 1 << 18
SHOWN_IDS = 3
MOST_SHOWN = 100


class Recommendations(NamedTuple):
    """Items and their scores for each user, in the order of the query, best first."""

    items: list[list[int | str]]
    """The items' own ids; ``k`` per user, or all where fewer are left."""
    scores: list[list[float]]
    """The model's scores before the sigmoid."""


class NCF(nn.Module):
    """Scores of items for users, from two tables outside the compute device.

    A row holds both halves of a user or an item side by side: ``factors`` numbers for GMF and ``layers[0] / 2`` for
    MLP. So a step swaps one record per user and per item.

    With p and q for a user's and an item's rows, the score before the sigmoid is (He et al. 2017)

    - gmf: h · (p ⊙ q), equation 9;
    - mlp: h · φ(p, q), where φ is ReLU(W · + b), layer upon layer, over p and q one after the other, equation 10;
    - neumf: h · (p ⊙ q and φ(p, q), one after the other), equation 12, each half with separate rows.

    Args:
        num_users, num_items: rows of the tables.
        model: ``gmf``, ``mlp`` or ``neumf``.
        factors: width of the GMF half.
        layers: widths of the MLP half: of p and q together, then of each layer.
        storage: of the tables, as for ``speedswap.Embedding``. Memmap tables are in a temporary directory that goes
            with ``close``, or with the model.
        scratch: the directory to make that in; the system's by default.
        state_dtype: of the stored optimizer state, as for ``speedswap.Embedding``.
        seed: of all initial values; rows are normal with a deviation of 0.01, as in the paper.
        job: the ranks that own the rows, if they are more than one.

    RatingsSource: He et al., Neural Collaborative Filtering, WWW 2017, arXiv:1708.05031.

    Example:
        >>> model = NCF(1000, 500, model="neumf", factors=8, layers=[16, 8])
        >>> model.user.embedding_dim
        16
        >>> model(torch.tensor([3, 999]), torch.tensor([[0, 1, 2], [3, 4, 499]])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        *,
        model: str = "neumf",
        factors: int = 32,
        layers: Sequence[int] = (64, 32, 16, 8),
        storage: str = "auto",
        state_dtype: torch.dtype | None = None,
        scratch: Path | None = None,
        seed: int = 0,
        job: Job | None = None,
    ) -> None:
        super().__init__()
        self.user_ids: OwnIds | None = None
        """The rows' own ids, for ``recommend``; None where they are simply numbered."""
        self.item_ids: OwnIds | None = None
        self.split: NcfSplit | None = None
        """The users' interactions."""
        self._gmf_width = factors if model != "mlp" else 0
        self._mlp_width = layers[0] // 2 if model != "gmf" else 0
        place, self._remove_folder = (job or Job()).place_of_tables(self, storage, scratch)
        # One seed for both would give row n of the two tables the same values.
        seeds = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()

        def embedding(name: str, rows: int, seed: int) -> speedswap.Embedding:
            width = self._gmf_width + self._mlp_width
            init = speedswap.init.normal(std=INIT_STD)
            return speedswap.Embedding(
                rows,
                width,
                storage=place.of_table(name),
                init=init,
                seed=seed,
                name=name,
                state_dtype=state_dtype,
            )

        self.user = embedding("users", num_users, seeds[0])
        self.item = embedding("items", num_items, seeds[1])
        self.tower, predicted = nn.Sequential(), self._gmf_width
        if self._mlp_width:
            for inputs, outputs in itertools.pairwise([2 * self._mlp_width, *layers[1:]]):
                self.tower.extend([nn.Linear(inputs, outputs), nn.ReLU()])
            predicted += layers[-1]
        self.score = nn.Linear(predicted, 1)
        generator = torch.Generator().manual_seed(seeds[2] >> 1)
        for layer in [*self.tower, self.score]:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)

    def know(self, split: NcfSplit) -> None:
        """Take over the rows' own ids and the users' interactions, for ``recommend``."""
        self.user_ids, self.item_ids, self.split = split.user_ids, split.item_ids, split

    def dense(self) -> dict[str, nn.Parameter]:
        """Return the parameters outside the tables, by name."""
        return {
            name: parameter for name, parameter in self.named_parameters() if name.split(".")[0] in ("tower", "score")
        }

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
            CheckpointError: the users' items are unknown, as in checkpoints of former versions.

        Example:
            >>> model = NCF(3, 4, model="gmf", factors=2)
            >>> items, scores = model.recommend([0, 2], k=2, exclude_seen=False)
            >>> [len(best) for best in items]
            [2, 2]
        """
        user_ids = user_ids.tolist() if isinstance(user_ids, Tensor | np.ndarray) else user_ids
        if isinstance(user_ids, str | bytes) or not isinstance(user_ids, Iterable):
            raise SettingsError(f"user_ids is {user_ids!r}: give a list of ids")
        if k < 1:
            raise SettingsError(f"k is {k}: give a whole number of 1 or more")
        if exclude_seen and self.split is None:
            raise CheckpointError(
                "exclude_seen is True, but what users have seen was not saved with this model: train it again, or give "
                "exclude_seen=False"
            )
        users = rows_of(user_ids, self.user_ids or OwnIds(np.arange(self.user.num_embeddings)))
        items: list[list[int | str]] = []
        scores: list[list[float]] = []
        with torch.no_grad():
            for first in range(0, len(users), CHUNK_USERS):
                some = users[first : first + CHUNK_USERS]
                for values, rows in zip(*top_rows(self, some, k, self.split if exclude_seen else None), strict=True):
                    there = values > -torch.inf
                    found = rows[there].tolist()
                    items.append(found if self.item_ids is None else [self.item_ids[row] for row in found])
                    scores.append(values[there].tolist())
        return Recommendations(items, scores)

    def close(self) -> None:
        """Close the tables, and remove those in a temporary directory."""
        self.user.table.close()
        self.item.table.close()
        self._remove_folder()


# ---- the best items out of all, in bounded memory --------------------------------------------------------------------


def rows_of(user_ids: Iterable[object], ids: OwnIds) -> Ids:
    """Return the users' rows.

    Raises:
        UnknownUserError: one of them is unknown.
    """
    rows = []
    for place, user in enumerate(user_ids):
        if (row := ids.row(user)) is None:
            shown = text if len(text := repr(user)) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
            raise UnknownUserError(
                f"user_ids[{place}] is {shown}, who was not trained on: users are {len(ids):,}, such as "
                f"{', '.join(repr(ids[row]) for row in range(min(SHOWN_IDS, len(ids))))}"
            )
        rows.append(row)
    return np.array(rows, np.int64)


def top_rows(model: NCF, users: Ids, k: int, seen: NcfSplit | None) -> tuple[Tensor, Tensor]:
    """Return the highest scores of some users and their items' rows, shape (users, k) or fewer; -inf for seen ones."""
    num_items = model.item.num_embeddings
    device = next(model.score.parameters()).device
    p = model.user(torch.from_numpy(users).to(device))
    places, items = seen_items(users, seen)
    best = torch.empty(len(users), 0, device=device)
    rows = torch.empty(len(users), 0, dtype=torch.int64, device=device)
    chunk = max(1, CHUNK_SCORES // len(users))
    for first in range(0, num_items, chunk):
        ids = torch.arange(first, min(first + chunk, num_items), device=device)
        scores = model.score_rows(p.unsqueeze(1), model.item(ids).unsqueeze(0))
        if scores.isnan().any():
            raise CheckpointError("the model's scores are not numbers: train it again, with a lower lr")
        low, high = np.searchsorted(items, [first, first + len(ids)])
        scores[torch.from_numpy(places[low:high]), torch.from_numpy(items[low:high] - first)] = -torch.inf
        best, at = highest(torch.cat([best, scores], dim=1), k)
        rows = torch.cat([rows, ids.expand(len(users), -1)], dim=1).gather(1, at)
    return best.cpu(), rows.cpu()


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of each row in order, and their places; of ties the first, unlike ``Tensor.topk``."""
    k = min(k, scores.shape[1])
    least = scores.topk(k, dim=1).values[:, -1:]
    above, equal = scores > least, scores == least
    chosen = above | (equal & (equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)))
    at = chosen.nonzero()[:, 1].view(len(scores), k)
    values, order = scores.gather(1, at).sort(dim=1, descending=True, stable=True)
    return values, at.gather(1, order)


def seen_items(users: Ids, split: NcfSplit | None) -> tuple[Ids, Ids]:
    """Return the users' items, the test item included: places in ``users`` and items, by item."""
    if split is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places, items = split.train.seen(users)
    at = np.searchsorted(split.test_users, users)
    tested = np.flatnonzero(np.append(split.test_users, -1)[at] == users)
    places, items = np.concatenate([places, tested]), np.concatenate([items, split.test_items[at[tested]]])
    order = np.argsort(items, kind="stable")
    return places[order], items[order]
