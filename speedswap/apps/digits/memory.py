"""The memory that a micro-batch needs, measured."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.digits.task import Images
from speedswap.batching import LimitedMemory

__all__ = ["Footprint", "measure_footprint"]

MEASURED = (16, 48)
"""Micro-batch sizes; the memory of others lies on the line through these."""


class Footprint(NamedTuple):
    """Memory for a batch beside the model: a fixed part, mostly gradients, and a part per sample.

    >>> footprint = Footprint(fixed_bytes=1000, bytes_a_sample=10)
    >>> footprint.bytes_for(100), footprint.samples_in(2009)
    (2000, 100)
    """

    fixed_bytes: int
    bytes_a_sample: int

    def bytes_for(self, samples: int) -> int:
        """Return the memory for a number of samples at once."""
        return self.fixed_bytes + samples * self.bytes_a_sample

    def samples_in(self, nbytes: int) -> int:
        """Return the number of samples that fit at once; 0 where not even one does."""
        return max(0, (nbytes - self.fixed_bytes) // self.bytes_a_sample)


def measure_footprint(model: nn.Module, images: Images) -> Footprint:
    """Measure the memory of a model's forward and backward passes, by two micro-batches of each of two sizes.

    A copy of the model is used: its gradients stay as they are.
    """
    model = copy.deepcopy(model)

    def loss_fn(pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels), labels)

    peaks = []
    for size in MEASURED:
        some = images[torch.arange(2 * size, device=images.labels.device) % len(images)]
        splitter = speedswap.BatchSplitter(model, micro_batch_size=size)
        model.zero_grad()
        with LimitedMemory() as memory:
            splitter.backward(loss_fn, some.pixels, some.labels)
        peaks.append(memory.peak_bytes)
    each = -(-(peaks[1] - peaks[0]) // (MEASURED[1] - MEASURED[0]))
    # Half a sample more than measured, for each micro-batch's leftovers, such as its loss.
    return Footprint(peaks[1] - MEASURED[1] * each + each // 2, each)
