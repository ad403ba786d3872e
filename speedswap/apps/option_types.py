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
    """Return the value of a setting: a string as a path, a list as a tuple, NumPy's numbers as Python's.

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
            return _as(value, kind)
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


def _as(value: Any, kind: Any) -> Any:
    """Return a value of this kind as files hold it."""
    if get_origin(kind) is tuple:
        return tuple(_as(each, get_args(kind)[0]) for each in value)
    if kind in (int, float):
        return int(value) if isinstance(value, Integral) else float(value)
    return Path(value) if kind is Path else value


def _in_words(kind: Any) -> str:
    if kind is Path:
        return "a path"
    if get_origin(kind) is tuple:
        return f"a tuple, each of its parts {_in_words(get_args(kind)[0])}"
    return "a mapping" if get_origin(kind) is not None else _KINDS[kind][1]
