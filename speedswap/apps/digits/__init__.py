"""Handwritten digits, in batches that do not fit into memory.

As a command, ``speedswap digits --memory-budget 100samples --compare``; as a function::

    from speedswap.apps.digits import Settings, train

    result = train(Settings(batch=1024, memory_budget="100samples"))
    print(result.accuracy, result.steps[-1].micro_batch_size)

A run reads the images (``images``), measures what a micro-batch takes (``footprint``), sets up memory with a
limit (``memory``), trains a small network in it (``model``, ``training``) and writes down how that went (``output``).
"""

from speedswap.apps.digits.errors import ImagesError, SettingsError
from speedswap.apps.digits.footprint import Footprint, measure_footprint
from speedswap.apps.digits.images import Images, Split, read_split
from speedswap.apps.digits.memory import LimitedMemory
from speedswap.apps.digits.model import DigitsNet
from speedswap.apps.digits.output import figures, memory_report, save
from speedswap.apps.digits.settings import Budget, Settings
from speedswap.apps.digits.training import Epoch, Result, Step, train

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
