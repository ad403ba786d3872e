"""Elastic batches for PyTorch."""

from __future__ import annotations

from speedswap.compat.aikit import elastic

__all__ = ["init"]


def init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> None:
    """Share a global batch out over the GPUs there are; the results are attributes of ``elastic``.

    Args:
        global_batch_size: samples in one update.
        max_gpu_batch_size: samples that fit one GPU at once.
        gpus: workers that share the batch. By default one for each process where torchrun started several, else the
            GPUs that torch sees, else 1; 0 is 1 as well.

    Raises:
        BatchError: a size is not a positive integer, or ``gpus`` is no multiple of the number of processes.

    >>> init(100, 64, gpus=1)
    >>> elastic.steps, elastic.batch_size, elastic.micro_batch_sizes
    (2, 50, [50, 50])
    """
    elastic._init(global_batch_size, max_gpu_batch_size, gpus)
