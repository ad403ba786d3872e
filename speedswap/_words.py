"""Wording of messages."""

from __future__ import annotations

import re

__all__ = ["AVERAGE_OTHERS", "a_kind", "size_in_words"]

AVERAGE_OTHERS = (  # of AveragedModel, EMA and SWA
    "an average of a model over its steps is speedswap.optim.Averaged(model); or average a module without the "
    "embedding, or all parameters but speedswap.parameters_to_ignore(model)"
)

# Read aloud: "an int", "an SGD", "an ndarray"; but "a UNet", "a UserDict", "a UnionFind".
_STARTS_WITH_A_VOWEL = re.compile(r"_*(?:[AEIOaeio]|[Uu]n(?!i)|[Uu][mlp]|[FHLMNRSX][A-Z]|ndarray)")


def a_kind(value: object) -> str:
    """Return the name of a value's type with its indefinite article.

    Example:
        >>> import torch
        >>> a_kind(torch.optim.Adam([torch.ones(1)])), a_kind([1])
        ('an Adam', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if _STARTS_WITH_A_VOWEL.match(name) else 'a'} {name}"


def size_in_words(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that it reaches.

    Example:
        >>> size_in_words(3 << 29), size_in_words(100)
        ('1.5 GiB', '100 bytes')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"
