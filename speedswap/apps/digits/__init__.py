"""Handwritten digits, in batches that do not fit into memory.

As a command, ``speedswap digits --memory-budget 100samples --compare``; as a function::

    from speedswap.apps.digits import Settings, train

    result = train(Settings(batch=1024, memory_budget="100samples"))
    print(result.accuracy, result.steps[-1].micro_batch_size)

A run reads the images (``task``), measures the memory of a micro-batch, trains a small network within a limit and saves
its figures (``training``).
"""

from speedswap.apps.digits.task import DigitsNet
from speedswap.apps.digits.task import DigitsSettings as Settings
from speedswap.apps.digits.training import DigitsRun as Run
from speedswap.apps.digits.training import memory_report, train

__all__ = ["DigitsNet", "Run", "Settings", "memory_report", "train"]
