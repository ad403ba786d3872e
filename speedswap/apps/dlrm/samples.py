"""Samples as Criteo's display advertising set has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.apps.errors import CheckpointError, named
from speedswap.apps.layers import moved

INTEGERS = 13
CATEGORIES = 26
NAMES = ("label", *(f"I{n}" for n in range(1, INTEGERS + 1)), *(f"C{n}" for n in range(1, CATEGORIES + 1)))
"""The columns, in their order."""
MISSING = -1
"""The id of an empty category, an id like others: that it is missing says something too."""


class Samples(NamedTuple):
    """Some samples, column by column."""

    labels: Tensor
    """float32, shape (n,): 1 for a click, 0 for none; shape (0,) for rows without a label."""
    integers: Tensor
    """int64, shape (13, n); 0 where missing."""
    ids: Tensor
    """int64, shape (26, n); ``MISSING`` where missing."""

    @property
    def size(self) -> int:
        """Their number."""
        return self.integers.shape[1]

    def take(self, places: Tensor | slice) -> Samples:
        """Return the samples at some places."""
        labels = self.labels[places] if len(self.labels) else self.labels
        return Samples(labels, self.integers[:, places], self.ids[:, places])

    def to(self, device: torch.device) -> Samples:
        """Copy the samples to a device."""
        return Samples(*(moved(tensor, device) for tensor in self))


class SamplePosition(NamedTuple):
    """A place in a source, between two samples."""

    file: int = 0
    """Files read to their end."""
    samples: int = 0
    """Samples read of the next one."""
    checksum: int = 0
    """Of the sizes of the former and the values of the latter."""

    def require(self, found: SamplePosition) -> None:
        """Refuse to go on from this position where reading as far as it has found a different one.

        Raises:
            CheckpointError: the samples are others.
        """
        if found != self:
            raise CheckpointError(
                f"the samples are not those of the checkpoint, which had read {self.samples:,} of file "
                f"{self.file + 1}: give the same, or start without {named('resume')}"
            )
