"""DLRM: dot products between the vectors of a sample's categories, and of its integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedswap.apps.dlrm.interaction import interact
from speedswap.apps.dlrm.samples import CATEGORIES, INTEGERS, Samples

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """The probability of a click, before the sigmoid.

    The integers x become log(1 + x), those below 0 counting as 0, and pass the bottom layers to a vector of the
    embeddings' width. The dot products of each two of the 27 vectors, with that of the integers beside them, pass the
    top layers.

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
        """Return the parameters beside the tables, by name."""
        return {
            name: parameter for name, parameter in self.named_parameters() if name.split(".")[0] in ("bottom", "top")
        }


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers of these widths, each with a ReLU after it."""
    return nn.Sequential(
        *(layer for inputs, outputs in itertools.pairwise(widths) for layer in (nn.Linear(inputs, outputs), nn.ReLU()))
    )
