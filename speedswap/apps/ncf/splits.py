"""A split in a file: the interactions and the user's own ids, as arrays of plain numbers."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speedswap.apps.files import open_regular, write_whole
from speedswap.apps.ncf.errors import CheckpointError
from speedswap.apps.ncf.idmap import IdMap
from speedswap.apps.ncf.interactions import Interactions, Split

__all__ = ["load_split", "save_split"]

CHUNK_PAIRS = 1 << 20


def save_split(split: Split, path: Path) -> None:
    """Write a split as ``.npz``, durably: for each user where their items end, the items, and the ones to test with."""
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
    with write_whole(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_split(path: Path) -> Split:
    """Read what ``save_split`` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        arrays = read_arrays(path)
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
    except Exception as error:  # a damaged file may fail in any of these steps
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} cannot be read ({error}): train again") from error
    return Split(Interactions(keys, len(ends), num_items), users, taken, ids["user"], ids["item"])


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    with open_regular(path) as file:
        with zipfile.ZipFile(file) as parts:
            stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts.infolist())
            check(stored, "it is compressed, and may be of any size")
        file.seek(0)
        with np.load(file, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}


def check(right: object, problem: str) -> None:
    if not right:
        raise ValueError(problem)


def inside(ids: NDArray[np.generic], below: int) -> bool:
    return ids.ndim == 1 and (not len(ids) or bool(ids.min() >= 0 and ids.max() < below))


def own_ids(arrays: dict[str, NDArray[np.generic]], side: str) -> IdMap | None:
    forms = ("numbers", "text", "ends")
    found = {form: arrays[f"{side}_{form}"] for form in forms if f"{side}_{form}" in arrays}
    return IdMap.from_arrays(found) if found else None
