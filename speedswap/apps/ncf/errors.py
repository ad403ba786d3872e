"""What can be wrong with what a run was asked to do; each is raised before anything is written."""

from __future__ import annotations

from speedswap.apps.errors import SettingsError
from speedswap.errors import SpeedswapError

__all__ = ["CheckpointError", "RatingsError", "SettingsError", "UnknownUserError"]


class RatingsError(SpeedswapError, ValueError):
    """The ratings cannot be read, or have nothing to learn from or to test on."""


class CheckpointError(SpeedswapError, ValueError):
    """There is no checkpoint to go on from, or it belongs to another run."""


class UnknownUserError(SpeedswapError, LookupError):
    """A user was asked for whom the ratings do not have."""
