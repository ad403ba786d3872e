"""Damage to a table's files: found by checks of what was read, and reported as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speedswap.errors import TableFormatError

__all__ = ["is_int", "ranges_of", "require", "says_damaged"]


@contextmanager
def says_damaged(what: str, remedy: str = "") -> Iterator[None]:
    """Turn failed checks, and contents of a wrong type, into a TableFormatError.

    Args:
        what: the bytes' place, for the message.
        remedy: for its end.
    """
    try:
        yield
        return
    except Damage as error:
        problem = str(error)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise TableFormatError(f"{what} is damaged: {problem}{remedy}")


def require(condition: bool, problem: str) -> None:
    """Raise unless a condition holds; for use under :func:`says_damaged`."""
    if not condition:
        raise Damage(problem)


def is_int(value: object, low: int, high: int) -> bool:
    """Tell whether a value read is a whole number within limits."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def ranges_of(numbers: NDArray[Any]) -> list[range]:
    """Return ascending whole numbers as ranges."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


class Damage(Exception):
    """A problem of some bytes."""
