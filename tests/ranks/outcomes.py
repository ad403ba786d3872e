"""The outcome of a call on one rank, as text for the process that compares the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(call: Callable[[], Any]) -> str | None:
    """Return the error of a call with its class, or None."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
