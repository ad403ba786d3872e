"""infinitybatch 1.0 under its own names, over :class:`speedswap.BatchSplitter` and :mod:`speedswap.monitor`.

With ``import speedswap.compat.infinitybatch as infinitybatch`` in place of ``import infinitybatch`` a script runs
unchanged, its custom loop with ``ib.batch_()`` included. Differences:

* Memory. Only one micro-batch's activations are in memory at a time; moving outputs to another device did not free
  what their graphs held. Micro-batches are as large as fits, not single samples, so that batch normalization works.
* Gradients are those of the whole batch, BatchNorm aside. Torch's own criteria are weighed by the counts of their
  means; any other one sees the outputs of the whole batch. The loss of a ``Step`` sees parts: one that compares
  samples, or is reduced otherwise than declared, is an error.
* Batches may be tuples or dictionaries, and so may outputs. A sample's output may be a single number.
* ``batch_()`` without an argument takes the batch that ``ib.dataloader`` yielded last. ``loss()`` and ``backward()``
  work in a custom loop too.
* ``outputs``, ``inputs`` and ``targets`` keep nothing unless ``containers`` says so; ``losses`` is kept as before.
* ``model``, ``optimizer`` and ``criterion`` may be set at any time; ``changes`` lists their changes.
  ``optimier`` is ``optimizer``, with a warning.
* Without CUDA everything works on the CPU, without a warning. Warnings have codes and levels.
* New: ``evaluate``, callbacks, ``scaler``, ``autocast``, ``scheduler``, several models, criteria and optimizers by
  ``steps``, ``count_parameters`` (with the ``monitor`` extra).
* The comparisons in ``tools`` are no longer inverted, and ``free_cache`` works.
"""

from speedswap.compat.infinitybatch import tools
from speedswap.compat.infinitybatch.changes import CODES, InfinityBatchError, InfinityBatchWarning
from speedswap.compat.infinitybatch.data import DiskStorage, HostStorage, RunningStatistics, TrainingStep
from speedswap.compat.infinitybatch.trainer import InfinityBatch

__all__ = [
    "CODES",
    "DiskStorage",
    "HostStorage",
    "InfinityBatch",
    "InfinityBatchError",
    "InfinityBatchWarning",
    "RunningStatistics",
    "Step",
    "Storage",
    "tools",
]

Step, Storage = TrainingStep, HostStorage
