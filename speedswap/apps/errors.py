"""What can be wrong with what any of the applications is asked to do."""

from __future__ import annotations

from speedswap.errors import SpeedswapError

__all__ = ["SettingsError"]


class SettingsError(SpeedswapError, ValueError):
    """A setting has a value that cannot be trained with."""
