"""What a run is asked to do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from speedswap.apps.digits.errors import SettingsError
from speedswap.apps.optimizers import named_optimizer, optimizer_of, plain
from speedswap.apps.places import check_counts, compute_device

__all__ = ["Budget", "Settings"]

SUITED_LR = dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 1e-2)
"""Learning rates at the beginning; other optimizers have their own default."""
MOST_IMAGES = 2**31
LIMITS = {"epochs": (1, 10**9), "batch": (1, MOST_IMAGES), "grow_after": (1, 2**62), "width": (1, 4096)}
"""The least and the most of each count."""
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Budget:
    """How much memory there is for a batch: so many bytes, or what so many samples need; without either, no limit.

    >>> Budget.parse("2.5 MiB"), Budget.parse("100 samples"), Budget.parse("none")
    (Budget(bytes=2621440, samples=None), Budget(bytes=None, samples=100), Budget(bytes=None, samples=None))
    """

    bytes: int | None = None
    samples: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read what a user wrote.

        Raises:
            SettingsError: it is no amount of memory.
        """
        said = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)", text.strip().lower(), re.ASCII)
        if text.strip().lower() == "none":
            return cls()
        if said and said[2] in ("sample", "samples") and said[1].isdigit() and int(said[1]) > 0:
            return cls(samples=int(said[1]))
        if said and said[2] in UNITS and float(said[1]) > 0:
            return cls(bytes=int(float(said[1]) * UNITS[said[2]]))
        raise SettingsError(
            f"memory_budget is {text!r}: give bytes as 8MiB, how many samples fit as 100samples, or none"
        )


@dataclass(frozen=True)
class Settings:
    """What to train, and in how much memory.

    Args:
        epochs: passes over the images.
        batch: images in an optimizer step; the last one of an epoch has what is left.
        micro_batch_size: images that go through at once: a number, or ``auto`` for as many as memory allows.
        memory_budget: memory for a batch beside the model and the optimizer's state: ``8MiB``, ``100samples`` for what
            so many images need at once, or ``none`` for all there is.
        grow_after: with ``auto``, batches without out-of-memory after which more images are tried.
        width: channels of the first convolution.
        optimizer: the name of any optimizer in ``torch.optim``.
        lr: learning rate; without one, what suits the optimizer. It falls linearly to nothing over the run.
        device: where to compute; CUDA where there is one, else the CPU.
        seed: of everything random; on one machine, the same seed gives the same model.
        compare: train a second time with whole batches and no budget, to see how far the losses are apart.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    epochs: int = 40
    batch: int = 1024
    micro_batch_size: int | str = "auto"
    memory_budget: str = "100samples"
    grow_after: int = 32
    width: int = 32
    optimizer: str = "adam"
    lr: float | None = None
    device: str | None = None
    seed: int = 0
    compare: bool = False

    def __post_init__(self) -> None:
        check_counts(self, LIMITS)
        size = self.micro_batch_size
        if size != "auto" and (not isinstance(size, int) or not 1 <= size <= MOST_IMAGES):
            raise SettingsError(f"micro_batch_size is {size!r}: give a whole number of 1 or more, or auto")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise SettingsError(f"lr is {self.lr}: give a number above 0")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed is {self.seed}: give a whole number from 0 to 2**63 - 1")
        self.budget()
        named_optimizer(self.optimizer)
        self.compute_device()

    def budget(self) -> Budget:
        """How much memory there is for a batch."""
        return Budget.parse(self.memory_budget)

    def compute_device(self) -> torch.device:
        """Where to compute."""
        return compute_device(self.device)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters.

        Raises:
            SettingsError: it does not take them, or the learning rate.
        """
        return optimizer_of(model, self.optimizer, self.lr or SUITED_LR.get(plain(self.optimizer)))
