"""Warnings issued once per process, at the responsible line of the user's code."""

from __future__ import annotations

import sys
import threading
import warnings

from speedswap.errors import SpeedswapWarning

__all__ = ["users_level", "warn_once"]

_said: set[str] = set()
_said_lock = threading.Lock()


def warn_once(message: str) -> None:
    """Warn, the first time in this process."""
    with _said_lock:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, SpeedswapWarning, stacklevel=users_level())


def users_level() -> int:
    """Return the caller's stacklevel of the innermost frame that is neither torch's nor this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "speedswap"):
        level, frame = level + 1, frame.f_back
    return level
