"""DLRM: learn to predict clicks from integers and categories, with the categories' tables outside the compute device.

As a command, ``speedswap dlrm 'day_*.gz' --output DIR``; as a function::

    from speedswap.apps.dlrm import DlrmSettings, train

    result = train(DlrmSettings(samples=("day_*.gz",)))
    print(result.best)

and afterwards ``load(output).predict(samples)``, or ``speedswap predict DIR ROWS``.

A run streams samples from files in Criteo's format (``criteo``) or makes some up (``generated``), draws
batches and sets samples apart (``samples``, ``stream``), trains tables and layers (``model``, ``training``),
predicts the samples set apart (``scores``) and keeps the last and the best state
(``checkpoint``).
"""

from speedswap.apps.dlrm.checkpoint import load
from speedswap.apps.dlrm.cli import figures, save
from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.generated import GeneratedSamples
from speedswap.apps.dlrm.model import DLRM, Embeddings
from speedswap.apps.dlrm.samples import SamplePosition, Samples
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.stream import ClickBatch, Data
from speedswap.apps.dlrm.training import DlrmResult, Evaluation, Point, evaluate, train, train_step
from speedswap.apps.errors import CheckpointError, SamplesError, SettingsError

Settings, Result = DlrmSettings, DlrmResult

__all__ = [
    "DLRM",
    "CheckpointError",
    "ClickBatch",
    "Data",
    "DlrmResult",
    "DlrmSettings",
    "Embeddings",
    "Evaluation",
    "GeneratedSamples",
    "Point",
    "Result",
    "SampleFiles",
    "SamplePosition",
    "Samples",
    "SamplesError",
    "Scores",
    "Settings",
    "SettingsError",
    "evaluate",
    "figures",
    "find_files",
    "load",
    "save",
    "train",
    "train_step",
]
