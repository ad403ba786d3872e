"""A training step over tables: the lookup, the optimizer's state for the batch's rows, and the write-back.

:class:`Embedding` and :class:`EmbeddingBag` are used as torch's; :func:`attach` lets an optimizer's row state live in
their tables; :func:`lookahead` prefetches the next batch's rows while this one is computed; :func:`convert` replaces
torch's embeddings by these. :class:`EmbeddingBagCollection` and :class:`EmbeddingCollection` are many tables in one
step. :func:`ignore_in_ddp` and :func:`parameters_to_ignore` keep wrappers for several processes
off their weights. :class:`ModelFactory` and :class:`OptimizerFactory` swap rows by hand, for models with a plain
``nn.Embedding``.
"""

from speedswap.swapping.attach import attach
from speedswap.swapping.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from speedswap.swapping.convert import convert
from speedswap.swapping.embedding import Embedding
from speedswap.swapping.embedding_bag import EmbeddingBag
from speedswap.swapping.lookahead import Lookahead, lookahead
from speedswap.swapping.ranks import ignore_in_ddp, parameters_to_ignore
from speedswap.swapping.switchers import ModelFactory, OptimizerFactory

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Lookahead",
    "ModelFactory",
    "OptimizerFactory",
    "attach",
    "convert",
    "ignore_in_ddp",
    "lookahead",
    "parameters_to_ignore",
]
