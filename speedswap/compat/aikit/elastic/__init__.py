"""What ``init`` has worked out: how a global batch goes through the GPUs there are.

Attributes:
    steps: micro-steps of gradient accumulation; 1 where none are needed.
    batch_size: samples in a micro-step on one GPU, the most there are in any.
    global_batch_size: as passed to ``init``.
    gpus: how many workers share the batch: GPUs, or 1 on a machine without any.
    master: whether this is the process of rank 0.
    plan: for each worker the exact sizes of its micro-batches; they differ by at most 1 and add up to the global batch.
    micro_batch_sizes: the same for this process's loader, over all of its GPUs. It is what ``DataParallel`` is fed.
    loader_batch_size: the largest of those.

They are the process's: a second ``init`` replaces the first.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from torch import cuda, distributed

from speedswap.batching import plan_accumulation
from speedswap.errors import BatchError

if TYPE_CHECKING:
    steps: int
    batch_size: int
    global_batch_size: int
    gpus: int
    master: bool
    plan: list[list[int]]
    micro_batch_sizes: list[int]
    loader_batch_size: int

_KNOWN_AFTER_INIT = (
    "steps",
    "batch_size",
    "global_batch_size",
    "gpus",
    "master",
    "plan",
    "micro_batch_sizes",
    "loader_batch_size",
)


def _init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> None:
    """Share a global batch out over GPUs, and over steps where it does not fit them at once.

    Args:
        global_batch_size: samples in one update.
        max_gpu_batch_size: samples that fit one GPU at once.
        gpus: workers that share the batch. By default one for each process where torchrun started several, else the
            GPUs that torch sees, else 1; 0 is 1 as well.

    Raises:
        BatchError: a size is not a positive integer, or ``gpus`` is no multiple of the number of processes.
    """
    processes, rank = _processes()
    for name, value, least in (
        ("global_batch_size", global_batch_size, 1),
        ("max_gpu_batch_size", max_gpu_batch_size, 1),
        ("gpus", 0 if gpus is None else gpus, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BatchError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if gpus is None:
        gpus = processes if processes > 1 else cuda.device_count()
    workers = 1 if gpus == 0 else gpus
    shares = plan_accumulation(global_batch_size, max_gpu_batch_size, workers)
    each, rest = divmod(workers, processes)
    if rest:
        raise BatchError(f"gpus is {gpus}, but {processes} processes share them; give a multiple, or leave it out")
    ours = shares[rank * each : (rank + 1) * each]
    of_the_process = [sum(share[step] for share in ours if step < len(share)) for step in range(len(ours[0]))]
    globals().update(
        steps=len(shares[0]),
        batch_size=shares[0][0],
        global_batch_size=global_batch_size,
        gpus=workers,
        master=rank == 0,
        plan=shares,
        micro_batch_sizes=of_the_process,
        loader_batch_size=max(of_the_process, default=0),
    )


def _processes() -> tuple[int, int]:
    """How many processes train together, and which of them this is."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def __getattr__(name: str) -> Any:
    if name in _KNOWN_AFTER_INIT:
        raise AttributeError(
            f"elastic.{name} is not known yet; call elastic.Torch.init(global_batch_size, max_gpu_batch_size) first"
        )
    if name in ("TF", "models", "keras"):  # they need Keras
        return importlib.import_module(f"{__name__}.{'TF' if name == 'keras' else name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


from speedswap.compat.aikit.elastic import Torch  # noqa: E402  (it needs _init)

# AIkit's own examples import Torch and write torch. A file torch.py would be Torch.py where case does not count.
torch = Torch
sys.modules[f"{__name__}.torch"] = Torch

__all__ = ["Torch", "torch"]
