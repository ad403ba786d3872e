"""What one training step needs: the lookup, the optimizer's state for the batch's rows, and the way back.

:class:`Embedding` is used as ``nn.Embedding``; :func:`attach` lets an optimizer's row state live in its table.
:class:`ModelFactory` and :class:`OptimizerFactory` swap rows by hand, for models with a plain ``nn.Embedding``.
"""

from speedswap.swapping.attach import attach
from speedswap.swapping.embedding import Embedding
from speedswap.swapping.factories import ModelFactory, OptimizerFactory

__all__ = ["Embedding", "ModelFactory", "OptimizerFactory", "attach"]
