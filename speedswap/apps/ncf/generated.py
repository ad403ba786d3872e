"""Generated splits of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.ncf.interactions import Ids, Interactions, NcfSplit, leave_one_out

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
