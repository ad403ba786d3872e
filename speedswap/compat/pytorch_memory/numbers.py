"""Bytes and products, as the predecessor counted them."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["GiB", "KiB", "MiB", "i_arr_mul", "round_to"]


def KiB(coef: float = 1) -> int:
    """Bytes of so many KiB.

    >>> KiB(1.5), MiB(), GiB(2)
    (1536, 1048576, 2147483648)
    """
    return math.floor(coef * 1024)


def MiB(coef: float = 1) -> int:
    """Bytes of so many MiB."""
    return math.floor(coef * 1024**2)


def GiB(coef: float = 1) -> int:
    """Bytes of so many GiB."""
    return math.floor(coef * 1024**3)


def round_to(number: int, modulo: int) -> int:
    """The largest multiple of ``modulo`` that is not above ``number``.

    >>> round_to(17, 5)
    15
    """
    return number - number % modulo


def i_arr_mul(array: Iterable[int]) -> int:
    """The product of integers.

    >>> i_arr_mul((3, 4, 5))
    60
    """
    return math.prod(array)
