"""What can be wrong with what a run was asked to do; each is raised before anything is written."""

from __future__ import annotations

from speedswap.apps.errors import SettingsError
from speedswap.errors import SpeedswapError

__all__ = ["ImagesError", "SettingsError"]


class ImagesError(SpeedswapError, RuntimeError):
    """The images cannot be had."""
