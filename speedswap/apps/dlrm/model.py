"""DLRM: dot products between the vectors of a sample's categories, and of its integers.

The vectors are rows of tables outside the compute device, one per category: ids get rows when they first occur.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import speedswap
from speedswap.apps.dlrm.samples import CATEGORIES, INTEGERS, NAMES, Samples
from speedswap.apps.ranks import Job
from speedswap.kernels import pair_gradients, pair_products

COLUMNS = NAMES[-CATEGORIES:]
INIT_STD = 0.05


class DLRM(nn.Module):
    """The probability of a click, before the sigmoid.

    The integers x become log(1 + x), those below 0 counting as 0, and pass the bottom layers to a vector of the
    embeddings' width. The dot products of each two of the 27 vectors, next to that of the integers, pass the top
    layers.

    Args:
        embeddings: returns a vector per category, shape (n, 26, width), for ids of shape (26, n).
        width: of the vectors.
        bottom: widths of the hidden layers below.
        top: of those above.
        seed: of the layers' initial values: Xavier, and zero biases.

    Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019,
    arXiv:1906.00091.
    """

    def __init__(
        self, embeddings: nn.Module, width: int, *, bottom: Sequence[int], top: Sequence[int], seed: int = 0
    ) -> None:
        super().__init__()
        self.embeddings: Any = embeddings
        vectors = 1 + CATEGORIES
        self.bottom = layers([INTEGERS, *bottom, width])
        self.top = layers([width + vectors * (vectors - 1) // 2, *top, 1])
        self.top.pop(-1)  # the logit may be negative
        generator = torch.Generator().manual_seed(seed)
        for layer in [*self.bottom, *self.top]:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, samples: Samples) -> Tensor:
        """Return the logits of samples, shape (n,)."""
        integers = self.bottom(samples.integers.clamp(min=0).T.float().log1p())
        logits: Tensor = self.top(interact(integers, self.embeddings(samples.ids)))
        return logits.squeeze(1)

    def predict(self, samples: Samples) -> Tensor:
        """Return the logits of samples, shape (n,), without a gradient and without rows for new ids."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                logits: Tensor = self(samples)
        finally:
            self.train(training)
        return logits

    def dense(self) -> dict[str, nn.Parameter]:
        """Return the parameters outside the tables, by name."""
        return {
            name: parameter for name, parameter in self.named_parameters() if name.split(".")[0] in ("bottom", "top")
        }


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of these widths, each with a ReLU after it."""
    return nn.Sequential(
        *(layer for inputs, outputs in itertools.pairwise(widths) for layer in (nn.Linear(inputs, outputs), nn.ReLU()))
    )


# ---- the tables ------------------------------------------------------------------------------------------------------


class Embeddings(nn.Module):
    """A vector per category of a sample, from 26 tables in one store.

    An id gets a row at its first sighting in training, or after several; a new id in evaluation has a vector of zeros.

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


# ---- the interaction -------------------------------------------------------------------------------------------------


def interact(first: Tensor, rest: Tensor) -> Tensor:
    """Return each sample's first vector, followed by the dot products of each two of its vectors.

    In torch's operations that is several copies and many small matrix products; on the CPU one loop does it, in a
    fifth of the time.

    Args:
        first: shape (n, width).
        rest: shape (n, others, width).

    Returns:
        Shape (n, width + (others + 1) · others / 2).

    >>> interact(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]))
    tensor([[1., 2., 1., 5., 3.]])
    """
    if first.device.type == "cpu" and first.dtype == rest.dtype == torch.float32:
        products: Tensor = Interaction.apply(first, rest)  # type: ignore[no-untyped-call]
        return products
    return interact_in_torch(first, rest)


def interact_in_torch(first: Tensor, rest: Tensor) -> Tensor:
    """Return the same as :func:`interact`, on any device and of any dtype, but for rounding."""
    vectors = torch.cat([first.unsqueeze(1), rest], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    count = products.shape[1]
    rows, columns = torch.tril_indices(count, count, -1, device=first.device)
    return torch.cat([first, products.flatten(1).index_select(1, rows * count + columns)], dim=1)


class Interaction(torch.autograd.Function):
    """:func:`interact` for the CPU."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, rest: Tensor) -> Tensor:
        ctx.save_for_backward(first, rest)
        return pair_products(first, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return pair_gradients(grad, *ctx.saved_tensors)
