"""Elastic batches for Keras 3."""

from speedswap.compat.aikit.elastic.TF import init
from speedswap.compat.runai.elastic.keras import models

__all__ = ["init", "models"]
