"""Calls that all ranks of a group make: what ends one of them on a rank, before the ranks have met, is told to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import nn

from speedswap.collectives.group import RankGroup

__all__ = ["of_all_ranks"]

P = ParamSpec("P")
R = TypeVar("R")


def of_all_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Let the other ranks learn of any error in a function that all of them call, its arguments' checks included.

    Args:
        function: one of its first two arguments, or ``model`` or ``table``, is an object with ``ranks``, a
            :class:`RankGroup` or None, a model that has some in it or a mapping of some; or it makes one for a
            ``process_group``.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks = False if not args or "process_group" in kwargs else getattr(args[0], "ranks", False)
        if ranks is not None and not isinstance(ranks, RankGroup):
            ranks = _ranks_among(args, kwargs)
        if ranks is None:
            return function(*args, **kwargs)
        with ranks.call():
            return function(*args, **kwargs)

    return call


def _ranks_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankGroup | None:
    if kwargs.get("process_group") is not None:
        return RankGroup.of(kwargs["process_group"])
    for given in (*args[:2], kwargs.get("model"), kwargs.get("table")):
        within: Iterable[Any] = [given]
        if isinstance(given, Mapping):  # of modules
            within = given
        elif isinstance(given, nn.Module) and "_modules" in vars(given) and not hasattr(given, "ranks"):
            within = given.modules()  # unless it is just being made
        for each in within:
            ranks = getattr(each, "ranks", False)
            if ranks is None or isinstance(ranks, RankGroup):
                return ranks
    return None
