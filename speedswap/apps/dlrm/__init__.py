"""DLRM."""

from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.generated import GeneratedSamples
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.errors import CheckpointError, SamplesError

__all__ = ["CheckpointError", "GeneratedSamples", "SampleFiles", "SamplesError", "Scores", "find_files"]
