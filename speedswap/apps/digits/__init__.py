"""Handwritten digits, in batches that do not fit into memory.

As a command, ``speedswap digits --memory-budget 100samples --compare``; as a function::

    from speedswap.apps.digits import Settings, train

    result = train(Settings(batch=1024, memory_budget="100samples"))
    print(result.accuracy, result.steps[-1].micro_batch_size)

A run reads the images (``task``), measures the memory of a micro-batch, trains a small network within a limit
(``training``) and saves its figures (``cli``).
"""

from speedswap.apps.digits.cli import figures, memory_report, save
from speedswap.apps.digits.task import Budget, DigitsNet, Images, read_split
from speedswap.apps.digits.task import DigitsSettings as Settings
from speedswap.apps.digits.task import DigitsSplit as Split
from speedswap.apps.digits.training import DigitsEpoch as Epoch
from speedswap.apps.digits.training import DigitsResult as Result
from speedswap.apps.digits.training import DigitsStep as Step
from speedswap.apps.digits.training import Footprint, measure_footprint, train
from speedswap.apps.errors import ImagesError, SettingsError
from speedswap.batching import LimitedMemory

__all__ = [
    "Budget",
    "DigitsNet",
    "Epoch",
    "Footprint",
    "Images",
    "ImagesError",
    "LimitedMemory",
    "Result",
    "Settings",
    "SettingsError",
    "Split",
    "Step",
    "figures",
    "measure_footprint",
    "memory_report",
    "read_split",
    "save",
    "train",
]
