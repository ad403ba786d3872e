"""Functions that ``torch.compile`` leaves alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from speedswap.errors import WeightError
from speedswap.swapping.refusals import NOT_TAKEN_ALONG

__all__ = ["outside_graphs"]

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, but only once there is a compiler: importing that takes as long as torch itself."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_exporting():
            raise WeightError(f"{type(args[0]).__name__} was to be exported: {NOT_TAKEN_ALONG}")
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            disabled: Any = getattr(function, "_outside_graphs", None)
            if disabled is None:
                disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
                function._outside_graphs = disabled  # type: ignore[attr-defined]
            return disabled(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
