"""Gradient accumulation."""

from __future__ import annotations

import importlib
from typing import Any

from speedswap.compat.runai.ga import torch

__all__ = ["torch"]


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
