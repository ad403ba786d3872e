"""Skip-gram with negative sampling over window blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import speedswap
from speedswap.apps.ranks import Job
from speedswap.apps.word2vec.blocks import NOISE, BlockBatch, PairWeights
from speedswap.apps.word2vec.settings import Word2VecSettings


class SkipGram(nn.Module):
    """Two tables of word vectors, one for words as centers and one for words as contexts.

    Args:
        words: size of the vocabulary.
        settings: of the run. Tables on disk are in a temporary directory that goes with ``close``, or with the model.
        job: the ranks that own the rows, if they are more than one.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013.
    """

    def __init__(self, words: int, settings: Word2VecSettings, job: Job | None = None) -> None:
        super().__init__()
        self.pair_weights = PairWeights(settings.window, settings.negative)
        place, self._remove_folder = (job or Job()).place_of_tables(self, settings.storage, settings.scratch)

        def embedding(name: str, init: speedswap.init.Initializer) -> speedswap.Embedding:
            how: dict[str, Any] = {"init": init, "seed": settings.seed, "name": name}
            how |= {"storage": place.of_table(name), "state_dtype": getattr(torch, settings.state_dtype)}
            return speedswap.Embedding(words, settings.dim, **how)

        self.center = embedding("center", speedswap.init.uniform(-0.5 / settings.dim, 0.5 / settings.dim))
        self.context = embedding("context", speedswap.init.zeros())

    def close(self) -> None:
        """Close the tables, and remove those in a temporary directory."""
        self.center.table.close()
        self.context.table.close()
        self._remove_folder()

    def forward(self, batch: BlockBatch) -> Tensor:
        """Return the batch's loss, summed over its pairs, or over those of a rank's share: a scalar."""
        weights = self.pair_weights(batch.left, batch.right)
        return skip_gram_loss(self.center(batch.centers), self.context(batch.contexts), weights)


def skip_gram_loss(centers: Tensor, contexts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of -log σ(score) over the pairs and of -log σ(-score) over the negatives.

    Args:
        centers: vectors, shape (blocks, BLOCK, dim).
        contexts: vectors, shape (blocks, words, dim), of which the last NOISE are negatives.
        weights: of the scores, shape (blocks, BLOCK, words); not differentiated.
    """
    loss: Tensor = _SkipGramLoss.apply(centers, contexts, weights)  # type: ignore[no-untyped-call]
    return loss


class _SkipGramLoss(torch.autograd.Function):
    """The loss with a hand-written gradient: that of the scores is computed in place, in one pass with the loss."""

    @staticmethod
    def forward(ctx: Any, centers: Tensor, contexts: Tensor, weights: Tensor) -> Tensor:
        scores = torch.bmm(centers, contexts.transpose(1, 2))
        scores[:, :, :-NOISE].neg_()
        weights = weights.to(scores.dtype)
        loss = torch.dot(F.softplus(scores).flatten(), weights.flatten())
        of_scores = scores.sigmoid_().mul_(weights)
        of_scores[:, :, :-NOISE].neg_()
        ctx.save_for_backward(centers, contexts, of_scores)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        centers, contexts, of_scores = ctx.saved_tensors
        of_scores = of_scores * grad
        return torch.bmm(of_scores, contexts), torch.bmm(of_scores.transpose(1, 2), centers), None
