"""DLRM: learn to predict clicks from integers and categories, with the categories' tables outside the compute device.

As a command, ``speedswap dlrm 'day_*.gz' --output DIR``; as a function::

    from speedswap.apps.dlrm import DlrmSettings, train

    result = train(DlrmSettings(samples=("day_*.gz",)))
    print(result.best)

and afterwards ``load(output).predict(samples)``, or ``speedswap predict DIR ROWS``.

A run streams samples from files in Criteo's format (``criteo``) or generates them, draws batches and sets samples apart
(``samples``, ``stream``), trains tables and layers, predicts the samples set apart (``model``, ``training``) and keeps
the last and the best state.
"""

from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.model import DLRM, Embeddings, Scores
from speedswap.apps.dlrm.samples import SamplePosition, Samples
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.stream import ClickBatch, Data, GeneratedSamples
from speedswap.apps.dlrm.training import DlrmRun, Evaluation, Point, evaluate, load, train, train_step
from speedswap.apps.errors import CheckpointError, SamplesError, SettingsError

Settings, Run = DlrmSettings, DlrmRun

__all__ = [
    "DLRM",
    "CheckpointError",
    "ClickBatch",
    "Data",
    "DlrmRun",
    "DlrmSettings",
    "Embeddings",
    "Evaluation",
    "GeneratedSamples",
    "Point",
    "Run",
    "SampleFiles",
    "SamplePosition",
    "Samples",
    "SamplesError",
    "Scores",
    "Settings",
    "SettingsError",
    "evaluate",
    "find_files",
    "load",
    "train",
    "train_step",
]
