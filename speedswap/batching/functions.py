"""How functions are told apart."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from torch import nn

__all__ = ["alive", "closure", "identity", "kind_of", "name_of"]

_SETTINGS = (str, bool, int, float)


def identity(function: Callable[..., Any]) -> Hashable:
    """What a function is remembered by: its code, so that a lambda in a loop is the same one each time."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return function.__code__
    return f"{type(function).__module__}.{type(function).__qualname__}"


def closure(function: Callable[..., Any]) -> Hashable:
    """A function's code with the objects that it refers to."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        return function.__func__, id(function.__self__)
    cells = getattr(function, "__closure__", None) or ()
    return (
        identity(function),
        id(function) if not isinstance(function, types.FunctionType) else None,
        *(id(cell.cell_contents) for cell in cells),
    )


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def kind_of(value: Any, depth: int = 3) -> Hashable:
    """What a function computes with, as far as that can be told without naming objects.

    Two functions of one code are of one kind if what they refer to is: other functions by their code, modules by their
    class and settings, such as a criterion's ``reduction``, and everything else by its class. So a lambda around a new
    batch is of one kind in every step, and one around another criterion is of another.
    """
    kind: type = type(value)
    if depth == 0:
        return f"{kind.__module__}.{kind.__qualname__}"
    below = depth - 1
    if isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.values())
        return (kind_of(value.func, below), *value.keywords, *(kind_of(one, below) for one in given))
    if isinstance(value, types.MethodType):
        return kind_of(value.__func__, below), kind_of(value.__self__, below)
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *map(_contents, value.__closure__ or ()))
        return (value.__code__, *(kind_of(one, below) for one in given))
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, nn.Module):
        return (kind, *((name, one) for name, one in vars(value).items() if isinstance(one, _SETTINGS)))
    return kind


def alive(function: Callable[..., Any]) -> list[weakref.ref[Any]] | None:
    """References to what :func:`closure` names by its id, which means nothing once one of them is gone.

    Returns:
        None for a function whose closure does not name all that it refers to.
    """
    if isinstance(function, functools.partial):
        return None
    if isinstance(function, types.MethodType):
        named: list[Any] = [function.__self__]
    elif isinstance(function, types.FunctionType):
        named = [_contents(cell) for cell in function.__closure__ or ()]
    else:
        named = [function]
    found = []
    for one in named:
        with suppress(TypeError):  # numbers, strings and tuples, which Python may share
            found.append(weakref.ref(one))
    return found


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
