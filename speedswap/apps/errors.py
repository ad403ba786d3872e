"""What can be wrong with what any of the applications is asked to do."""

from __future__ import annotations

from speedswap.errors import SpeedswapError

__all__ = ["OutputError", "SettingsError"]


class SettingsError(SpeedswapError, ValueError):
    """A setting has a value that cannot be trained with."""


class OutputError(SpeedswapError, OSError):
    """A file that a run writes, a result or a temporary one, cannot be written."""
