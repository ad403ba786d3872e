"""How functions are told apart."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["closure", "identity", "name_of"]


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
