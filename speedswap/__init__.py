"""speedswap: train embeddings that do not fit, by keeping only the batch's rows on the compute device."""

import importlib

from speedswap import _warnings, errors, losses, monitor, optim
from speedswap.batching import BatchSplitter
from speedswap.ranks import Ranks
from speedswap.swapping import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    ModelFactory,
    OptimizerFactory,
    attach,
    convert,
    ignore_in_ddp,
    load_checkpoint,
    lookahead,
    parameters_to_ignore,
    save_checkpoint,
)
from speedswap.tables import (
    Column,
    Device,
    Disk,
    IdMap,
    Pageable,
    Pinned,
    Table,
    gather_rows,
    init,
    scatter_rows,
)

__version__ = "0.1.0"

__all__ = [
    "BatchSplitter",
    "Column",
    "Device",
    "Disk",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "IdMap",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "ModelFactory",
    "OptimizerFactory",
    "Pageable",
    "Pinned",
    "Ranks",
    "Table",
    "attach",
    "convert",
    "errors",
    "gather_rows",
    "ignore_in_ddp",
    "init",
    "load_checkpoint",
    "lookahead",
    "losses",
    "monitor",
    "optim",
    "parameters_to_ignore",
    "save_checkpoint",
    "scatter_rows",
]


_MOVED = {
    **dict.fromkeys(
        (
            "AccumulatingOptimizer",
            "Feed",
            "MemoryEstimate",
            "coupled",
            "elastic",
            "estimate_memory",
            "feed",
            "plan_accumulation",
            "retry",
        ),
        "speedswap.batching",
    ),
    **dict.fromkeys(("get_num_threads", "set_num_threads"), "speedswap.kernels"),
    "Block": "speedswap.tables",
}


def __getattr__(name: str) -> object:
    """Return a name that was here in version 0.1, with a warning that says where it is now."""
    if name not in _MOVED:
        raise AttributeError(f"module 'speedswap' has no attribute {name!r}")
    _warnings.warn("SW001", f"speedswap.{name} is {_MOVED[name]}.{name} now; import it from there", DeprecationWarning)
    return getattr(importlib.import_module(_MOVED[name]), name)
