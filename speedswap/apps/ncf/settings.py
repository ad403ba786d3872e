"""What a run is asked to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from speedswap.apps.ncf.errors import SettingsError
from speedswap.apps.ncf.model import MODELS
from speedswap.apps.ncf.ratings import MISSING, check_columns
from speedswap.apps.optimizers import named_optimizer, optimizer_of, plain
from speedswap.apps.places import check_scratch, check_state_dtype, check_storage, compute_device

__all__ = ["Settings"]

SUITED_LR = {
    "adagrad": 0.02,
    "sgd": 1.0,
    **dict.fromkeys(("adam", "adamax", "adamw", "nadam", "radam"), 2e-3),
}
"""Learning rates at the beginning, for the mean loss of a batch; other optimizers have their own default."""
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
        for name in ("interactions", "factors", "negatives", "epochs", "batch", "test_negatives", "test_users"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: give a whole number of 1 or more")
        for name in ("users", "items"):
            if getattr(self, name) < 2:
                raise SettingsError(f"{name} is {getattr(self, name)}: give a whole number of 2 or more")
        if self.columns is not None:
            object.__setattr__(self, "columns", dict(self.columns))
            check_columns(self.columns)
        if self.columns and self.ratings is None:
            raise SettingsError("columns is given, but no ratings: give a file, or leave columns out")
        check_choice("missing", self.missing, MISSING)
        if self.lookahead < 0:
            raise SettingsError(f"lookahead is {self.lookahead}: give a whole number of 0 or more")
        check_choice("model", self.model, MODELS)
        if not self.layers or min(self.layers) < 1 or self.layers[0] % 2:
            raise SettingsError(
                f"layers is {','.join(map(str, self.layers))}: give widths such as 64,32,16,8, the first of them even"
            )
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
