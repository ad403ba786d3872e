"""Predictions of the memory of micro-batches, by those that were seen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch


class AllocatorGauge:
    """Measures a GPU's memory by the statistics of torch's allocator, which it resets."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu

    @property
    def peak_bytes(self) -> int:
        """The most bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self._gpu)

    def reset_peak(self) -> None:
        """Begin again with what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._gpu)


_LEAST_SEEN = 3
_MARGIN = 1.05
# Powers of a sample's cost that its bytes grow with, likely ones first; attention grows with the square of the length.
_FORMS = sorted(
    (form for count in (1, 2, 3) for form in itertools.combinations(range(3), count)),
    key=lambda form: (1 not in form, len(form)),
)


class MemoryModel:
    """Bytes of a micro-batch of n samples of cost c: a constant, and n times a + b c + d c², none negative.

    One micro-batch of each order of magnitude in n and c is remembered, the latest.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._factors: Any = None

    def add(self, samples: int, cost: int, nbytes: int) -> None:
        """Learn what a micro-batch has taken."""
        self._seen[samples.bit_length(), cost.bit_length()] = samples, cost, nbytes
        if not (self._factors is not None and nbytes <= self._at(samples, cost) <= 1.2 * nbytes):
            self._fit()

    def _at(self, samples: int, cost: int) -> float:
        return float(self._factors[0] + samples * (self._factors[1:] @ [1, cost, cost * cost]))

    def _fit(self) -> None:
        if len(self._seen) < _LEAST_SEEN:
            return
        samples, costs, nbytes = np.array([*self._seen.values()], dtype=np.float64).T
        columns = np.stack([np.ones_like(samples), samples, samples * costs, samples * costs * costs], 1)
        weighed = columns / nbytes[:, None]  # relative errors count
        best = None
        for form in _FORMS:
            for chosen in ([0, *(power + 1 for power in form)], [power + 1 for power in form]):
                factors = np.zeros(4)
                factors[chosen] = np.linalg.lstsq(weighed[:, chosen], np.ones(len(weighed)), rcond=None)[0]
                error = round(float(np.abs(weighed @ factors - 1).max()), 2)
                if factors.min() >= 0 and (best is None or error < best[0]):
                    best = error, factors
        if best is not None and (best[1] > 0).any():
            self._factors = best[1]
            self._factors = best[1] * max(_MARGIN, 1 / (weighed @ best[1]).min())  # not below anything that was seen

    def most(self, cost: int, nbytes: int) -> int | None:
        """Return the most samples of one cost that fit; None while too little is known."""
        if self._factors is None:
            return None
        per_sample = self._at(1, cost) - self._factors[0]
        return int((nbytes - self._factors[0]) / per_sample) if per_sample > 0 else None

    def proven(self, nbytes: int) -> int:
        """Return the highest cost of a micro-batch that has taken half of the memory or more, and fitted; 0 if none."""
        return max((samples * cost for samples, cost, taken in self._seen.values() if 2 * taken >= nbytes), default=0)
