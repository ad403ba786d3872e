"""A training step over tables: the lookup, the optimizer's state for the batch's rows, and the write-back.

:class:`Embedding` and :class:`EmbeddingBag` are used like torch's; :func:`attach` stores an optimizer's row state in
their tables; :func:`lookahead` prefetches the next batch's rows while this one is computed; :func:`convert` replaces
torch's embeddings with these. :class:`EmbeddingBagCollection` and :class:`EmbeddingCollection` train many tables in one
step. :func:`save_checkpoint` and :func:`load_checkpoint` save and resume a training; :func:`rows_apart` leaves rows out
of other libraries' checkpoints. :func:`ignore_in_ddp` and :func:`parameters_to_ignore` make distributed wrappers ignore
their weights. :class:`ModelFactory` and :class:`OptimizerFactory` swap rows by hand, for models with a plain
``nn.Embedding``.
"""

from speedswap.swapping.attach import attach
from speedswap.swapping.checkpoints import LoadedCheckpoint, SavedCheckpoint, load_checkpoint, save_checkpoint
from speedswap.swapping.collections.collection import EmbeddingBagCollection, EmbeddingCollection
from speedswap.swapping.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from speedswap.swapping.convert import convert
from speedswap.swapping.embedding import Embedding, EmbeddingBag
from speedswap.swapping.lookahead import Lookahead, asked, lookahead
from speedswap.swapping.pretrained import RowsCallback, from_pretrained, save_pretrained
from speedswap.swapping.switchers import ModelFactory, OptimizerFactory
from speedswap.swapping.weight import ignore_in_ddp, parameters_to_ignore
from speedswap.swapping.whole_rows import rows_apart

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
    "LoadedCheckpoint",
    "Lookahead",
    "ModelFactory",
    "OptimizerFactory",
    "RowsCallback",
    "SavedCheckpoint",
    "asked",
    "attach",
    "convert",
    "from_pretrained",
    "ignore_in_ddp",
    "load_checkpoint",
    "lookahead",
    "parameters_to_ignore",
    "rows_apart",
    "save_checkpoint",
    "save_pretrained",
]
