"""DLRM: dot products between the vectors of a sample's categories, and of its integers; and how well it predicts.

The vectors are rows of tables outside the compute device, one per category: ids get rows when they first occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import speedswap
from speedswap.apps.dlrm.criteo import CATEGORIES, NAMES, Samples
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.ranks import Job
from speedswap.apps.run import LayeredModel, ModelWithTables, layers_of
from speedswap.kernels import pair_gradients, pair_products
from speedswap.monitor.figures import modes_kept

if TYPE_CHECKING:
    from speedswap.apps.dlrm.stream import ClickBatch

COLUMNS = NAMES[-CATEGORIES:]
INIT_STD = 0.05


class DLRM(LayeredModel):
    """The probability of a click, before the sigmoid.

    The integers x become log(1 + x), those below 0 counting as 0, and pass the bottom layers to a vector of the
    embeddings' width. The dot products of each two of the 27 vectors, next to that of the integers, pass the top
    layers.

    Args:
        settings: ``dim``, ``bottom`` and ``top``, the widths of the vectors and of the hidden layers below and above;
            ``seed``, of the layers' initial values: Xavier, and zero biases; and those of :class:`Embeddings`.
        job: the ranks that own the tables, if they are more than one.
        embeddings: instead of the tables, what returns a vector per category, shape (n, 26, dim), for ids of shape
            (26, n).

    Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019,
    arXiv:1906.00091.
    """

    def __init__(self, settings: DlrmSettings, job: Job | None = None, embeddings: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings: Any = Embeddings(settings, job) if embeddings is None else embeddings
        self.bottom, self.top = map(layers_of, settings.layer_widths())
        self.top.pop(-1)  # the logit may be negative
        self.initialize_layers(settings.seed)

    def lookups(self) -> Mapping[Any, Callable[[ClickBatch], dict[str, Tensor]]]:
        return {self.embeddings.collection: lambda batch: by_name(batch.samples.ids)}

    def forward(self, samples: Samples) -> Tensor:
        """Return the logits of samples, shape (n,)."""
        integers = self.bottom(samples.integers.clamp(min=0).T.float().log1p())
        logits: Tensor = self.top(interact(integers, self.embeddings(samples.ids)))
        return logits.squeeze(1)

    def predict(self, samples: Samples) -> Tensor:
        """Return the logits of samples, shape (n,), without a gradient and without rows for new ids."""
        with modes_kept([self]), torch.no_grad():
            self.eval()
            logits: Tensor = self(samples)
        return logits


# ---- the tables ------------------------------------------------------------------------------------------------------


class Embeddings(ModelWithTables):
    """A vector per category of a sample, from 26 tables in one store.

    An id gets a row at its first sighting in training, or after several; a new id in evaluation has a vector of zeros.

    Args:
        settings: ``capacity``, the ids that each table has room for; ``dim``, the width of a vector; ``admit_after``;
            ``evict``; ``storage`` and ``scratch``, where tables on disk are in a temporary directory that goes with
            ``close``, or with the module; ``state_dtype``, as for :class:`speedswap.Embedding`; and ``seed``, of the
            rows, which are normal with a deviation of 0.05.
        job: the ranks that own rows and ids, if they are more than one.

    Example:
        >>> embeddings = Embeddings(DlrmSettings(capacity=1000, dim=8))
        >>> embeddings(torch.randint(2**32, (26, 5))).shape
        torch.Size([5, 26, 8])
        >>> embeddings.known()["C1"]
        5
    """

    def __init__(self, settings: DlrmSettings, job: Job | None = None) -> None:
        super().__init__()
        self._width = settings.dim
        place, self._remove_folder = (job or Job()).place_of_tables(self, settings.storage, settings.scratch)
        evict = None if settings.evict == "none" else settings.evict
        seeds = np.random.SeedSequence(settings.seed).generate_state(CATEGORIES, np.uint64).tolist()
        configs = []
        for name, seed in zip(COLUMNS, seeds, strict=True):
            ids = speedswap.IdMap(settings.capacity, admit_after=settings.admit_after, evict=evict)
            config = speedswap.EmbeddingBagConfig(
                name=name,
                num_embeddings=ids.num_rows,
                embedding_dim=settings.dim,
                init=speedswap.init.normal(std=INIT_STD),
                seed=seed,
                state_dtype=getattr(torch, settings.state_dtype),
                id_map=ids,
            )
            configs.append(config)
        self.collection = speedswap.EmbeddingBagCollection(configs, storage=place)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids, int64, shape (26, n); the vectors' shape is (n, 26, width)."""
        pooled: Tensor = self.collection(by_name(ids)).values()
        return pooled.view(-1, CATEGORIES, self._width)

    def known(self) -> dict[str, int]:
        """Return the number of each table's ids that have a row."""
        return {name: len(ids) for name, ids in self.collection.id_maps.items()}


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


