"""The tables of the categories, one for each, outside the compute device: ids come as they are, and keep coming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import speedswap
from speedswap.apps.dlrm.samples import CATEGORIES, NAMES
from speedswap.apps.ranks import Job

__all__ = ["Embeddings"]

COLUMNS = NAMES[-CATEGORIES:]
INIT_STD = 0.05


class Embeddings(nn.Module):
    """A vector per category of a sample, from 26 tables in one store.

    An id gets a row when it first comes in training, or after some times; a new id in evaluation has a vector of zeros.

    Args:
        capacity: ids that each table has room for.
        width: of a vector.
        admit_after: sightings before an id gets a row.
        evict: ``lru``, ``lfu`` or ``none``: the id that makes room in a full table, as for :class:`speedswap.IdMap`.
        storage: of the tables, as for :class:`speedswap.Embedding`. Memmap tables are in a temporary directory that
            goes with ``close``, or with the module.
        state_dtype: of the stored optimizer state, as for :class:`speedswap.Embedding`.
        scratch: the directory to make that in; the system's by default.
        seed: of the rows, which are normal with a deviation of 0.05.
        job: the ranks that own rows and ids, if they are more than one.

    Example:
        >>> embeddings = Embeddings(1000, 8)
        >>> embeddings(torch.randint(2**32, (26, 5))).shape
        torch.Size([5, 26, 8])
        >>> embeddings.known()["C1"]
        5
    """

    def __init__(
        self,
        capacity: int,
        width: int,
        *,
        admit_after: int = 1,
        evict: str = "lru",
        storage: str = "auto",
        state_dtype: torch.dtype | None = None,
        scratch: Path | None = None,
        seed: int = 0,
        job: Job | None = None,
    ) -> None:
        super().__init__()
        self._width = width
        place, self._remove_folder = (job or Job()).place_of_tables(self, storage, scratch)
        seeds = np.random.SeedSequence(seed).generate_state(CATEGORIES, np.uint64).tolist()
        configs = []
        for name, own_seed in zip(COLUMNS, seeds, strict=True):
            ids = speedswap.IdMap(capacity, admit_after=admit_after, evict=None if evict == "none" else evict)
            config = speedswap.EmbeddingBagConfig(
                name=name,
                num_embeddings=ids.num_rows,
                embedding_dim=width,
                init=speedswap.init.normal(std=INIT_STD),
                seed=own_seed,
                state_dtype=state_dtype,
                id_map=ids,
            )
            configs.append(config)
        self.collection = speedswap.EmbeddingBagCollection(configs, storage=place)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids, int64, shape (26, n); the vectors' shape is (n, 26, width)."""
        pooled: Tensor = self.collection(by_name(ids)).values()
        return pooled.view(-1, CATEGORIES, self._width)

    def announced(self, ids_of: Callable[[Any], Tensor]) -> Mapping[Any, Callable[[Any], dict[str, Tensor]]]:
        """Return the lookups of a batch for :func:`speedswap.lookahead`, from a function from it to its ids."""
        return {self.collection: lambda batch: by_name(ids_of(batch))}

    def known(self) -> dict[str, int]:
        """Return the number of each table's ids that have a row."""
        return {name: len(ids) for name, ids in self.collection.id_maps.items()}

    def stores(self) -> list[speedswap.Table]:
        """Return the tables that hold those of the categories."""
        return [group.table for group in self.collection.groups]  # type: ignore[misc]

    def close(self) -> None:
        """Close the tables, and remove those in a temporary directory."""
        self.collection.close()
        self._remove_folder()


def by_name(ids: Tensor) -> dict[str, Tensor]:
    return dict(zip(COLUMNS, ids, strict=True))
