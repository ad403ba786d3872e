"""What a run is asked to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from speedswap.apps.ncf.errors import SettingsError
from speedswap.apps.ncf.model import MODELS
from speedswap.apps.ncf.ratings import MISSING, check_columns
from speedswap.apps.optimizers import named_optimizer, optimizer_of, plain
from speedswap.apps.places import (
    check_counts,
    check_memory,
    check_scratch,
    check_state_dtype,
    check_storage,
    compute_device,
    shortened,
)

__all__ = ["Settings"]

SUITED_LR = {
    "adagrad": 0.02,
    "sgd": 1.0,
    **dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 2e-3),
}
"""Learning rates at the beginning, for the mean loss of a batch; other optimizers have their own default."""
FLOAT_BYTES = 4
WIDEST = 2**16
MOST_LAYERS = 100
LIMITS = {
    "users": (2, 2**40),
    "items": (2, 2**40),
    "interactions": (1, 2**48),
    "factors": (1, WIDEST),
    "negatives": (1, 2**31),
    "epochs": (1, 10**9),
    "batch": (1, 2**31),
    "test_negatives": (1, 2**31),
    "test_users": (1, 2**62),
    "lookahead": (0, 1024),
}
"""The least and the most of each count."""
CONSTANT_LR = ("adagrad",)
"""Optimizers whose steps shrink by themselves."""


@dataclass(frozen=True)
class Settings:
    """What to learn preferences from, and how.

    Args:
        ratings: a file of ratings, as for ``read_split``; without one, interactions are made up.
        users, items, interactions: how many of each are made up.
        model: ``gmf``, ``mlp`` or ``neumf``.
        factors: width of a row's GMF part.
        layers: widths of the MLP: of a user's and an item's part together, then of each layer.
        negatives: for each interaction trained on.
        epochs: passes over the interactions.
        optimizer: the name of any optimizer in ``torch.optim`` that works row by row.
        lr: learning rate; without one, what suits the optimizer. It falls linearly to nothing over the run, except
            with Adagrad, whose steps shrink by themselves.
        batch: interactions a step, each with its negatives.
        test_negatives: items that each tested user's own is ranked among.
        test_users: of more users so many are tested.
        storage: where the tables live: ``auto``, ``device``, ``pinned``, ``pageable`` or ``memmap``.
        state_dtype: how the optimizer's state is stored: ``float32``, or ``bfloat16`` in half the bytes.
        device: where the batch's rows are computed with; CUDA where there is one, else the CPU.
        seed: of everything random; on one machine, the same seed gives the same model.
        scratch: the directory for memmap tables, which are temporary; the system's by default.
        lookahead: how many batches ahead rows are fetched; 0 for a plain loop. The model is the same.
        columns: which column is the user, item, rating or time where the heading does not tell, as for ``read_split``.
        missing: what becomes of lines that lack a value: ``skip`` or ``error``.

    Raises:
        SettingsError: a value is out of range or unknown.
    """

    ratings: Path | None = None
    users: int = 2_000
    items: int = 1_000
    interactions: int = 100_000
    model: str = "neumf"
    factors: int = 32
    layers: tuple[int, ...] = (64, 32, 16, 8)
    negatives: int = 4
    epochs: int = 20
    optimizer: str = "adam"
    lr: float | None = None
    batch: int = 256
    test_negatives: int = 99
    test_users: int = 50_000
    storage: str = "auto"
    state_dtype: str = "float32"
    device: str | None = None
    seed: int = 0
    scratch: Path | None = None
    lookahead: int = 1
    columns: Mapping[str, str] | None = None
    missing: str = "skip"

    def __post_init__(self) -> None:
        check_counts(self, LIMITS)
        if self.columns is not None:
            object.__setattr__(self, "columns", dict(self.columns))
            check_columns(self.columns)
        if self.columns and self.ratings is None:
            raise SettingsError("columns is given, but no ratings: give a file, or leave columns out")
        check_choice("missing", self.missing, MISSING)
        check_choice("model", self.model, MODELS)
        if not self.layers or min(self.layers) < 1 or self.layers[0] % 2:
            raise SettingsError(
                f"layers is {','.join(map(str, self.layers))}: give widths such as 64,32,16,8, the first of them even"
            )
        if max(self.layers) > WIDEST or len(self.layers) > MOST_LAYERS:
            raise SettingsError(
                f"layers has {len(self.layers)} widths of up to {shortened(max(self.layers))}: give at most "
                f"{MOST_LAYERS} of at most {WIDEST:,}"
            )
        check_memory("the layers with their gradients and moments", self.dense_bytes(), "give narrower layers")
        if self.ratings is None:
            check_memory(
                f"{self.users:,} users, {self.items:,} items and {self.interactions:,} interactions",
                self.generated_bytes(),
                "give fewer, or storage memmap for the tables",
            )
            self.check_step(self.interactions)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise SettingsError(f"lr is {self.lr}: give a number above 0")
        if not 0 <= self.seed < 2**64:
            raise SettingsError(f"seed is {self.seed}: give a whole number from 0 to 2**64 - 1")
        check_storage(self.storage)
        check_state_dtype(self.state_dtype)
        check_scratch(self.scratch)
        named_optimizer(self.optimizer)
        self.compute_device()

    def compute_device(self) -> torch.device:
        """The device that the batch's rows are computed with."""
        return compute_device(self.device)

    def check_step(self, interactions: int) -> None:
        """Refuse a batch whose rows and gradients no memory holds.

        Args:
            interactions: how many there are.
        """
        rows = min(self.batch, interactions) * (1 + self.negatives)
        check_memory(
            f"batch {self.batch:,} and {self.negatives:,} negatives",
            rows * (16 + FLOAT_BYTES * self.row_width()),
            "lower one of them",
        )

    def row_width(self) -> int:
        """Numbers in a row of a table."""
        return (self.factors if self.model != "mlp" else 0) + (self.layers[0] // 2 if self.model != "gmf" else 0)

    def dense_bytes(self) -> int:
        """Memory of the layers, as if the optimizer kept two moments."""
        return 0 if self.model == "gmf" else 4 * FLOAT_BYTES * sum(a * b for a, b in pairwise(self.layers))

    def generated_bytes(self) -> int:
        """Memory of interactions that are made up, while they are, and of the tables' weights unless in files."""
        rows = 0 if self.storage == "memmap" else FLOAT_BYTES * self.row_width()
        return self.users * (24 + rows) + self.items * (40 + rows) + 32 * self.interactions

    def lr_left(self, progress: float) -> float:
        """Which part of the learning rate is left at a point between 0 and 1 of the run."""
        return 1.0 if plain(self.optimizer) in CONSTANT_LR else 1 - progress

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters.

        Raises:
            SettingsError: it does not take them, or the learning rate.
        """
        return optimizer_of(model, self.optimizer, self.lr or SUITED_LR.get(plain(self.optimizer)))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{name} is {value!r}: give one of {', '.join(choices)}")
