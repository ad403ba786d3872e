"""speedswap: train embeddings that do not fit, by keeping only the batch's rows on the compute device."""

from speedswap import errors, monitor, optim
from speedswap.batching import (
    AccumulatingOptimizer,
    BatchSplitter,
    Feed,
    MemoryEstimate,
    coupled,
    elastic,
    estimate_memory,
    feed,
    plan_accumulation,
    retry,
)
from speedswap.kernels import get_num_threads, set_num_threads
from speedswap.swapping import (
    Embedding,
    EmbeddingBag,
    ModelFactory,
    OptimizerFactory,
    attach,
    convert,
    ignore_in_ddp,
    lookahead,
    parameters_to_ignore,
)
from speedswap.tables import Block, Column, IdMap, Table, gather_rows, init, scatter_rows

__version__ = "0.1.0"

__all__ = [
    "AccumulatingOptimizer",
    "BatchSplitter",
    "Block",
    "Column",
    "Embedding",
    "EmbeddingBag",
    "Feed",
    "IdMap",
    "MemoryEstimate",
    "ModelFactory",
    "OptimizerFactory",
    "Table",
    "__version__",
    "attach",
    "convert",
    "coupled",
    "elastic",
    "errors",
    "estimate_memory",
    "feed",
    "gather_rows",
    "get_num_threads",
    "ignore_in_ddp",
    "init",
    "lookahead",
    "monitor",
    "optim",
    "parameters_to_ignore",
    "plan_accumulation",
    "retry",
    "scatter_rows",
    "set_num_threads",
]
