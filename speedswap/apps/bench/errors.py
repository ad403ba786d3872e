"""What can be wrong with a measurement."""

from __future__ import annotations

from speedswap.errors import SpeedswapError

__all__ = ["BenchmarkError", "WrongResultError"]


class BenchmarkError(SpeedswapError, ValueError):
    """What was asked for cannot be measured here; nothing was."""


class WrongResultError(SpeedswapError, AssertionError):
    """A candidate gives another result than it should; nothing of it was timed."""
