"""Types of settings, as their annotations say: a value of another one is refused when the settings are made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from speedswap.apps.errors import SettingsError

__all__ = ["of_type"]

_KINDS: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    bool: (bool, "True or False"),
    type(None): (type(None), "None"),
}


def of_type(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a setting, a string as a path and a list as a tuple where the setting is one.

    Args:
        name: the setting's.
        value: as it was given.
        hint: its annotation: int, float, str, bool, Path, None, tuples of one of them, mappings, and unions of these.

    Raises:
        SettingsError: it is of another type.

    >>> of_type("layers", [64, 32], tuple[int, ...])
    (64, 32)
    """
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        if _is_of(value, kind):
            is_tuple = get_origin(kind) is tuple
            return tuple(value) if is_tuple else Path(value) if kind is Path else value
    raise SettingsError(f"{name} is {value!r}: give {' or '.join(map(_in_words, kinds))}")


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    if get_origin(kind) is tuple:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_sequence and all(_is_of(each, get_args(kind)[0]) for each in value)
    if (origin := get_origin(kind)) is not None:
        return isinstance(value, origin)
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    if kind is Path:
        return "a path"
    if get_origin(kind) is tuple:
        return f"a tuple, each of its parts {_in_words(get_args(kind)[0])}"
    return "a mapping" if get_origin(kind) is not None else _KINDS[kind][1]
