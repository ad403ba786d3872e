"""Gradient accumulation: ``ga.Torch.optim`` for PyTorch, ``ga.TF.optimizers`` for Keras 3."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from speedswap.compat.aikit.ga import Torch

torch = Torch  # as AIkit's own tests write it
sys.modules[f"{__name__}.torch"] = Torch
sys.modules[f"{__name__}.torch.optim"] = Torch.optim

__all__ = ["Torch", "torch"]


def __getattr__(name: str) -> Any:
    if name == "TF":  # it needs Keras
        return importlib.import_module(f"{__name__}.TF")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
