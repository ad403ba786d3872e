"""Elastic batches for PyTorch."""

from speedswap.compat.aikit.elastic.Torch import init

__all__ = ["init"]
