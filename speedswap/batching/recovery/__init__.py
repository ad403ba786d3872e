"""Recovery from running out of memory: sizes that fit, attempts, rollback, and the errors that call for it."""

from speedswap.batching.recovery.attempts import GROW_AFTER, Attempts, Limit, Limits, SharedLimits
from speedswap.batching.recovery.limited import LimitedMemory, as_bytes, limited, storages
from speedswap.batching.recovery.oom import (
    chain,
    forget,
    free_bytes,
    is_out_of_memory,
    memory_class,
    release_cached_memory,
    status_bytes,
)
from speedswap.batching.recovery.rollback import Buffers, Changes, Gradients, ModuleBuffers, RandomState

__all__ = [
    "GROW_AFTER",
    "Attempts",
    "Buffers",
    "Changes",
    "Gradients",
    "Limit",
    "LimitedMemory",
    "Limits",
    "ModuleBuffers",
    "RandomState",
    "SharedLimits",
    "as_bytes",
    "chain",
    "forget",
    "free_bytes",
    "is_out_of_memory",
    "limited",
    "memory_class",
    "release_cached_memory",
    "status_bytes",
    "storages",
]
