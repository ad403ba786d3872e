"""A split in a file: the interactions and the user's own ids, as arrays of plain numbers."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def load_split(path: Path) -> Split:
    """Read what ``save_split`` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
        num_items = int(arrays["num_items"])
        ends = arrays["train_ends"]
        keys = np.repeat(np.arange(len(ends)) * num_items, np.diff(ends, prepend=0)) + arrays["train_items"]
        ids = {side: own_ids(arrays, side) for side in ("user", "item")}
        test = (arrays["test_users"], arrays["test_items"].astype(np.int64))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} cannot be read ({error}): train again") from error
    return Split(Interactions(keys, len(ends), num_items), *test, ids["user"], ids["item"])


def own_ids(arrays: dict[str, NDArray[np.generic]], side: str) -> IdMap | None:
    forms = ("numbers", "text", "ends")
    found = {form: arrays[f"{side}_{form}"] for form in forms if f"{side}_{form}" in arrays}
    return IdMap.from_arrays(found) if found else None
