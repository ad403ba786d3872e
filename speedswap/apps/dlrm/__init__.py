"""DLRM: learn to predict clicks from integers and categories, with the categories' tables outside the compute device.

As a command, ``speedswap dlrm 'day_*.gz' --output DIR``; as a function::

    from speedswap.apps.dlrm import DlrmSettings, train

    result = train(DlrmSettings(samples=("day_*.gz",)))
    print(result.best)

and afterwards ``load(output).predict(samples)``, or ``speedswap predict DIR ROWS``.

A run streams samples from files in Criteo's format (``criteo``) or generates them, draws batches and sets samples apart
(``stream``), trains tables and layers, predicts the samples set apart (``model``, ``training``) and keeps
the last and the best state.
"""

from speedswap.apps.dlrm.criteo import SampleFiles, Samples
from speedswap.apps.dlrm.model import DLRM
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.stream import GeneratedSamples
from speedswap.apps.dlrm.training import DlrmRun, load, train

Settings, Run = DlrmSettings, DlrmRun

__all__ = ["DLRM", "DlrmRun", "DlrmSettings", "GeneratedSamples", "Run", "SampleFiles", "Samples", "Settings"]
__all__ += ["load", "train"]
