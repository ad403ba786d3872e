"""Keras, which is optional: the ``keras`` extra brings it."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

__all__ = ["keras"]


def _import() -> Any:
    if importlib.util.find_spec("keras") is None:
        raise ImportError(
            "aikit's TensorFlow half works on Keras 3, which is not installed; pip install 'speedswap[keras]'"
        )
    others = [name for name in ("tensorflow", "jax") if importlib.util.find_spec(name)]
    if "keras" not in sys.modules and not others:
        os.environ.setdefault("KERAS_BACKEND", "torch")  # it would look for TensorFlow
    import keras

    if int(keras.__version__.split(".")[0]) < 3:
        raise ImportError(f"keras is {keras.__version__}, but 3 or newer is needed; pip install 'speedswap[keras]'")
    return keras


keras = _import()
