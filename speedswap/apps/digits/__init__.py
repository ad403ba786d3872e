"""Handwritten digits, in batches that do not fit into memory.

As a command, ``speedswap digits --memory-budget 100samples --compare``; as a function::

    from speedswap.apps.digits import Settings, train

    result = train(Settings(batch=1024, memory_budget="100samples"))
    print(result.accuracy, result.steps[-1].micro_batch_size)

A run reads the images (``task``), measures the memory of a micro-batch, trains a small network within a limit and saves
its figures (``training``).
"""

from speedswap.apps.digits.task import Budget, DigitsNet, DigitsSettings, DigitsSplit, Images, read_split
from speedswap.apps.digits.training import DigitsRun, DigitsStep, Footprint, measure_footprint, memory_report, train
from speedswap.apps.errors import ImagesError, SettingsError
from speedswap.batching import LimitedMemory

Run, Settings = DigitsRun, DigitsSettings

__all__ = [
    "Budget",
    "DigitsNet",
    "DigitsRun",
    "DigitsSettings",
    "DigitsSplit",
    "DigitsStep",
    "Footprint",
    "Images",
    "ImagesError",
    "LimitedMemory",
    "Run",
    "Settings",
    "SettingsError",
    "measure_footprint",
    "memory_report",
    "read_split",
    "train",
]
