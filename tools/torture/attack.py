"""The parts of every attack: rounds with a seed, in each of which a promise holds or is broken."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torture

__all__ = ["Attack", "Broken", "Skipped", "attacks", "named"]


class Broken(AssertionError):
    """A broken promise; the message names it, with the values that show it."""


class Skipped(Exception):
    """A round that cannot be played here; the message says what it needs."""


@dataclass(frozen=True)
class Attack:
    """An attack on one promise.

    Attributes:
        name: as the command line and the summary have it.
        promise: what must hold, in one line.
        round: plays one round in an empty folder, with all its randomness from the seed. Returns what kind of round it
            was, for the counts, or several counts by kind; raises :class:`Broken` where the promise did not hold,
            :class:`Skipped` where it cannot be played. Any other error, a crash of the process and a round that takes
            too long are findings too.
        seconds: a round that takes longer hangs.
        quick: rounds for the bounded slice that every test run plays.
    """

    name: str
    promise: str
    round: Callable[[int, Path], str | Mapping[str, int]]
    seconds: float = 30.0
    quick: int = 1


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
        SystemExit: no attack has one of the names.
    """
    known = {attack.name: attack for attack in attacks()}
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no attack {name!r}; choose from {', '.join(known)}")
    return [known[name] for name in names]
