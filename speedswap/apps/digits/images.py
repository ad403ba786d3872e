"""The images: scikit-learn's bundled digits, shuffled and set apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speedswap._install import pip_install
from speedswap.apps.digits.errors import ImagesError

__all__ = ["CLASSES", "Images", "Split", "read_split"]

CLASSES = 10
BRIGHTEST = 16.0
TESTED = 0.2


@dataclass(frozen=True)
class Images:
    """Images and what they show.

    Attributes:
        pixels: float32, shape (images, 1, 8, 8), from -0.5 for white to 0.5 for black.
        labels: int64, shape (images,).
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, positions: Tensor) -> Images:
        return Images(self.pixels[positions], self.labels[positions])

    def to(self, device: torch.device) -> Images:
        """The same images on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Split:
    """Images to train on and images to test on."""

    train: Images
    test: Images


def read_split(seed: int = 0) -> Split:
    """The 1,797 images, a fifth of them, with equally many of each digit, set apart for the test.

    Raises:
        ImagesError: scikit-learn is not installed.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, the test set.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImagesError(
            f"the digits come with scikit-learn, which is not installed: {pip_install('scikit-learn', extra='demo')}"
        ) from error
    found = load_digits()
    images = Images(
        torch.from_numpy(found.images / BRIGHTEST - 0.5).float().unsqueeze(1), torch.from_numpy(found.target).long()
    )
    order = np.random.default_rng(seed)
    test, train = [], []
    for digit in range(CLASSES):
        positions = order.permutation(np.flatnonzero(found.target == digit))
        tested = round(TESTED * len(positions))
        test.append(positions[:tested])
        train.append(positions[tested:])
    return Split(*(images[torch.from_numpy(np.concatenate(part))] for part in (train, test)))
