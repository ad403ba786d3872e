"""Mean, spread and bounds of a stream of numbers, without keeping them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from speedswap.batching.nested import tensors_of

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """Count, mean, variance and bounds of all the numbers that were added (Welford's method, batch by batch).

    Tensors stay where they are until a figure is asked for; one element of each figure is all that is kept.

    Attributes:
        count: how many numbers were added.

    >>> statistics = RunningStatistics()
    >>> statistics.add(torch.tensor([1.0, 2.0])); statistics.add(6)
    >>> statistics.count, statistics.mean, statistics.maximum
    (3, 3.0, 6.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = torch.zeros((), dtype=torch.float64)
        self._minimum, self._maximum = torch.tensor(math.inf), torch.tensor(-math.inf)

    def add(self, value: Any) -> None:
        """Add a number, or all the numbers of a tensor or of the tensors in a nested value."""
        if isinstance(value, (int, float)):
            value = torch.tensor(value, dtype=torch.float64)
        for tensor in tensors_of(value):
            self._add(tensor.detach())

    def _add(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        device = tensor.device
        number = torch.float32 if device.type == "mps" else torch.float64
        values = tensor.to(number)
        mean = values.mean()
        squares = (values - mean).square().sum()
        n, m = self.count, tensor.numel()
        before = self._mean.to(device, number)
        shift = mean - before
        self._mean = before + shift * (m / (n + m))
        self._squares = self._squares.to(device, number) + squares + shift.square() * (n * m / (n + m))
        self._minimum = torch.minimum(self._minimum.to(device, number), values.min())
        self._maximum = torch.maximum(self._maximum.to(device, number), values.max())
        self.count = n + m

    @property
    def mean(self) -> float:
        """Mean of all numbers; NaN where there are none."""
        return float(self._mean) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Unbiased variance; NaN below two numbers."""
        return float(self._squares) / (self.count - 1) if self.count > 1 else math.nan

    @property
    def standard_deviation(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)

    @property
    def minimum(self) -> float:
        """The least number; infinite where there are none."""
        return float(self._minimum)

    @property
    def maximum(self) -> float:
        """The greatest number; minus infinite where there are none."""
        return float(self._maximum)

    def as_dict(self) -> dict[str, float]:
        """All figures by name."""
        names = ("count", "mean", "standard_deviation", "minimum", "maximum")
        return {name: getattr(self, name) for name in names}
