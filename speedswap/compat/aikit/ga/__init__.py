"""Gradient accumulation: ``ga.Torch.optim`` for PyTorch, ``ga.TF.optimizers`` for Keras 3."""

from __future__ import annotations

import importlib
from typing import Any

from speedswap.compat.aikit.ga import Torch

__all__ = ["Torch"]


def __getattr__(name: str) -> Any:
    if name == "TF":  # it needs Keras
        return importlib.import_module(f"{__name__}.TF")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
