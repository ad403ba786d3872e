"""``steps``, ``batch_size`` and the rest, as :mod:`speedswap.compat.aikit.elastic` has them."""

from __future__ import annotations

import importlib
from typing import Any

from speedswap.compat.aikit import elastic as _aikit
from speedswap.compat.aikit.elastic import _init
from speedswap.compat.runai.elastic import torch

__all__ = ["_init", "torch"]


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    return getattr(_aikit, name)
