"""The quality of predictions: AUC and log loss, exact for any number of samples."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from speedswap.apps.ranks import Job

PENDING = 1 << 18
"""Scores that are kept as they come, before equal ones are counted."""


class Scores:
    """Predictions and labels of any number of samples, counted by score.

    AUC and log loss are functions of the counts alone: the order of the samples does not matter. Memory holds 20 bytes
    per different score, on the CPU.

    Example:
        >>> scores = Scores()
        >>> scores.add(torch.tensor([0.5, -1.0, 2.0, 0.5]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> len(scores), scores.auc, round(scores.log_loss, 4)
        (4, 0.875, 0.4721)
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0
        self._counted = (torch.zeros(0), torch.zeros(2, 0, dtype=torch.int64))

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add predictions.

        Args:
            logits: before the sigmoid, float32, shape (n,), on any device, which is not waited for.
            labels: 0 or 1, float32, shape (n,), on the same.
        """
        self._pending.append((logits.detach(), labels))
        self._num_pending += len(logits)
        if self._num_pending >= max(PENDING, len(self._counted[0])):
            self.state()

    def __len__(self) -> int:
        return int(self.state()[1].sum())

    @property
    def rate(self) -> float:
        """The share of positive labels; NaN without samples."""
        negatives, positives = self.state()[1].sum(dim=1).tolist()
        return positives / (positives + negatives) if positives + negatives else math.nan

    @property
    def auc(self) -> float:
        """The area under the ROC curve: the probability that a positive sample has a higher score than a negative one,
        where equal scores count half (Hanley and McNeil 1982). NaN where all labels are equal, or a score is NaN.
        """
        scores, (negatives, positives) = self.state()
        if scores.isnan().any():
            return math.nan
        pairs = int(negatives.sum()) * int(positives.sum())
        below = negatives.cumsum(0) - negatives
        return (positives * (2 * below + negatives)).sum().item() / (2 * pairs) if pairs else math.nan

    @property
    def log_loss(self) -> float:
        """The mean binary cross-entropy; infinite if an infinite score is wrong, NaN without samples."""
        logits, (negatives, positives) = self.state()
        losses = [
            (counts * F.softplus(margins))[counts > 0].sum()  # 0 · ∞ counts as 0
            for counts, margins in ((positives, -logits.double()), (negatives, logits.double()))
        ]
        return float(sum(losses) / (positives.sum() + negatives.sum()))

    @property
    def base_loss(self) -> float:
        """The log loss of predicting the share of positive labels for every sample."""
        rate = self.rate
        return -sum(share * math.log(share) for share in (rate, 1 - rate) if share)

    def of_all(self, job: Job) -> Scores:
        """Return the predictions of all ranks."""
        if job.size == 1:
            return self
        scores, counts = self.state()
        own = torch.stack([scores.view(torch.int32).long(), *counts], dim=1)
        every = torch.cat(job.collect(own.flatten())).view(-1, 3).T
        found = Scores()
        found.restore(merged(every[0].int().view(torch.float32), every[1:]))
        return found

    def state(self) -> tuple[Tensor, Tensor]:
        """Return the different scores, ascending, and the numbers of negative and of positive samples of each."""
        if self._pending:
            logits, labels = (torch.cat(parts).cpu() for parts in zip(*self._pending, strict=True))
            scores, counts = self._counted
            new = torch.stack([labels == 0, labels == 1]).long()
            self.restore(merged(torch.cat([scores, logits.float()]), torch.cat([counts, new], dim=1)))
        return self._counted

    def restore(self, state: tuple[Tensor, Tensor]) -> None:
        """Go on from a state."""
        self._pending, self._num_pending, self._counted = [], 0, state


def merged(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each score once, ascending, with the sums of its counts, which have a row per label."""
    scores, places = torch.unique(scores, return_inverse=True)
    none = torch.zeros(len(scores), dtype=torch.int64)
    return scores, torch.stack([none.index_add(0, places, each) for each in counts])
