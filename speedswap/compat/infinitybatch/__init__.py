"""infinitybatch 1.0 under its own names, over :class:`speedswap.BatchSplitter` and :mod:`speedswap.monitor`.

``import speedswap.compat.infinitybatch as infinitybatch`` in place of ``import infinitybatch``, and a script runs as it
is, its custom loop with ``ib.batch_()`` included. What differs:

* Memory. Only one micro-batch's activations are in memory at a time; moving outputs to another device did not free
  what their graphs held. Micro-batches are as large as fits, not single samples, so that batch normalization works.
* Gradients are those of the whole batch, BatchNorm aside. Torch's own criteria are weighed by what their means are
  over; any other one sees the outputs of the whole batch. The loss of a ``Step`` sees parts: one that compares samples,
  or is reduced otherwise than declared, is an error.
* Batches may be tuples or dictionaries, and so may outputs. A sample's output may be a single number.
* ``batch_()`` without an argument takes the batch that ``ib.dataloader`` has handed out last. ``loss()`` and
  ``backward()`` work in one's own loop too.
* ``outputs``, ``inputs`` and ``targets`` keep nothing unless ``containers`` says what; ``losses`` is kept as before.
* ``model``, ``optimizer`` and ``criterion`` may be set as often as one likes; ``changes`` has what became of them.
  ``optimier`` is ``optimizer``, with a warning.
* Without CUDA everything works, on the CPU, and no warning is given of that. Warnings have codes and levels.
* New: ``evaluate``, callbacks, ``scaler``, ``autocast``, ``scheduler``, several models, criteria and optimizers by
  ``steps``, ``count_parameters``.
* The comparisons in ``tools`` are the right way round, and ``free_cache`` works.
"""

from speedswap.compat.infinitybatch import tools
from speedswap.compat.infinitybatch.codes import CODES, InfinityBatchError, InfinityBatchWarning
from speedswap.compat.infinitybatch.steps import Step
from speedswap.compat.infinitybatch.trainer import InfinityBatch

__all__ = ["CODES", "InfinityBatch", "InfinityBatchError", "InfinityBatchWarning", "Step", "tools"]
