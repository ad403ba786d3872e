"""Errors of the applications: a run cannot do what it was asked to.

All but ``OutputError`` and ``WrongResultError`` are raised before the run has written anything.
"""

from __future__ import annotations

from contextvars import ContextVar

from speedswap.errors import CheckpointError as CheckpointError
from speedswap.errors import SpeedswapError

AS_OPTIONS: ContextVar[bool] = ContextVar("AS_OPTIONS", default=False)
"""True in a command, whose user knows settings by their options."""


def named(setting: str) -> str:
    """Return the name of a setting as the user writes it: Python's, or in a command the option's."""
    return f"-{'-' * (len(setting) > 1)}{setting.replace('_', '-')}" if AS_OPTIONS.get() else setting


class SettingsError(SpeedswapError, ValueError):
    """A setting with a value that cannot be trained with."""


class OutputError(SpeedswapError, OSError):
    """A file of a run, a result or a temporary one, that cannot be written."""


class CorpusError(SpeedswapError, ValueError):
    """A corpus that cannot be read, or has nothing to learn from."""


class PairsError(SpeedswapError, ValueError):
    """A file of word pairs with human similarity that cannot be read."""


class ImagesError(SpeedswapError, RuntimeError):
    """Images that are not available."""


class RatingsError(SpeedswapError, ValueError):
    """Ratings that cannot be read, or have nothing to learn from or to test on."""


class SamplesError(SpeedswapError, ValueError):
    """Samples that cannot be read, or have nothing to learn from or to test on."""


class UnknownUserError(SpeedswapError, LookupError):
    """A user who is not in the ratings."""


class BenchmarkError(SpeedswapError, ValueError):
    """A measurement that is not possible here; nothing was measured."""


class WrongResultError(SpeedswapError, AssertionError):
    """A candidate whose result is wrong; none of its work was timed."""
