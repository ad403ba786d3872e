"""The attacks there are: every module of this package that has an ``ATTACK``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

import torture
from torture.attack import Attack

__all__ = ["attacks", "named"]


def attacks() -> list[Attack]:
    """Import every attack, sorted by name."""
    modules = [
        importlib.import_module(f"torture.{module.name}")
        for module in pkgutil.iter_modules(torture.__path__)
        if module.name != "__main__"
    ]
    found: list[Attack] = [module.ATTACK for module in modules if hasattr(module, "ATTACK")]
    return sorted(found, key=lambda attack: attack.name)


def named(names: Sequence[str]) -> list[Attack]:
    """Pick attacks by name.

    Raises:
        SystemExit: there is none of a name.
    """
    known = {attack.name: attack for attack in attacks()}
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no attack {name!r}; choose from {', '.join(known)}")
    return [known[name] for name in names]
