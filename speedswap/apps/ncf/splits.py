"""Splits made up, of any size, and splits as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.errors import CheckpointError
from speedswap.apps.ncf.interactions import IdMap, Ids, Interactions, Split, leave_one_out

__all__ = ["arrays_of", "generate_split", "split_of"]

RANK = 4
"""The rank of the planted structure: tastes and items are vectors of this length."""
CHOICES = 8
"""Items drawn by popularity, from which a user takes one by taste."""
TASTE = 2.0
"""The weight of taste: 0 leaves all to chance."""
HEAD = 10.0
"""The most popular items differ little, as in real catalogues: 1 / (place + 10), by Zipf and Mandelbrot."""
CHUNK_INTERACTIONS = 1 << 18
CHUNK_PAIRS = 1 << 20


def generate_split(num_users: int, num_items: int, interactions: int, *, seed: int) -> Split:
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
    for number, (first, last) in enumerate(chunked(num_users, max(1, CHUNK_INTERACTIONS // (per_user + 1))), 1):
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
    return Split(Interactions(train, num_users, num_items), test_users, test_items)


def zipf(rng: np.random.Generator, shape: tuple[int, ...], num_items: int) -> NDArray[np.int64]:
    """Draw places by popularity; one below n has the probability log(1 + n / HEAD) / log(1 + num_items / HEAD)."""
    places: NDArray[np.int64] = (HEAD * np.expm1(rng.random(shape) * np.log1p(num_items / HEAD))).astype(np.int64)
    return np.minimum(places, num_items - 1, out=places)  # against rounding


def chunked(count: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, size):
        yield first, min(first + size, count)


# ---- in a checkpoint ------------------------------------------------------------------------------------------------


def arrays_of(split: Split) -> dict[str, NDArray[np.generic]]:
    """Return a split as arrays: the end of each user's items, the items, and the ones to test with."""
    train = split.train
    counts = train.num_items - train.unseen_counts(np.arange(train.num_users))
    small = np.int32 if train.num_items <= 2**31 else np.int64
    items = np.empty(len(train), small)
    for first in range(0, len(train), CHUNK_PAIRS):
        positions = np.arange(first, min(first + CHUNK_PAIRS, len(train)))
        items[first : first + CHUNK_PAIRS] = train.pairs(positions)[1]
    arrays: dict[str, NDArray[np.generic]] = {
        "num_items": np.array(train.num_items),
        "train_ends": np.cumsum(counts),
        "train_items": items,
        "test_users": split.test_users,
        "test_items": split.test_items.astype(small),
    }
    for side, ids in (("user", split.user_ids), ("item", split.item_ids)):
        if ids is not None:
            arrays |= {f"{side}_{name}": values for name, values in ids.arrays().items()}
    return arrays


def split_of(arrays: dict[str, NDArray[np.generic]], folder: Path) -> Split:
    """Return the split that :func:`arrays_of` described.

    Args:
        arrays: from a checkpoint.
        folder: of the checkpoint, for messages.

    Raises:
        CheckpointError: they do not fit together.
    """
    try:
        num_items = int(arrays["num_items"])
        names = ("train_ends", "train_items", "test_users", "test_items")
        ends, items, users, taken = (arrays[name].astype(np.int64, copy=False) for name in names)
        keys = np.repeat(np.arange(len(ends)) * num_items, np.diff(ends, prepend=0)) + items
        ids = {side: own_ids(arrays, side) for side in ("user", "item")}
        check(np.all(np.diff(keys) > 0) and inside(items, num_items), "its interactions are not in order")
        fits = len(users) == len(taken) and inside(users, len(ends)) and inside(taken, num_items)
        check(fits, "its test pairs are not among them")
        for side, rows in (("user", len(ends)), ("item", num_items)):
            found = ids[side]
            check(found is None or len(found) == rows, f"its {side} ids are not {rows:,}")
    except Exception as error:  # arrays from anywhere may fail at any step
        raise CheckpointError(f"checkpoint {folder}: interactions cannot be read ({error}): train again") from error
    return Split(Interactions(keys, len(ends), num_items), users, taken, ids["user"], ids["item"])


def check(right: object, problem: str) -> None:
    if not right:
        raise ValueError(problem)


def inside(ids: NDArray[np.generic], below: int) -> bool:
    return ids.ndim == 1 and (not len(ids) or bool(ids.min() >= 0 and ids.max() < below))


def own_ids(arrays: dict[str, NDArray[np.generic]], side: str) -> IdMap | None:
    forms = ("numbers", "text", "ends")
    found = {form: arrays[f"{side}_{form}"] for form in forms if f"{side}_{form}" in arrays}
    return IdMap.from_arrays(found) if found else None
