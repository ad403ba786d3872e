"""Gradient accumulation for Keras 3."""

from speedswap.compat.aikit.ga.TF import hooks
from speedswap.compat.runai.ga.keras import optimizers

__all__ = ["hooks", "optimizers"]
