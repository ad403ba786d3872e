"""Gradient accumulation for Keras 3, on any of its backends."""

from speedswap.compat.aikit.ga.TF import hooks, optimizers

__all__ = ["hooks", "optimizers"]
