"""Gradient accumulation for PyTorch."""

from speedswap.compat.aikit.ga.Torch import optim

__all__ = ["optim"]
