"""What can be wrong with what a run was asked to do; each is raised before anything is written."""

from __future__ import annotations

from speedswap.apps.errors import SettingsError
from speedswap.errors import SpeedswapError

__all__ = ["CorpusError", "PairsError", "SettingsError"]


class CorpusError(SpeedswapError, ValueError):
    """The corpus cannot be read, or has nothing to learn from."""


class PairsError(SpeedswapError, ValueError):
    """A file of word pairs with human similarity cannot be read."""
