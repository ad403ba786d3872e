"""Gradient accumulation for PyTorch."""

from speedswap.compat.runai.ga.torch import optim

__all__ = ["optim"]