class Scores:
    """Predictions and labels of any number of samples.

    Their order does not matter. Memory holds 5 bytes per sample, on the device of the predictions until they are read.

    Example:
        >>> scores = Scores()
        >>> scores.add(torch.tensor([0.5, -1.0, 2.0, 0.5]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> len(scores), scores.auc, round(scores.log_loss, 4)
        (4, 0.875, 0.4721)
    """

    def __init__(self) -> None:
        self._parts = [(torch.zeros(0), torch.zeros(0, dtype=torch.bool))]

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add predictions.

        Args:
            logits: before the sigmoid, shape (n,), on any device, which is not waited for.
            labels: 0 or 1, float32, shape (n,), on the same.
        """
        self._parts.append((logits.detach().float(), labels == 1))

    def __len__(self) -> int:
        return sum(len(logits) for logits, _ in self._parts)

    @property
    def rate(self) -> float:
        """The share of positive labels; NaN without samples."""
        return self.state()[1].double().mean().item()

    @property
    def auc(self) -> float:
        """The area under the ROC curve: the probability that a positive sample has a higher score than a negative one,
        where equal scores count half (Hanley and McNeil 1982). NaN where all labels are equal, or a score is NaN.
        """
        logits, labels = self.state()
        negatives, positives = logits[~labels].sort().values, logits[labels]
        pairs = len(negatives) * len(positives)
        if not pairs or logits.isnan().any():
            return math.nan
        below = sum(torch.searchsorted(negatives, positives, right=ties).sum().item() for ties in (False, True))
        return below / (2 * pairs)

    @property
    def log_loss(self) -> float:
        """The mean binary cross-entropy; infinite if an infinite score is wrong, NaN without samples."""
        logits, labels = self.state()
        losses = F.softplus(torch.where(labels, -logits, logits).double())
        return losses.sort().values.mean().item()  # in one order, whatever that of the samples

    @property
    def base_loss(self) -> float:
        """The log loss of predicting the share of positive labels for every sample."""
        rate = self.rate
        return -sum(share * math.log(share) for share in (rate, 1 - rate) if share)

    def of_all(self, job: Job) -> Scores:
        """Return the predictions of all ranks."""
        if job.size == 1:
            return self
        logits, labels = self.state()
        every = torch.cat(job.collect(2 * logits.view(torch.int32).long() + labels))
        found = Scores()
        found.restore(((every >> 1).int().view(torch.float32), (every & 1).bool()))
        return found

    def state(self) -> tuple[Tensor, Tensor]:
        """Return the predictions, and True for those of positive samples, on the CPU."""
        logits, labels = (torch.cat([part.cpu() for part in parts]) for parts in zip(*self._parts, strict=True))
        self.restore((logits, labels))
        return logits, labels

    def restore(self, state: tuple[Tensor, Tensor]) -> None:
        """Go on from a state."""
        self._parts = [state]
