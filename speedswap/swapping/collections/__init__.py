"""Many tables in one step: their rows in one store, one lookup, one parameter and one scatter.

:class:`EmbeddingBagCollection` and :class:`EmbeddingCollection` are configured and called as TorchRec's;
docs/design/collections.md says how the tables lie together.
"""

from speedswap.swapping.collections.collection import EmbeddingBagCollection, EmbeddingCollection
from speedswap.swapping.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
]
