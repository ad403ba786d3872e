"""The other name of :mod:`speedswap.compat.aikit.elastic.TF.models`."""

from speedswap.compat.aikit.elastic.TF.models import Model

__all__ = ["Model"]
