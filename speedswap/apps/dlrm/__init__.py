"""DLRM."""

from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.errors import CheckpointError, SamplesError

__all__ = ["CheckpointError", "SampleFiles", "SamplesError", "find_files"]
