"""User functions: named, distinguished, and refused if they cannot be retried."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.errors import BatchError

_SETTINGS = (str, bool, int, float)


def name_of(function: Any) -> str:
    """Return a function's name for messages, with that of its class but not of the functions around it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def require_function(name: str, function: object) -> None:
    """Raise BatchError unless an argument is a function, and say what to do with a loss that was computed already."""
    if isinstance(function, Tensor):
        raise BatchError(
            f"{name} is a tensor, for which the whole batch went through the model; give a function that computes the "
            "loss of the samples it is called with, and the batch: splitter.backward(lambda x, y: loss(model(x), y), "
            "x, y)"
        )
    if not callable(function):
        raise BatchError(f"{name} is {a_kind(function)}; give a function")


def counted(normalizer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | float:
    """Return what a normalizer counts in some samples; BatchError unless it is one number."""
    count: Any = normalizer(*args, **kwargs)
    if not isinstance(count, Tensor | Real) or (isinstance(count, Tensor) and count.numel() != 1):
        found = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else a_kind(count)
        raise BatchError(f"normalizer(…) returned {found}; return one number, as (targets != -100).sum() is")
    return count  # type: ignore[return-value]


def require_integer(name: str, value: Any, least: int = 1) -> int:
    """Return an argument as an integer, and raise BatchError unless it is one of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise BatchError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return operator.index(value)


def key_of(function: Callable[..., Any]) -> Hashable:
    """Return a function's code as a key, or the name of its type where it has none; keeps nothing alive but code.

    That is the code below partials, methods and decorators: one for all closures that a definition makes, so that a
    lambda in a loop is the same function each time.
    """
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            function = getattr(function, "__wrapped__", function)
    code: Hashable = getattr(function, "__code__", None)
    kind = function if isinstance(function, type) else type(function)
    return code or f"{kind.__module__}.{kind.__qualname__}"


def kind_of(value: Any, depth: int = 3) -> Hashable:
    """Return what a function computes with, as far as that is known without naming objects.

    Two functions of one code are of one kind if the values they refer to are: other functions by their code, modules by
    their class and settings, such as a criterion's ``reduction``, and everything else by its class. So a lambda around
    a new batch is of one kind in every step, and one around another criterion is of another.
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


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def check_function(function: Any) -> None:
    """Raise if a function cannot be retried.

    Raises:
        BatchError: it cannot be called, or does its work after it has returned.
    """
    if not callable(function):
        raise BatchError(f"{function!r} is not a function; options are given by name, as in initial=512")
    for is_late, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_late(function):
            raise BatchError(
                f"{name_of(function)} is {kind}, which does its work after it has returned, when nothing can retry it; "
                "let it call a plain function that is retried"
            )
