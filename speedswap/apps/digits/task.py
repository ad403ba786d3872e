"""The task: its settings, scikit-learn's bundled digits, split for training and test, and a network that reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speedswap._words import pip_install
from speedswap.apps import options
from speedswap.apps.errors import ImagesError, SettingsError
from speedswap.apps.options import AppSettings, option, whole
from speedswap.batching.memory import as_bytes
from speedswap.errors import BatchError
from speedswap.tables.init import seeded

CLASSES = 10
BRIGHTEST = 16.0
TESTED = 0.2
MOST_IMAGES = 2**31
MOST_DIGITS = 18


class Budget(NamedTuple):
    """The memory for a batch: in bytes, or in samples; without either, no limit."""

    bytes: int | None = None
    samples: int | None = None


def read_budget(text: str, name: str = "memory_budget") -> Budget:
    """Read an amount of memory as users write it, the value of the setting ``name``.

    Raises:
        SettingsError: the text is not an amount.

    >>> read_budget("2.5 MiB"), read_budget("100 samples"), read_budget("none")
    (Budget(bytes=2621440, samples=None), Budget(bytes=None, samples=100), Budget(bytes=None, samples=None))
    """
    if text.strip().lower() == "none":
        return Budget()
    samples = re.fullmatch(r"(\d{1,12})\s*samples?", text.strip().lower(), re.ASCII)
    if samples and int(samples[1]) > 0:
        return Budget(samples=int(samples[1]))
    try:
        return Budget(bytes=as_bytes(name, text))
    except BatchError:
        raise SettingsError(
            f"{name} is {text!r}: give bytes as 8MiB, how many samples fit as 100samples, or none"
        ) from None


def size(text: str) -> int | str:
    """Read a micro-batch size; a text that is not a number is left to ``check_size``."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else text


def check_size(name: str, value: int | str) -> None:
    if value != "auto" and (not isinstance(value, int) or not 1 <= value <= MOST_IMAGES):
        raise SettingsError(f"{name} is {value!r}: give a whole number of 1 or more, or auto")


@dataclass(frozen=True)
class DigitsSettings(AppSettings):
    """The training, and the memory for it.

    The learning rate falls linearly to nothing over the run. The last batch of an epoch has the remaining images.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    suited_lr: ClassVar[Mapping[str, float]] = dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 1e-2)

    epochs: int = options.epochs(40, "the images")
    batch: int = option(1024, "images in an optimizer step", check=whole(1, MOST_IMAGES))
    micro_batch_size: int | str = option(
        "auto", "images that go through at once; auto finds what fits", check=check_size, type=size, metavar="SIZE"
    )
    memory_budget: str = option(
        "100samples",
        "memory for a batch beside the model and the optimizer's state, enforced on any machine: bytes such as 8MiB, "
        "what so many images need at once such as 100samples, or none",
        check=lambda name, value: read_budget(value, name),
        metavar="AMOUNT",
    )
    grow_after: int = option(
        32,
        "with auto, batches without out-of-memory after which larger micro-batches are tried",
        check=whole(1, 2**62),
    )
    width: int = option(32, "channels of the first convolution", check=whole(1, 4096))
    compare: bool = option(
        False, "train a second time with whole batches and no budget, and report the difference of the losses"
    )


# ---- images and network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images with their labels.

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
        """Copy the images to a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


class DigitsSplit(NamedTuple):
    """Images to train on and images to test on."""

    train: Images
    test: Images


def read_split(seed: int = 0) -> DigitsSplit:
    """Read the 1,797 images; a fifth of them, with equally many of each digit, are set apart for the test.

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
    return DigitsSplit(*(images[torch.from_numpy(np.concatenate(part))] for part in (train, test)))


class DigitsNet(nn.Module):
    """Three convolutions, all but the first halving the image, and a linear layer.

    All of it is smooth: with ReLU or max-pooling, a rounding in the last bit can choose another branch, and two runs
    that differ only in the order of their sums diverge for good.

    Args:
        width: channels of the first convolution; the others have twice as many.
        seed: of the initial values.

    Example:
        >>> import torch
        >>> DigitsNet(width=8)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, width: int = 32, *, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Flatten(),
                nn.Linear(8 * width, CLASSES),
            )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of the digits, shape (images, 10), for images of shape (images, 1, 8, 8)."""
        scores: Tensor = self.layers(pixels)
        return scores
