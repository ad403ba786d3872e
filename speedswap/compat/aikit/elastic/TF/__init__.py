"""Elastic batches for Keras 3, on any of its backends."""

from __future__ import annotations

from speedswap.compat.aikit import elastic
from speedswap.compat.aikit.elastic.TF import model, models
from speedswap.compat.aikit.keras_extra import keras

__all__ = ["init", "model", "models"]


def init(global_batch_size: int, max_gpu_batch_size: int, gpus: int | None = None) -> None:
    """Share a global batch out over the GPUs that train together; the results are attributes of ``elastic``.

    Args:
        global_batch_size: samples in one update.
        max_gpu_batch_size: samples that fit one GPU at once.
        gpus: workers that share the batch. By default the devices of ``keras.distribution``'s present distribution,
            else one for each process: without a distribution, Keras trains on one device.

    Raises:
        BatchError: a size is not a positive integer, or ``gpus`` is no multiple of the number of processes.
    """
    distribution = keras.distribution.distribution()
    if gpus is None:
        gpus = elastic._processes()[0] if distribution is None else int(distribution.device_mesh.devices.size)
    elastic._init(global_batch_size, max_gpu_batch_size, gpus)
