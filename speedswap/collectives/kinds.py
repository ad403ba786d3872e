"""The kinds of work that ranks do together, as their lines tell them."""

from __future__ import annotations

import enum

__all__ = ["ANYTHING", "Kind"]

ANYTHING = -1  # the number of the object of a task that is about neither a table nor a map


class Kind(enum.IntEnum):
    """The kind of a task, the same on all ranks."""

    SEED = 0
    # A table's rows
    LOOK_UP = enum.auto()
    GATHER = enum.auto()
    SCATTER = enum.auto()
    RESET = enum.auto()
    READ = enum.auto()
    SCORE = enum.auto()
    MAKE = enum.auto()
    SAVE = enum.auto()
    ALONE = enum.auto()
    # A training step
    GRADIENTS = enum.auto()
    SHARES = enum.auto()
    NORM = enum.auto()
    FINITE = enum.auto()
    STEP = enum.auto()
    # A batch that is split
    AT_OWN_PACE = enum.auto()
    BACKWARD = enum.auto()
    BACKWARD_COUPLED = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_OF_SHARDS = enum.auto()
    PASSES = enum.auto()
    # A lookahead
    BEGIN = enum.auto()
    ERRAND = enum.auto()
    END = enum.auto()
    # Keys
    KEYS = enum.auto()
    KNOWN_KEYS = enum.auto()
    REOPENED = enum.auto()
    PARTS = enum.auto()
    # The whole job
    CHECKPOINT = enum.auto()
    AGREE = enum.auto()
