"""Checkpoints of a training: tables, dense parameters, optimizers and random generators, committed as one.

``saving`` and ``loading`` have the two functions. A checkpoint is a folder among those of its run (``folders``) with a
manifest (``format``) and files of tensors: tables are copied or referred to, the ``dense`` half is tensors and data.
"""

from speedswap.swapping.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from speedswap.swapping.checkpoints.saving import SavedCheckpoint, save_checkpoint

__all__ = ["LoadedCheckpoint", "SavedCheckpoint", "load_checkpoint", "save_checkpoint"]
