"""The division of a global batch over GPUs and steps, as computed by ``init``.

``elastic.Torch`` and ``elastic.torch`` are this module, whose ``init`` is PyTorch's; ``elastic.TF`` is the Keras half.

Attributes:
    steps: micro-steps of gradient accumulation; 1 if none are needed.
    batch_size: samples in a micro-step on one GPU, the most in any.
    global_batch_size: as passed to ``init``.
    gpus: the number of workers that share the batch: GPUs, or 1 on a machine without any.
    master: whether this is the process of rank 0.
    plan: for each worker the exact sizes of its micro-batches; they differ by at most 1 and add up to the global batch.
    micro_batch_sizes: the same for this process's loader, over all of its GPUs: the batches of ``DataParallel``.
    loader_batch_size: the largest of those.

They belong to the process: a second ``init`` replaces the first.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import cuda

from speedswap.batching.elastic import plan_accumulation, world
from speedswap.batching.nested import require_integer
from speedswap.errors import BatchError

__all__ = ["Torch", "init", "torch"]

_KNOWN_AFTER_INIT = "steps batch_size global_batch_size gpus master plan micro_batch_sizes loader_batch_size".split()


def init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> None:
    """Divide a global batch over GPUs, and over steps if it does not fit on them at once.

    Args:
        global_batch_size: samples in one update.
        max_gpu_batch_size: samples that fit one GPU at once.
        gpus: workers that share the batch. By default one for each process where torchrun started several, else the
            GPUs that torch sees, else 1; 0 is 1 as well.

    Raises:
        BatchError: a size is not a positive integer, or ``gpus`` is not a multiple of the number of processes.

    >>> from speedswap.compat.aikit import elastic
    >>> elastic.Torch.init(100, 64, gpus=1)
    >>> elastic.steps, elastic.batch_size, elastic.micro_batch_sizes
    (2, 50, [50, 50])
    """
    here = world()
    require_integer("max_gpu_batch_size", max_gpu_batch_size)
    require_integer("gpus", 0 if gpus is None else gpus, 0)
    if gpus is None:
        gpus = here.world_size if here.world_size > 1 else cuda.device_count()
    workers = gpus or 1
    shares = plan_accumulation(global_batch_size, max_gpu_batch_size, workers)
    each, rest = divmod(workers, here.world_size)
    if rest:
        raise BatchError(
            f"gpus is {gpus}, but {here.world_size} processes share them; give a multiple, or leave it out"
        )
    ours = shares[here.rank * each : (here.rank + 1) * each]
    of_the_process = [sum(share[step] for share in ours if step < len(share)) for step in range(len(ours[0]))]
    globals().update(
        steps=len(shares[0]),
        batch_size=shares[0][0],
        global_batch_size=global_batch_size,
        gpus=workers,
        master=here.rank == 0,
        plan=shares,
        micro_batch_sizes=of_the_process,
        loader_batch_size=max(of_the_process, default=0),
    )


_init = init  # as AIkit names it


def __getattr__(name: str) -> Any:
    if name in _KNOWN_AFTER_INIT:
        raise AttributeError(
            f"elastic.{name} is not known yet; call elastic.Torch.init(global_batch_size, max_gpu_batch_size) first"
        )
    if name in ("TF", "models", "keras"):  # they need Keras
        return importlib.import_module("speedswap.compat.aikit.keras_half")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Torch = torch = sys.modules[__name__]
__path__: list[str] = []  # a package of aliases
