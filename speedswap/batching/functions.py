"""How functions are told apart."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

__all__ = ["closure", "identity", "kind_of", "name_of"]

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
        return value.__func__.__code__, kind_of(value.__self__, below)
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *map(_contents, value.__closure__ or ()))
        return (value.__code__, *(kind_of(one, below) for one in given))
    if isinstance(value, nn.Module):
        return (kind, *((name, one) for name, one in vars(value).items() if isinstance(one, _SETTINGS)))
    return kind


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
