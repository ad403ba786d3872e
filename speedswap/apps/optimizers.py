"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from speedswap.apps.errors import SettingsError

__all__ = ["named_optimizer", "plain"]


def named_optimizer(name: str, own: Mapping[str, type[Optimizer]] | None = None) -> type[Optimizer]:
    """The optimizer of a name such as ``adam``: one of ``torch.optim``, or of an application's own.

    Raises:
        SettingsError: there is none.
    """
    known = {plain(key): value for key, value in (own or {}).items()}
    names = [*(own or {})]
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            known[plain(value.__name__)] = value
            names.append(plain(value.__name__))
    if plain(name) not in known:
        count = len(own or {})
        raise SettingsError(f"optimizer is {name!r}: give one of {', '.join(names[:count] + sorted(names[count:]))}")
    return known[plain(name)]


def plain(name: str) -> str:
    """A name without what people write differently."""
    return name.lower().replace("_", "").replace("-", "")
