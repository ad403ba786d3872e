"""Handlers of signals, set together."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

__all__ = ["set_handlers"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def set_handlers(handlers: Mapping[int, Any]) -> None:
    """Set all signal handlers, even if one that was just set is called and raises."""
    left = dict(handlers)
    try:
        while left:
            number = next(iter(left))
            signal.signal(number, left[number])
            del left[number]
    finally:
        if left:
            set_handlers(left)
