"""torch's optimizers, each stepping once for several micro-batches."""

from __future__ import annotations

from typing import Any

from speedswap.compat.aikit.ga.Torch import optim as _aikit
from speedswap.compat.aikit.ga.Torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Optimizer,
    RMSprop,
    Rprop,
    State,
)

__all__ = ["ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Optimizer", "RMSprop", "Rprop", "State"]


def __getattr__(name: str) -> Any:
    """torch's newer optimizers (NAdam, RAdam, …), as :mod:`speedswap.compat.aikit.ga.Torch.optim` has them."""
    return getattr(_aikit, name)
