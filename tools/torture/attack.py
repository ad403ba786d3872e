"""What every attack is made of: rounds with a seed, each of which finds that a promise held, or that it did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Attack", "Broken", "Skipped"]


class Broken(AssertionError):
    """A promise that did not hold; the message says which, with the values that show it."""


class Skipped(Exception):
    """A round that cannot be played here; the message says what it needs."""


@dataclass(frozen=True)
class Attack:
    """One way to attack.

    Attributes:
        name: as the command line and the summary have it.
        promise: what must hold, in one line.
        round: plays one round in an empty folder, with all its randomness from the seed. Returns what kind of round it
            was, for the counts; raises :class:`Broken` where the promise did not hold, :class:`Skipped` where it cannot
            be played. Any other error, a crash of the process and a round that takes too long are findings too.
        seconds: a round that takes longer hangs.
        quick: rounds for the bounded slice that every test run plays.
    """

    name: str
    promise: str
    round: Callable[[int, Path], str]
    seconds: float = 30.0
    quick: int = 1
