"""Warnings, each with a code, issued at the responsible line of the user's code."""

from __future__ import annotations

import sys
import threading
import warnings

from speedswap.errors import SpeedswapWarning

__all__ = ["warn", "warn_once"]

_said: set[str] = set()
_said_lock = threading.Lock()


def warn(code: str, message: str, category: type[Warning] = SpeedswapWarning) -> None:
    """Warn; this is the only place where the package does.

    Args:
        code: the warning's, such as ``"SW401"``, which docs/warnings.md explains. The message begins with it.
        message: the event in detail, and the remedy.
        category: the class of the warning.
    """
    warnings.warn(category(f"{code}: {message}"), stacklevel=_users_level())


def warn_once(code: str, message: str) -> None:
    """Warn, the first time in this process that a code has this message."""
    with _said_lock:
        if code + message in _said:
            return
        _said.add(code + message)
    warn(code, message)


def _users_level() -> int:
    """Return the caller's stacklevel of the innermost frame that is neither torch's nor this package's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "speedswap"):
        level, frame = level + 1, frame.f_back
    return level
