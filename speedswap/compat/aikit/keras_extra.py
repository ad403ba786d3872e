"""Keras, which is optional: the ``keras`` extra brings it."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from speedswap._install import pip_install

__all__ = ["keras"]

_REMEDY = pip_install("keras", extra="keras")


def _import() -> Any:
    if "keras" not in sys.modules and not any(importlib.util.find_spec(name) for name in ("tensorflow", "jax")):
        os.environ.setdefault("KERAS_BACKEND", "torch")  # it would look for TensorFlow
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ImportError(
            f"aikit's TensorFlow half works on Keras 3, which is not installed: {_REMEDY}", name="keras"
        ) from error
    if int(keras.__version__.split(".")[0]) < 3:
        raise ImportError(f"keras is {keras.__version__}, but aikit's TensorFlow half needs 3 or newer: {_REMEDY}")
    return keras


keras = _import()
