"""A Keras model that trains with elastic batches."""

from speedswap.compat.aikit.elastic.TF.models import Model

__all__ = ["Model"]
